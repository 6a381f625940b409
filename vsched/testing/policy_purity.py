"""Checks that a policy is a function of its view and its state, and that the state stays small."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import msgspec

from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.policy import DECISIONS, Policy, decisions_of
from vsched.policy_host import SeatPolicies
from vsched.testing.model_ranks.cluster import ModelCluster
from vsched.testing.schedules.random_runs import run_random

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
        assert trial == answer, f"asked again, it answers {answer!r}, and {trial!r} before"
        left, tried = msgspec.msgpack.encode(view.state), msgspec.msgpack.encode(copied)
        assert left == tried, f"asked again, it leaves {view.state!r}, and {copied!r} before"
        return answer

    return ask


def check_growth(policies: SeatPolicies, seed: int) -> None:
    """Check that no state grows without limit while requests arrive.

    Raises:
        AssertionError: When one does; names the policy's use.
    """
    sizes: list[dict[str, int]] = []

    class GrowthWatch(ModelCluster):
        def _handle(self, event: Event) -> list[Command]:
            commands = super()._handle(event)
            sizes.append(self.kernel.statistics()["policy_state_bytes"])
            return commands

    def make(limits: SchedulerLimits, policies: SeatPolicies | None) -> ModelCluster:
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
