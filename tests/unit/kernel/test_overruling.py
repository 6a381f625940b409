"""Limits of admission: giving way to others, being passed over, and answers that the kernel does not follow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import AllWaiting, HoldingForEver
from tests.unit.kernel.setups import (
    answering,
    assert_served,
    image_request,
    joined,
    make_cluster,
    submit_texts,
    words,
)
from vsched.policy import (
    Admission,
    AdmissionView,
    Dispatch,
    Draft,
    Hold,
    Policy,
    Preemption,
    PreemptionMode,
    RequestPolicy,
    StepShares,
)
from vsched.testing import ModelCluster, make_request
from vsched.testing.policy_run import PolicyRun, RequestAt, run_policy
from vsched_policies.admission import Priority, Tiers

SECOND_NS = 1_000_000_000
OVERDUE_FIRST = "one that was passed over for too long goes first"
OVERDUE: list[int | None] = []


def youngest(view: Any) -> Admission:
    """Last come, first served."""
    OVERDUE.append(view.overdue)
    last = len(view.waiting) - 1
    return Admission(range(last, max(last - view.entries_free, -1), -1))


def overruled(cluster: ModelCluster, seat: str) -> dict[str, int]:
    found: dict[str, dict[str, int]] = cluster.kernel.statistics()["policy_overruled"]
    return found.get(seat, {})


def passing_over(slots: int, limit_s: int) -> ModelCluster:
    """Return a cluster whose policy passes the oldest request over."""
    return make_cluster(
        slots=slots,
        waiting=1000,
        passed_over_ns=limit_s * SECOND_NS,
        generate_admission=answering("admission", youngest),
    )


def served_for(cluster: ModelCluster, seconds: int, *, slots: int = 1) -> None:
    """Let two requests come a second and one be served; each takes a second of a slot."""
    for _ in range(seconds):
        for index in range(2 * slots):
            number = len(cluster.requests)
            name = f"r{number // 2}.{index}"
            cluster.submit(make_request(name, words(4, start=number), max_tokens=1))
        for _ in range(slots):
            if cluster.busy("generate"):
                cluster.run_generate()
        cluster.wait(SECOND_NS)


@pytest.mark.parametrize("limit_s", [10, 60])
def test_admission_passes_no_request_over_for_too_long(limit_s: int) -> None:
    """The oldest goes first once the limit is over; the others follow, one at a time."""
    OVERDUE.clear()
    cluster = passing_over(1, limit_s)
    served_for(cluster, limit_s + 5)
    statistics = cluster.kernel.statistics()
    assert limit_s <= statistics["passed_over_s"]["generate"] <= limit_s + 3
    helped = overruled(cluster, "generate.admission")
    assert helped == {OVERDUE_FIRST: pytest.approx(5, abs=3)}
    assert OVERDUE[0] is None
    assert 0 in OVERDUE
    assert limit_s // 2 <= joined(cluster).index("r1.0") <= limit_s + 3


def test_admission_keeps_no_request_waiting_for_too_long_with_empty_answers() -> None:
    """However long others run. A request that needs blocks which are not free does not wait for the policy."""
    one_at_a_time = answering("admission", lambda view: Admission(range(not view.running)))
    requests = [RequestAt(at_s=n, text_tokens=800, output_tokens=100) for n in range(2)]
    limits = {"step_ms": 100.0, "slots": 4, "passed_over_ns": 5 * SECOND_NS}
    found = run_policy(one_at_a_time, *requests, **limits)
    times = found.times["2"]
    assert 5 <= (times.first_token_ns - times.submitted_ns) / SECOND_NS < 6
    assert found.statistics["policy_overruled"] == {"generate.admission": {OVERDUE_FIRST: 1}}
    assert 5 <= found.statistics["passed_over_s"]["generate"] < 6
    full = run_policy(one_at_a_time, *requests, **limits, blocks=64)
    assert full.joined == ["1", "2"]
    assert full.statistics["policy_overruled"] == {}


def test_step_without_time_for_prefill_keeps_no_request_from_joining() -> None:
    policy = answering("step", lambda view: StepShares(range(len(view.prefilling)), time_ns=0))
    requests = [RequestAt(at_s=n, output_tokens=500) for n in range(2)]
    times = run_policy(policy, *requests, slots=4, step_target_ns=SECOND_NS).times
    assert times["2"].first_token_ns < times["1"].finished_ns


def test_requests_that_are_passed_over_take_one_slot_at_a_time() -> None:
    """A policy that keeps slots for others keeps all but one."""
    cluster = passing_over(4, 5)
    for index in range(20):
        cluster.submit(make_request(f"old{index}", words(4, start=9 * index), max_tokens=50))
    for second in range(12):
        cluster.submit(make_request(f"new{second}", words(4, start=7 * second), max_tokens=3))
        for _ in range(8):
            cluster.run_generate()
        cluster.wait(SECOND_NS)
    assert overruled(cluster, "generate.admission") == {OVERDUE_FIRST: 1}
    assert_served(cluster, *cluster.requests)


def test_first_come_first_served_passes_no_request_over() -> None:
    """However long all wait, and whatever their sizes: nothing is overruled, and no time is counted."""
    cluster = make_cluster(slots=1, waiting=1000, passed_over_ns=SECOND_NS)
    served_for(cluster, 30)
    statistics = cluster.kernel.statistics()
    assert statistics["policy_overruled"] == {}
    assert statistics["passed_over_s"] == {"encode": 0.0, "generate": 0.0}


def test_more_entries_than_places_are_counted_and_wait() -> None:
    """The third of three images returns to the front if there are two permits, and requests if there are two slots."""
    policies = dict.fromkeys(["encode_admission", "generate_admission"], AllWaiting())
    cluster = make_cluster(slots=2, encode_items=2, **policies)
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8), (b"c", 8)))
    names = submit_texts(cluster, 5, 4, apart=9)
    assert_served(cluster, "r", *names)
    assert cluster.encoded == [[b"a", b"b"], [b"c"]]
    for seat in ("encode.admission", "generate.admission"):
        assert set(overruled(cluster, seat)) == {"more entries than can join"}


LAST_IMAGE = answering("admission", lambda view: Admission([len(view.waiting) - 1]))


def last_order(view: Any) -> Dispatch:
    free = next(index for index, group in enumerate(view.groups) if group.free)
    return Dispatch(free, range(len(view.waiting) - 1, 0, -1) or [0])


@pytest.mark.parametrize(
    ("seat", "policies"),
    [
        ("encode.admission", {"encode_admission": LAST_IMAGE}),
        ("encode.dispatch", {"dispatch": answering("dispatch", last_order)}),
    ],
)
def test_images_are_passed_over_within_the_limit(seat: str, policies: dict[str, Policy]) -> None:
    cluster = make_cluster(encode_items=1, waiting=1000, passed_over_ns=5 * SECOND_NS, **policies)
    for second in range(9):
        for index in range(2):
            cluster.submit(image_request(f"r{second}.{index}", (b"%d.%d" % (second, index), 4)))
        cluster.run_encode()
        cluster.wait(SECOND_NS)
    assert set(overruled(cluster, seat)) == {OVERDUE_FIRST}
    assert 4 <= cluster.kernel.statistics()["passed_over_s"]["encode"] <= 7
    assert_served(cluster, *cluster.requests)


VIEWS: list[Any] = []


@pytest.mark.parametrize(
    ("victim", "counted"), [(Preemption(0, "swap"), True), (lambda view: view.eligible[0], False)]
)
def test_victims_older_than_the_request_in_need_are_counted(victim: Any, counted: bool) -> None:
    """The view tells the request in need, and so the victims that are possible."""
    VIEWS.clear()
    policy = answering("preemption", victim, VIEWS)
    cluster = make_cluster(blocks=12, slots=4, preemption=policy)
    for index in range(4):
        cluster.submit(make_request(f"r{index}", words(6 + index, start=20 * index), max_tokens=30))
    assert_served(cluster, *cluster.requests)
    found = overruled(cluster, "generate.preemption")
    assert ("the victim was older than the request in need" in found) == counted
    assert ("the victim was recomputed instead of swapped" in found) == counted
    assert all(view.eligible == range(view.in_need, len(view.running)) for view in VIEWS)


def test_answers_of_other_kinds_are_counted() -> None:
    VIEWS.clear()
    cluster = make_cluster(
        pages=8,
        slots=1,
        chunk_tokens=16,
        drafts=True,
        encoding=answering("encoding", [], VIEWS),
        reclaim=answering("reclaim", []),
        drafting=answering("drafting", lambda view: Draft(view.rows_free + 1, steps=4, ngram=2)),
        step=answering("step", StepShares([])),
    )
    cluster.submit(make_request("old", words(64), [(64, 24, b"late")], max_tokens=2))
    for name in ("young", "younger"):
        cluster.submit(image_request(name, (name.encode(), 8), max_tokens=2))
    assert_served(cluster, "old", "young", "younger")
    seats = ["encode.encoding", "encode.reclaim", "generate.drafting", "generate.step"]
    assert sorted(cluster.kernel.statistics()["policy_overruled"]) == seats
    assert VIEWS[0].needed == ()
    assert any(view.needed == (0,) for view in VIEWS)
    assert cluster.kernel.statistics()["policy_faults"] == {}


def test_answers_about_blocks_and_replicas_are_counted() -> None:
    """Shared blocks stay in the cache whatever is kept, and a replica that is down takes no request."""
    cluster = make_cluster(insertion=answering("insertion", 0))
    cluster.submit(make_request("r", words(64), max_tokens=9), choices=2)
    cluster.drain()
    assert overruled(cluster, "generate.insertion")
    cluster = make_cluster(generators=3, routing=answering("routing", 2))
    cluster.submit(make_request("a", words(4)))
    assert overruled(cluster, "routing") == {}
    cluster.lose("generate-2")
    cluster.submit(make_request("b", words(4)))
    assert overruled(cluster, "routing") == {"the replica takes no requests": 1}


@pytest.mark.parametrize(("limit_s", "fails"), [(5, False), (3, True)])
def test_holds_have_the_same_limit(limit_s: int, fails: bool) -> None:
    arrival = answering("arrival", lambda view: Hold(view.request.arrived_ns + 4 * SECOND_NS))
    cluster = make_cluster(waiting=2, passed_over_ns=limit_s * SECOND_NS, arrival=arrival)
    for index in range(3):
        cluster.arrive(make_request(f"r{index}", words(4)))
    assert bool(cluster.notices) == fails
    assert bool(overruled(cluster, "arrival")) != fails


ASKED_NS: list[int] = []


def hold_for(view: Any, until_ns: int) -> Any:
    ASKED_NS.append(view.now_ns)
    return Hold(until_ns) if hasattr(view, "request") else Admission(hold_until_ns=until_ns)


def hold_for_long(view: Any) -> Any:
    """Holds as long as it may."""
    held = [view.request] if hasattr(view, "request") else view.waiting
    return hold_for(view, held[0].arrived_ns + view.hold_max_ns)


def hold_for_nanoseconds(view: Any) -> Any:
    """Mistakes seconds for nanoseconds: it would be called all the time, and a simulation of it would not end."""
    return hold_for(view, view.now_ns + 5)


@pytest.mark.parametrize("seat", ["arrival", "generate_admission", "encode_admission"])
@pytest.mark.parametrize(
    ("hold", "waited_ns", "asked"),
    [(hold_for_long, 4 * SECOND_NS, 1), (hold_for_nanoseconds, 2_100_000, 3)],
)
def test_holds_last_as_long_as_they_may_and_a_millisecond_at_least(
    seat: str, hold: Any, waited_ns: int, asked: int
) -> None:
    ASKED_NS.clear()
    policy = answering(seat.rpartition("_")[2], hold)
    cluster = make_cluster(passed_over_ns=5 * SECOND_NS, **{seat: policy})
    cluster.arrive(image_request("r", (b"image", 4)))
    if seat == "generate_admission":
        cluster.run_encode()
    cluster.wait(waited_ns)
    assert len(ASKED_NS) == asked
    counted = {"a hold of less than 1 ms lasts 1 ms": 3} if asked == 3 else {}
    assert overruled(cluster, seat.replace("_", ".")) == counted
    assert joined(cluster) == cluster.notices == []


SLOTS = 4
CHATS = [
    RequestAt(at_s=1 + 0.31 * n, name=f"chat{n}", priority=1, output_tokens=8) for n in range(8)
]
BATCH = [RequestAt(at_s=0.01 * n, name=f"batch{n}", output_tokens=150) for n in range(8)]


class Reserved(RequestPolicy, frozen=True, kw_only=True):
    """The batch tier leaves half of the slots to the chat tier."""

    def admit(self, view: AdmissionView) -> Admission:
        order = sorted(range(len(view.waiting)), key=lambda index: -view.waiting[index].priority)
        room = max(view.entries_free - SLOTS // 2, 0)
        batch = [index for index in order if not view.waiting[index].priority][:room]
        chats = [index for index in order if view.waiting[index].priority]
        joined = [*chats, *batch][: view.entries_free]
        return Admission(joined or ([0] if view.running == 0 else []))


@cache
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
    helped = run(Tiers(mode=mode)).statistics["policy_overruled"]
    assert list(helped) == ["generate.admission"] * (mode == "swap")
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
    chats = [RequestAt(at_s=1 + n / 10, priority=1, output_tokens=20) for n in range(20)]
    batch = RequestAt(name="batch", output_tokens=150)
    free = run_policy(Tiers(), batch, *chats, slots=1)
    limited = run_policy(Tiers(), batch, *chats, slots=1, passed_over_ns=1_000_000_000)
    ends = [one.times["batch"].finished_ns / 1e9 for one in (free, limited)]
    assert ends[1] < ends[0] - 2


def test_policy_sees_preemptible_requests() -> None:
    seen: list[tuple[Sequence[int], int]] = []

    class Watching(Tiers, frozen=True, kw_only=True):
        def admit(self, view: AdmissionView) -> Admission:
            seen.append((view.eligible, len(view.running_requests)))
            assert all(view.running_requests[index].outputs > 0 for index in view.eligible)
            return super().admit(view)

    run(Watching())
    assert (0, 1, 2, 3) in [eligible for eligible, _ in seen]
    assert all(len(eligible) <= count <= SLOTS for eligible, count in seen)


def force_arrivals(view: Any) -> Admission:
    """Makes all entries look as if they had just come, and holds them."""
    for entry in view.waiting:
        msgspec.structs.force_setattr(entry, "arrived_ns", 1 << 60)
    return Admission(hold_until_ns=1 << 60)


@pytest.mark.parametrize("policy", [HoldingForEver(), answering("admission", force_arrivals)])
@pytest.mark.parametrize("seat", ["generate_admission", "encode_admission"])
def test_policy_holds_no_request_for_longer_than_the_limit(policy: Policy, seat: str) -> None:
    """Even if it forces the times of arrival in its views."""
    cluster = make_cluster(passed_over_ns=5 * SECOND_NS, **{seat: policy})
    cluster.submit(image_request("r", (b"image", 4)))
    cluster.wait(4 * SECOND_NS)
    assert not joined(cluster)
    assert_served(cluster, "r")
    assert "held for over 5 s" in cluster.notices[0]
