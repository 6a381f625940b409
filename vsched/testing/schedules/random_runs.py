"""Random runs: arrivals, completions, cancellations, failures and time in any order, then recovery."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from vsched.failures import EncodeErrorKind
from vsched.kernel import SchedulerLimits
from vsched.kernel.events import Cleared, Drain, Resume
from vsched.policy_host import SeatPolicies
from vsched.testing.model_ranks.cluster import ModelCluster
from vsched.testing.schedules.requests import random_limits, random_request
from vsched.types import FinishReason

_ANSWERS = (1, 1, 2, 1, 1, 1, 5, 1, 3)
_TELLING = 4
"""One in this many requests asks for prompt log-probabilities."""
_GATED = 2
"""One in this many requests passes the front door; one in `_LEAVING` of these withdraws if it is held."""
_LEAVING = 8


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Frequencies of actions in one run; they differ between runs, because rare combinations need extreme weights."""

    submit: int
    encode: int
    generate: int
    wait: int
    abort: int
    fail: int
    lose: int
    restore: int
    retire: int
    drain: int
    resume: int
    clear: int

    @classmethod
    def draw(cls, rng: random.Random, *, faults: bool) -> Weights:
        """Draw the weights of one run."""
        return cls(
            submit=rng.choice([2, 10, 30]),
            encode=rng.choice([3, 20, 20]),
            generate=rng.choice([3, 40, 40]),
            wait=rng.choice([0, 2, 20]),
            abort=rng.choice([0, 2, 10]),
            fail=rng.choice([0, 1, 5]) if faults else 0,
            lose=rng.choice([0, 1, 5]) if faults else 0,
            restore=rng.choice([5, 30]),
            retire=rng.choice([0, 0, 1]) if faults else 0,
            drain=rng.choice([0, 0, 2]),
            resume=rng.choice([2, 10]),
            clear=rng.choice([0, 0, 1]),
        )


def run_random(
    rng: random.Random,
    policies: SeatPolicies | None = None,
    *,
    limits: SchedulerLimits | None = None,
    events: int = 80,
    faults: bool = True,
    make: Callable[[SchedulerLimits, SeatPolicies | None], ModelCluster] = ModelCluster,
) -> ModelCluster:
    """Run a random schedule, restore lost groups, drain and check; return the cluster for further checks.

    Raises:
        AssertionError: When something was lost, wrong, held too long or stuck.
    """
    cluster = make(limits or random_limits(rng), policies)
    weights = msgspec.structs.asdict(Weights.draw(rng, faults=faults))
    names = list(weights)
    for index in range(events):
        _act(rng.choices(names, list(weights.values()))[0], index, cluster, rng)
    for group in sorted(cluster.down):
        cluster.restore_group(group)
    for group in cluster.groups:
        if group not in cluster.retired:
            cluster.send(Resume(group))
    cluster.drain()
    cluster.check_settled()
    return cluster


def _act(action: str, index: int, cluster: ModelCluster, rng: random.Random) -> None:
    match action:
        case "submit":
            # Chosen by index rather than drawn, so that seeds give the same requests as before `n`
            # was supported.
            request = random_request(rng, f"r{index}")
            if index % _TELLING == 0:
                reported = msgspec.structs.replace(request.sampling, prompt_logprobs=0)
                request = msgspec.structs.replace(request, sampling=reported)
            choices = _ANSWERS[index % len(_ANSWERS)]
            if index % _GATED:
                cluster.submit(request, choices=choices)
            else:
                arrival_id = cluster.arrive(request, choices=choices)
                if index % (_GATED * _LEAVING) == 0:
                    cluster.withdraw(arrival_id)
        case "encode" if cluster.busy("encode"):
            cluster.run_encode(rng.choice(cluster.busy("encode")))
        case "generate" if cluster.busy("generate"):
            cluster.run_generate(rng.choice(cluster.busy("generate")))
        case "wait":
            cluster.wait(rng.choice([1_000, 100_000, 10_000_000, 1_000_000_000]))
        case "abort" if cluster.requests:
            # Includes requests that have ended: a client's abort may come late.
            name = rng.choice(sorted(cluster.requests))
            cluster.abort(name, rng.choice([FinishReason.ABORT, FinishReason.STOP]))
        case "clear":
            for arrival_id in list(cluster.at_gate):
                cluster.withdraw(arrival_id)  # as the shell interrupts them
            cluster.send(Cleared())
            waiting = cluster.kernel.statistics()["waiting"]
            assert waiting == 0, f"{waiting} requests wait after everything was cleared"
        case _:
            _happen(action, cluster, rng)


def _happen(action: str, cluster: ModelCluster, rng: random.Random) -> None:
    """Apply a fault or an operator action to a group."""
    group = rng.choice(cluster.groups)
    up = group not in cluster.down | cluster.retired
    match action:
        case "fail" if cluster.busy("encode"):
            group = rng.choice(cluster.busy("encode"))
            cluster.run_encode(group, fail=EncodeErrorKind.FAILED)
        case "lose" if up:
            cluster.lose(group)
        case "retire" if cluster.down:
            group = min(cluster.down)
            if cluster.others(group):
                cluster.retire(group)
        case "drain" if up:
            cluster.send(Drain(group))
        case "resume" if up:
            cluster.send(Resume(group))
        case "restore" if cluster.down:
            cluster.restore_group(min(cluster.down))
