"""Run a policy in the kernel over model ranks, in many random schedules."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from hashlib import blake2b
from typing import Any, cast

import msgspec

from vsched.config.sections import PoliciesConfig
from vsched.errors import PolicyError, reraise_interrupt, safe_text
from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Arrived, Event, Submitted
from vsched.plugins import check_contract
from vsched.policy import (
    DECISIONS,
    POLICY_TABLES,
    SEVERAL,
    Policy,
    PruningPolicy,
    PruningView,
    ReplicaView,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
    decisions_of,
)
from vsched.policy.requests import check_encode_limits
from vsched.policy.videos import check_kept
from vsched.policy_host import SeatPolicies
from vsched.policy_host.stuck_calls import StuckCalls, interruptible
from vsched.testing.cluster import SEATS, ModelCluster, default_policies, run_random
from vsched.testing.memory_check import check_memory_policy

GROWTH_EVENTS = 800
"""Number of events in the run that measures state sizes."""
GROWTH_MAX = 1.5
"""Maximum growth factor of the state from the first to the second half; unlimited growth doubles it."""
GROWTH_SPARE_BYTES = 64
"""Growth that is always allowed, since counters get more digits."""


def called_twice(policy: Policy) -> Policy:
    """Wrap a policy so that every call is made twice and fails if the results differ.

    The second call gets an equal view, and a copy of the state before the first one. The resulting
    states must be equal byte for byte.
    """
    cls = type(policy)
    methods = [DECISIONS[kind].method for kind in decisions_of(cls) if DECISIONS[kind].remembers]
    twice = msgspec.defstruct(
        cls.__name__,
        [],
        bases=(cls,),
        namespace={name: _twice(policy, getattr(cls, name)) for name in methods},
        frozen=True,
        kw_only=True,
    )
    return cast("Policy", twice(**msgspec.structs.asdict(policy)))


def _twice(
    policy: Policy, method: Callable[[Policy, Any], object]
) -> Callable[[Policy, Any], object]:
    """Wrap a method so that it is called twice."""
    state_type = policy.state_type

    def ask(_: Policy, view: Any) -> object:
        before = msgspec.msgpack.encode(view.state)
        copied: Any = None
        if state_type is not None:
            copied = msgspec.msgpack.decode(before, type=state_type)
        trial = method(policy, msgspec.structs.replace(view, state=copied))
        answer = method(policy, view)
        assert _same(trial, answer), f"asked again, it answers {answer!r}, and {trial!r} before"
        left, tried = msgspec.msgpack.encode(view.state), msgspec.msgpack.encode(copied)
        assert left == tried, f"asked again, it leaves {view.state!r}, and {copied!r} before"
        return answer

    return ask


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays of numpy
        return repr(one) == repr(other)


def check_growth(policies: SeatPolicies, seed: int) -> None:
    """Check that no state grows without limit while requests arrive.

    Raises:
        AssertionError: When one does; names the policy's use.
    """
    sizes: list[dict[str, int]] = []

    class GrowthWatch(ModelCluster):
        def _handle(self, event: Event) -> list[Command]:
            commands = super()._handle(event)
            if isinstance(event, Arrived | Submitted):  # the last requests end in many events
                states = self.kernel.policy_states()
                sizes.append({seat: len(data) for seat, data in states.items()})
            return commands

    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    run_random(rng, policies, events=GROWTH_EVENTS, faults=False, make=GrowthWatch)
    half = len(sizes) // 2
    for name in sizes[-1]:
        early = max(one[name] for one in sizes[:half])
        late = max(one[name] for one in sizes[half:])
        assert late <= GROWTH_MAX * early + GROWTH_SPARE_BYTES, (
            f"its state grows: {early:,} bytes at most in the first {half:,} arrivals, {late:,} in the next, "
            f"asked as {name}"
        )


REPEATS = 50
"""The first seeds run twice: equal runs must yield equal commands. A policy with hidden state differs in
about one of four runs, those in which its decisions matter.
"""
GROWTH_RUNS = 2
"""Number of long runs for detecting a growing state."""
ROUTED = 20
"""Number of random views per seed for a routing policy."""
PRUNED = 5
"""Number of random videos per seed for a pruning policy."""


class PolicyReport(msgspec.Struct):
    """Result of `check_policy`.

    Attributes:
        passed_over_s: Longest time for which a request, or an image, was passed over, in simulated time.
        overruled: Number of valid answers that the kernel did not follow, by the reason.
    """

    passed_over_s: float = 0.0
    overruled: dict[str, int] = {}

    def add(self, statistics: dict[str, Any], decisions: list[str]) -> None:
        """Add the statistics of a run with a policy that makes these decisions."""
        self.passed_over_s = max(self.passed_over_s, *statistics["passed_over_s"].values())
        for seat, reasons in statistics["policy_overruled"].items():
            if seat.rpartition(".")[2] in decisions:
                for reason, count in reasons.items():
                    self.overruled[reason] = self.overruled.get(reason, 0) + count


def check_policy(
    policy: type[Policy] | Policy, *, seeds: Iterable[int] = range(200)
) -> PolicyReport:
    """Check that a policy satisfies its contract in random schedules with cancellations and failures.

    The policy makes all decisions that it has methods for, and default policies the others. In each run, the
    kernel's invariants are checked after every event and all computed data is verified; at the end
    every request must have been served, with correct tokens, or refused. Every call is made twice,
    the second time with an equal view and a copy of the same state: results and resulting states
    must be equal. A state must not grow without limit while requests arrive.

    A memory policy sizes KV caches on simulated devices, some with failures, leaks and new
    processes. It must end with a build that was profiled if there is room, and leave encoders what
    they reserve. A routing policy also gets random views, each twice and in different orders: with
    replicas that are down, idle or alone, and any known prefixes and images. A pruning policy gets
    random videos, each twice.

    Args:
        policy: A class whose fields all have defaults, or an instance.
        seeds: One run per seed; a failing seed reproduces the failure alone.

    Returns:
        What is no failure, but worth knowing.

    Raises:
        PolicyError: Names the class, the problem, and the seed of its run.
    """
    cls = policy if isinstance(policy, type) else type(policy)
    check_contract(cls, SEVERAL)
    name = f"{cls.__module__}.{cls.__qualname__}"
    made = _make(policy, name)
    twice = called_twice(made)
    report = PolicyReport()
    with closing(StuckCalls(PoliciesConfig().call_limit_s)):
        for count, seed in enumerate(seeds):
            try:
                first = _check(twice, seed, report)
                repeated = _check(made, seed, PolicyReport()) if count < REPEATS else first
                assert first == repeated, "the same run gave another result the second time"
                if made.state_type is not None and count < GROWTH_RUNS:
                    check_growth(default_policies(made), seed)
            except BaseException as error:
                reraise_interrupt(error)
                kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
                failed = PolicyError(f"{name}: seed {seed}: {kind}{safe_text(error, str)}")
                for note in getattr(error, "__notes__", ()):
                    failed.add_note(note)
                raise failed from error
    return report


def _check(policy: Policy, seed: int, report: PolicyReport) -> list[object]:
    """Run all checks of the policy's decisions; return the results."""
    made = decisions_of(type(policy))
    if isinstance(policy, RequestPolicy):
        check_encode_limits(policy.encode_limits())
    alone = [kind for kind in made if kind in ASKED_ALONE]
    results = [ASKED_ALONE[kind](policy, random.Random(seed)) for kind in alone]  # noqa: S311
    seats = [name for name, table in SEATS.items() if POLICY_TABLES[table] in made]
    return [*results, _run_in_kernel(policy, seats, seed, report)] if seats else results


def _make(policy: type[Policy] | Policy, name: str) -> Policy:
    if not isinstance(policy, type):
        return policy
    try:
        return policy()
    except TypeError as error:
        raise PolicyError(f"{name}: {error}; pass an instance instead of the class") from error


class _Recorder(ModelCluster):
    """Keeps a digest of all commands."""

    def __init__(self, limits: SchedulerLimits, policies: SeatPolicies | None) -> None:
        self.digest = blake2b(digest_size=16)
        super().__init__(limits, policies)

    def carry_out(self, command: Command) -> None:
        self.digest.update(type(command).__name__.encode() + msgspec.msgpack.encode(command))
        super().carry_out(command)


def _run_in_kernel(policy: Policy, seats: Sequence[str], seed: int, report: PolicyReport) -> bytes:
    """Run one schedule with the policy at all its seats, or at one of them; return the digest of the commands."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    everywhere = rng.random() < 0.5
    policies = (
        default_policies(policy) if everywhere else default_policies(**{rng.choice(seats): policy})
    )
    cluster = cast("_Recorder", run_random(rng, policies, make=_Recorder))
    cluster.check_policies()
    report.add(cluster.kernel.statistics(), decisions_of(type(policy)))
    return cluster.digest.digest()


def _ask_routing(policy: RoutingPolicy, rng: random.Random) -> list[int]:
    """Call the policy for several views, then again in another order: the result must depend on the view alone."""
    views = [_routing_view(rng) for _ in range(ROUTED)]
    chosen = [_route(policy, view) for view in views]
    for number in rng.sample(range(ROUTED), ROUTED):
        again = _route(policy, views[number])
        assert again == chosen[number], (
            f"replica {chosen[number]}, and asked again replica {again}: {views[number]}"
        )
    return chosen


def _routing_view(rng: random.Random) -> RoutingView:
    """Return a view whose replicas may be idle, be down, know the prompt, or have seen its images."""
    count = rng.choice([1, 2, 2, 3, 5, 16])
    prompt_tokens = rng.choice([1, 17, 1000, 100_000])
    items = rng.choice([0, 0, 1, 4])
    limit = rng.choice([0, 64, 16384, 1_000_000])
    healthy_share = rng.choice([0.0, 0.5, 1.0])
    load_max = rng.choice([0, 2, limit, 3 * limit])
    # Each image was last sent to one replica at most.
    seen = Counter(rng.randrange(count) for _ in range(rng.randint(0, items)))
    return RoutingView(
        replicas=tuple(
            ReplicaView(
                index=index,
                load_tokens=rng.choice([0, rng.randint(0, load_max)]),
                healthy=rng.random() < healthy_share,
                prefix_tokens=rng.choice([0, 0, rng.randrange(prompt_tokens)]),
                items_seen=seen[index],
            )
            for index in range(count)
        ),
        prompt_tokens=prompt_tokens,
        item_keys=tuple(rng.randbytes(32) for _ in range(items)),
        routed=rng.choice([0, 1, rng.randrange(1 << 40)]),
        load_limit_tokens=limit,
        max_tokens=rng.choice([1, 500]),
        priority=rng.choice([0, 1]),
        tenant=rng.choice(["", "one"]),
        session=rng.choice(["", "talk"]),
    )


@interruptible
def _route(policy: RoutingPolicy, view: RoutingView) -> int:
    count = len(view.replicas)
    if policy.state_type is not None:
        view = msgspec.structs.replace(view, state=policy.state_type())
    chosen = policy.choose(view)
    assert isinstance(chosen, int), f"not an index: {chosen!r}"
    assert 0 <= chosen < count, f"index {chosen} is outside 0 to {count - 1}"
    healthy = [replica.index for replica in view.replicas if replica.healthy]
    assert chosen in healthy or not healthy, (
        f"replica {chosen} is down, and {healthy} are not: {view}"
    )
    return chosen


def _ask_pruning(policy: PruningPolicy, rng: random.Random) -> list[bytes]:
    """Call the policy for several videos, each twice: the result must be valid, and the same."""
    found = []
    for _ in range(PRUNED):
        groups, rows, columns = rng.choice([1, 2, 9, 40]), rng.randint(1, 9), rng.randint(1, 9)
        tokens, still = rows * columns, rng.choice([0.0, 0.5, 1.0])
        changes = array("f", [1.0] * tokens)
        changes.extend(
            0.0 if rng.random() < still else rng.random() for _ in range((groups - 1) * tokens)
        )
        view = PruningView(
            groups=groups,
            rows=rows,
            columns=columns,
            changes=memoryview(changes.tobytes()).cast("f", [groups, rows, columns]),
            tokens_max=rng.randint(tokens, groups * tokens),
        )
        kept = _prune(policy, view)
        assert _prune(policy, view) == kept, f"asked again, it keeps other tokens: {view}"
        found.append(check_kept(kept, groups, tokens, view.tokens_max))
    return found


@interruptible
def _prune(policy: PruningPolicy, view: PruningView) -> Any:
    return policy.prune(view)


ASKED_ALONE: dict[str, Callable[[Any, random.Random], object]] = {
    "memory": check_memory_policy,
    "routing": _ask_routing,
    "pruning": _ask_pruning,
}
"""Checks outside of the kernel, by decision."""
