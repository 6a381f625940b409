"""Random runs: arrivals, completions, cancellations, failures and time in any order, then a healed end."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from vsched.kernel import KernelPolicies, Sizes
from vsched.kernel.events import Cleared
from vsched.testing.cluster import ModelCluster
from vsched.testing.requests import random_request, random_sizes
from vsched.types import FinishReason


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How often each thing happens in one run. Runs differ: rare combinations need runs made of little else."""

    submit: int
    encode: int
    generate: int
    wait: int
    abort: int
    fail: int
    lose: int
    restore: int
    clear: int

    @classmethod
    def draw(cls, rng: random.Random, *, faults: bool) -> Weights:
        """Return the weights of one run."""
        return cls(
            submit=rng.choice([2, 10, 30]),
            encode=rng.choice([3, 20, 20]),
            generate=rng.choice([3, 40, 40]),
            wait=rng.choice([0, 2, 20]),
            abort=rng.choice([0, 2, 10]),
            fail=rng.choice([0, 1, 5]) if faults else 0,
            lose=rng.choice([0, 1, 5]) if faults else 0,
            restore=rng.choice([5, 30]),
            clear=rng.choice([0, 0, 1]),
        )


def run_random(
    rng: random.Random,
    policies: KernelPolicies | None = None,
    *,
    sizes: Sizes | None = None,
    events: int = 80,
    faults: bool = True,
    make: Callable[[Sizes, KernelPolicies | None], ModelCluster] = ModelCluster,
) -> ModelCluster:
    """Run a random schedule, heal what is down, drain and check; return the cluster for more questions.

    Raises:
        AssertionError: When something was lost, wrong, held too long or stuck.
    """
    cluster = make(sizes or random_sizes(rng), policies)
    weights = msgspec.structs.asdict(Weights.draw(rng, faults=faults))
    names = list(weights)
    for index in range(events):
        _act(rng.choices(names, list(weights.values()))[0], index, cluster, rng)
    for group in sorted(cluster.down):
        cluster.restore(group)
    cluster.drain()
    cluster.check_settled()
    return cluster


def _act(action: str, index: int, cluster: ModelCluster, rng: random.Random) -> None:
    match action:
        case "submit":
            cluster.submit(random_request(rng, f"r{index}"))
        case "encode" if cluster.encode_log:
            cluster.run_encode()
        case "generate" if cluster.generate_log:
            cluster.run_generate()
        case "wait":
            cluster.wait(rng.choice([1_000, 100_000, 10_000_000, 1_000_000_000]))
        case "abort" if cluster.requests:
            # Also such as have ended: a client's abort may come late.
            name = rng.choice(sorted(cluster.requests))
            cluster.abort(name, rng.choice([FinishReason.ABORT, FinishReason.STOP]))
        case "fail" if cluster.encode_log:
            cluster.run_encode(fail="the encoder failed on purpose")
        case "lose":
            group = rng.choice(["encode", "generate"])
            if group not in cluster.down:
                cluster.lose(group)
        case "clear":
            cluster.send(Cleared())
            waiting = cluster.kernel.statistics()["waiting"]
            assert waiting == 0, f"{waiting} requests wait after everything was cleared"
        case "restore" if cluster.down:
            cluster.restore(min(cluster.down))
