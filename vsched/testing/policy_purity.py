"""Whether a policy is a function of its view and of the state in it, and whether that state stays small."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import msgspec

from vsched.kernel import KernelPolicies, SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.policy import Policy
from vsched.testing.model_ranks.cluster import ModelCluster
from vsched.testing.schedules.random_runs import run_random

GROWTH_EVENTS = 800
"""Events of the run in which a state's size is looked at."""
GROWTH_MAX = 1.5
"""How many times as large it may become in the second half as it was in the first; one that grows doubles."""
GROWTH_SPARE_BYTES = 64
"""Growth that is never too much: counters have more digits later."""


def asked_twice(policy: Policy) -> Policy:
    """Return a policy that asks this one every question twice, and fails where the answers differ.

    The second time it gets an equal view, and a copy of the state that it had before the first. What it left in the two
    states must be equal, too, byte for byte.
    """
    cls = type(policy)
    method = cast("Callable[[Policy, Any], object]", getattr(cls, cls.method))

    def ask(_: Policy, view: Any) -> object:
        before = msgspec.msgpack.encode(view.state)
        copied: Any = None
        if cls.state_type is not None:
            copied = msgspec.msgpack.decode(before, type=cls.state_type)
        trial = method(policy, msgspec.structs.replace(view, state=copied))
        answer = method(policy, view)
        assert trial == answer, f"asked again, it answers {answer!r}, and {trial!r} before"
        left, tried = msgspec.msgpack.encode(view.state), msgspec.msgpack.encode(copied)
        assert left == tried, f"asked again, it leaves {view.state!r}, and {copied!r} before"
        return answer

    twice = msgspec.defstruct(
        cls.__name__, [], bases=(cls,), namespace={cls.method: ask}, frozen=True, kw_only=True
    )
    return cast("Policy", twice(**msgspec.structs.asdict(policy)))


def check_growth(policies: KernelPolicies, seed: int) -> None:
    """Check that no state grows for as long as there are requests.

    Raises:
        AssertionError: When one does; it names where the policy was asked.
    """
    sizes: list[dict[str, int]] = []

    class GrowthWatch(ModelCluster):
        def _handle(self, event: Event) -> list[Command]:
            commands = super()._handle(event)
            sizes.append(self.kernel.statistics()["policy_state_bytes"])
            return commands

    def make(limits: SchedulerLimits, policies: KernelPolicies | None) -> ModelCluster:
        return GrowthWatch(limits, policies)

    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    run_random(rng, policies, events=GROWTH_EVENTS, faults=False, make=make)
    half = len(sizes) // 2
    for name in sizes[-1]:
        early = max(one[name] for one in sizes[:half])
        late = max(one[name] for one in sizes[half:])
        assert late <= GROWTH_MAX * early + GROWTH_SPARE_BYTES, (
            f"its state grows: {early:,} bytes at most in the first {half:,} events, {late:,} in the next, "
            f"asked as {name}"
        )
