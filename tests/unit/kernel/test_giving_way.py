"""Running requests give their slots to waiting ones if the admission policy names them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.unit.kernel.policy_pool import random_policies
from vsched.policy import Admission, AdmissionView, PreemptionMode, RequestPolicy
from vsched.testing import default_policies, run_random
from vsched.testing.policy_run import PolicyRun, RequestAt, run_policy
from vsched_policies.admission import Priority, Tiers

SLOTS = 4
CHATS = [
    RequestAt(at_s=1 + 0.31 * n, name=f"chat{n}", priority=1, output_tokens=8) for n in range(24)
]
BATCH = [RequestAt(at_s=0.01 * n, name=f"batch{n}", output_tokens=150) for n in range(12)]


def urgent_first(view: AdmissionView) -> list[int]:
    return sorted(range(len(view.waiting)), key=lambda index: -view.waiting[index].priority)


class Reserved(RequestPolicy, frozen=True, kw_only=True):
    """The batch tier leaves half of the slots to the chat tier."""

    def admit(self, view: AdmissionView) -> Admission:
        order = urgent_first(view)
        room = max(view.entries_free - SLOTS // 2, 0)
        batch = [index for index in order if not view.waiting[index].priority][:room]
        chats = [index for index in order if view.waiting[index].priority]
        joined = [*chats, *batch][: view.entries_free]
        return Admission(joined or ([0] if view.running == 0 else []))


def run(policy: RequestPolicy, **limits: int) -> PolicyRun:
    return run_policy(policy, *BATCH, *CHATS, slots=SLOTS, **limits)


def ttft_p95_ms(found: PolicyRun) -> float:
    waits = sorted(
        (one.first_token_ns - one.submitted_ns) / 1e6
        for name, one in found.times.items()
        if name.startswith("chat")
    )
    return waits[int(len(waits) * 0.95)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_chat_starts_as_soon_as_with_reserved_slots(mode: PreemptionMode) -> None:
    """Without either it waits for the end of a batch request. All slots serve the batch tier while no chat is there."""
    waiting, reserved = run(Priority()), run(Reserved())
    found = run(Tiers(mode=mode), swap_blocks=64)
    assert ttft_p95_ms(found) <= ttft_p95_ms(reserved) < ttft_p95_ms(waiting) / 5
    generate = found.statistics["generate"]
    assert generate["preemptions"] > 0
    assert (generate["swapped_out"] == generate["preemptions"]) == (mode == "swap")
    assert len(found.times) == len(BATCH) + len(CHATS), "all are served"
    ends = [
        max(one.finished_ns for name, one in each.times.items() if name.startswith("batch"))
        for each in (found, reserved)
    ]
    assert ends[0] < ends[1]


class Endless(Tiers, frozen=True, kw_only=True):
    """Everyone gives way to anyone."""

    def admit(self, view: AdmissionView) -> Admission:
        victims = view.eligible[: max(len(view.waiting) - view.entries_free, 0)]
        order = range(len(view.waiting))[::-1]
        return Admission(order[: view.entries_free + len(victims)], preempt=victims)


def test_two_requests_never_take_turns_at_each_others_expense() -> None:
    """Each takes a slot once at most, and loses it once at most to each request that came."""
    requests = [RequestAt(name=f"r{n}", output_tokens=40) for n in range(6)]
    found = run_policy(Endless(), *requests, slots=1)
    preemptions = [one.preemptions for one in found.times.values()]
    assert len(preemptions) == 6
    assert 0 < sum(preemptions) <= 6


def test_requests_give_way_for_limited_time_in_total() -> None:
    """Then the batch request keeps its slot, and chats wait for it."""
    chats = [RequestAt(at_s=1 + n / 10, priority=1, output_tokens=20) for n in range(40)]
    batch = RequestAt(name="batch", output_tokens=200)
    free = run_policy(Tiers(), batch, *chats, slots=1)
    limited = run_policy(Tiers(), batch, *chats, slots=1, passed_over_ns=1_000_000_000)
    ends = [one.times["batch"].finished_ns / 1e9 for one in (free, limited)]
    assert ends[1] < ends[0] - 2


def test_policy_sees_preemptible_requests() -> None:
    seen: list[tuple[Sequence[int], int]] = []

    class Watching(Tiers, frozen=True, kw_only=True):
        def admit(self, view: AdmissionView) -> Admission:
            seen.append((view.eligible, len(view.running_requests)))
            assert all(
                one.outputs > 0 for one in map(view.running_requests.__getitem__, view.eligible)
            )
            return super().admit(view)

    run(Watching())
    assert (0, 1, 2, 3) in [eligible for eligible, _ in seen]
    assert all(len(eligible) <= count <= SLOTS for eligible, count in seen)


@pytest.mark.parametrize("seed", range(12))
def test_giving_way_keeps_every_promise_under_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    drawn = random_policies(rng)
    policy = Endless() if seed % 2 else Tiers(mode="swap")
    changed = {**drawn.by_table, "generate.admission": policy}
    run_random(rng, default_policies().__class__(by_table=changed))
