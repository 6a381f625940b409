"""Views of policies: fields of the request, and times of recent steps and requests, in nanoseconds."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from tests.contract.harmful import everywhere
from tests.unit.kernel.setups import (
    answering,
    assert_served,
    image_request,
    make_cluster,
    make_limits,
    words,
)
from vsched.kernel import Scheduler
from vsched.kernel.events import Aborted, Encoded, Event, Finished, GroupReady, Stepped, Submitted
from vsched.policy import (
    Admission,
    AdmissionView,
    ArrivalView,
    DraftingView,
    EncodingView,
    InsertionView,
    RoutingView,
    StepView,
)
from vsched.policy.measured import (
    WINDOW,
    EncodeTime,
    EndTime,
    FirstTokenTime,
    Measurements,
    StepTime,
    SwapTime,
)
from vsched.policy_host import SeatPolicies
from vsched.testing import RequestAt, default_policies, make_request, run_policy
from vsched.testing.cluster import seats_of
from vsched.types import FinishReason, Request
from vsched_policies.admission import Tiers

LIMITS = msgspec.structs.replace(make_limits(), generate_depth=1)


class Told:
    """A scheduler that gets events at given times."""

    def __init__(self, policies: SeatPolicies | None = None, **changes: Any) -> None:
        limits = msgspec.structs.replace(LIMITS, **changes)
        self.kernel = Scheduler(limits, policies or default_policies())
        for group in self.kernel._groups:
            self.receive(0, GroupReady(group))

    def receive(self, now_ns: int, event: Event) -> None:
        self.kernel.handle(event, now_ns)
        self.kernel.check_invariants()

    def submit(self, now_ns: int, request: Request) -> None:
        self.receive(now_ns, Submitted(request))

    def step(
        self, now_ns: int, step: int, *ended: int, busy_ns: int = 0, group: str = "generate"
    ) -> None:
        """Let a step end; `ended` are numbers of requests, each in the slot of its number less one."""
        finished = [Finished(number - 1, number, FinishReason.LENGTH) for number in ended]
        tokens = array("i", [7] * LIMITS.slots)
        self.receive(now_ns, Stepped(step, tokens, finished, busy_ns=busy_ns, group=group))

    @property
    def measured(self) -> Any:
        return self.kernel.generators[0].measured


def text(name: str, tokens: int, start: int = 0, **fields: Any) -> Request:
    request = make_request(name, words(tokens, start=start), max_tokens=8)
    return msgspec.structs.replace(request, **fields)


def test_views_have_tenant_session_and_priority_of_the_request() -> None:
    seen: dict[type, tuple[str, str, int]] = {}

    def around(ask: Any, view: Any) -> Any:
        subject = view
        match view:
            case ArrivalView():
                subject = view.request
            case AdmissionView():
                subject = view.waiting[0]
            case StepView():
                subject = view.prefilling[0]
        seen[type(view)] = subject.tenant, subject.session, subject.priority
        return ask(view)

    cluster = make_cluster(generators=2, drafts=True, chunk_tokens=16, **everywhere(around))
    request = image_request("r", (b"image", 40), max_tokens=20, priority=3)
    cluster.arrive(msgspec.structs.replace(request, tenant="a", session="talk"))
    assert_served(cluster, "r")
    assert cluster.notices == []
    requests = (ArrivalView, RoutingView, AdmissionView, StepView, DraftingView)
    assert seen == dict.fromkeys((*requests, EncodingView, InsertionView), ("a", "talk", 3))


def test_steps_are_reported_with_their_composition() -> None:
    reported = Told()
    reported.submit(1_000, text("a", 6))
    reported.step(1_500, 1, busy_ns=400)
    reported.submit(1_600, text("b", 4, start=50))
    reported.step(2_000, 2, busy_ns=300)
    reported.step(2_600, 3, busy_ns=550)
    assert reported.measured.steps == (
        StepTime(1_500, 400, gap_ns=500, decodes=0, prefill_tokens=6, pairs=18.0),
        StepTime(2_000, 300, gap_ns=500, decodes=1, prefill_tokens=0, pairs=0.0),
        StepTime(2_600, 550, gap_ns=600, decodes=1, prefill_tokens=4, pairs=8.0),
    )


def test_gap_of_a_step_begins_with_its_decision_after_idleness() -> None:
    """No request waited for a token while nothing ran."""
    reported = Told()
    reported.submit(0, text("a", 4))
    reported.step(100, 1, 1)
    reported.submit(1_000_000, text("b", 4, start=50))
    reported.step(1_000_200, 2)
    assert [one.gap_ns for one in reported.measured.steps] == [100, 200]


def test_times_of_requests_have_their_first_token_and_their_end() -> None:
    reported = Told()
    reported.submit(1_000, text("a", 6, priority=3, ttft_target_ms=2))
    reported.step(4_000, 1)
    first = FirstTokenTime(4_000, 3_000, 0, 0, prompt_tokens=6, priority=3, target_ns=2_001_000)
    assert reported.measured.first_tokens == (first,)
    assert reported.measured.ends == ()
    reported.submit(4_000, text("b", 4))
    reported.step(5_000, 2)
    reported.step(6_000, 3, 1)
    reported.receive(7_000, Aborted("b"))
    assert reported.measured.ends == (
        EndTime(ended_ns=6_000, total_ns=5_000, prompt_tokens=6, output_tokens=3),
    ), "requests that broke off are not among them"


def test_waiting_is_distinguished() -> None:
    """A request with an image waits for its embedding, then for the slot that another one holds."""
    reported = Told(slots=1)
    reported.submit(0, text("a", 6))
    reported.submit(100, image_request("b", (b"one", 4), max_tokens=4))
    reported.receive(700, Encoded(1))
    reported.step(1_000, 1)
    reported.step(1_500, 2, 1)
    reported.receive(2_500, Stepped(3, array("i", [7] * LIMITS.slots)))
    first = reported.measured.first_tokens[-1]
    assert (first.items, first.items_ns, first.queued_ns, first.ttft_ns) == (1, 600, 800, 2_400)
    assert reported.measured.encodes == (EncodeTime(ended_ns=700, took_ns=600, items=1, tokens=4),)


def test_occupancy_and_hits_are_those_of_now() -> None:
    reported = Told()
    size = LIMITS.block_size
    reported.submit(0, text("a", 2 * size + 1))
    assert reported.measured.blocks_held == 3
    reported.step(100, 1, 1)
    assert reported.measured.blocks_held == 0
    assert reported.measured.blocks_cached == 2
    reported.submit(200, text("b", 2 * size + 1))
    assert reported.measured.tokens_cached == 2 * size
    assert reported.measured.tokens_prefilled == 2 * size + 2
    assert reported.measured.blocks_total == LIMITS.blocks
    reported.submit(300, image_request("c", (b"one", 4), max_tokens=4))
    reported.receive(400, Encoded(1))
    reported.submit(500, image_request("d", (b"one", 4), max_tokens=4))
    assert (reported.measured.embedding_hits, reported.measured.embedding_misses) == (1, 1)


def test_windows_are_bounded() -> None:
    reported = Told()
    reported.submit(0, text("a", 4))
    for step in range(1, WINDOW + 11):
        reported.step(step * 100, step)
    assert len(reported.measured.steps) == WINDOW
    assert reported.measured.steps[0].ended_ns == 1_100
    assert reported.measured.steps[-1].ended_ns == (WINDOW + 10) * 100


def test_replicas_are_distinguished_and_the_encode_stage_has_all() -> None:
    reported = Told(generators=2)
    reported.submit(0, text("a", 4))
    reported.submit(0, text("b", 5, start=50))
    reported.step(200, 1, group="generate-1")
    reported.step(300, 1, group="generate-0")
    first, second = (group.measured.steps for group in reported.kernel.generators)
    assert [one.prefill_tokens for one in first] == [4]
    assert [one.prefill_tokens for one in second] == [5]
    assert reported.kernel.encode.measured.steps == (*second, *first), "in order of time"
    assert reported.kernel.encode.measured.blocks_total == 2 * LIMITS.blocks


def test_tenants_are_in_views_and_measurements() -> None:
    """An image has the tenant of the request that needed it first; views have the measurements themselves."""
    waiting: list[list[str]] = []
    shown: dict[str, Any] = {}

    def admit(view: Any) -> Admission:
        waiting.append([view.stage, *(entry.tenant for entry in view.waiting)])
        shown[view.stage] = view.measured
        return Admission(range(min(len(view.waiting), view.entries_free)))

    seats = dict.fromkeys(seats_of("admission"), answering("admission", admit))
    reported = Told(default_policies(**seats))
    for name, tenant in (("a", "red"), ("b", "blue")):
        request = image_request(name, (b"one", 4), max_tokens=4)
        reported.submit(0, msgspec.structs.replace(request, tenant=tenant))
    reported.receive(100, Encoded(1))
    assert waiting == [["encode", "red"], ["generate", "red", "blue"]]
    assert reported.measured.tokens_running == {"red": 6, "blue": 6}, "with the token of the step"
    reported.step(200, 1, 1, 2)
    assert reported.measured.tokens_running == {}
    assert [one.tenant for one in reported.measured.first_tokens] == ["red", "blue"]
    assert [one.tenant for one in reported.measured.ends] == ["red", "blue"]
    assert shown == {"encode": reported.kernel.encode.measured, "generate": reported.measured}
    for name in Measurements.__struct_fields__:
        assert hasattr(shown["generate"], name), "plain values stand for it in tests of policies"
        assert not getattr(Measurements(), name)


def test_swaps_are_measured_and_are_no_part_of_the_steps() -> None:
    """Copy times do not count as computing, neither for policies nor for the model of step times."""
    reported = Told(swap_blocks=4, step_target_ns=1_000_000)
    plain = Told(swap_blocks=4, step_target_ns=1_000_000)
    for one, extra_ns in ((reported, 700), (plain, 0)):
        one.submit(100, text("a", 8))
        tokens = array("i", [7] * LIMITS.slots)
        one.receive(
            900, Stepped(1, tokens, busy_ns=500 + extra_ns, swap_ns=extra_ns, swap_blocks=3)
        )
    assert reported.measured.swaps == (SwapTime(900, 700, 3),)
    assert plain.measured.swaps == ()
    assert [step.busy_ns for step in reported.measured.steps] == [500]
    assert reported.measured.steps == plain.measured.steps
    costs = [one.kernel.generators[0].step_times.costs for one in (reported, plain)]
    assert costs[0] == costs[1]


# --- waiting and preempted requests as admission sees them ---


class Shows(Tiers, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Admission:
        SHOWN.append(view)
        return super().admit(view)


SHOWN: list[AdmissionView] = []


def test_waiting_request_is_shown_with_its_size_limits_and_deadline() -> None:
    SHOWN.clear()
    asked = RequestAt(text_tokens=10, images=(40, 6), output_tokens=20, ttft_target_ms=500)
    run_policy(Shows(), asked)
    image = SHOWN[0].waiting[0]
    assert SHOWN[0].stage == "encode"
    assert (image.tokens, image.images, image.max_tokens) == (40, 0, 0)
    view = SHOWN[-1]
    (entry,) = view.waiting
    assert (entry.tokens, entry.blocks * view.block_tokens) == (56, 64)
    assert (entry.images, entry.image_tokens, entry.max_tokens, entry.outputs) == (2, 46, 20, 0)
    assert image.target_ns == entry.target_ns == entry.arrived_ns + 500_000_000


def test_preempted_request_is_shown_with_the_tokens_that_it_has() -> None:
    SHOWN.clear()
    batch = RequestAt(text_tokens=10, images=(6,), output_tokens=50)
    run_policy(Shows(), batch, RequestAt(at_s=0.2, priority=1, output_tokens=30), slots=1)
    (running,) = next(view.running_requests for view in SHOWN if view.eligible)
    assert (running.images, running.max_tokens) == (1, 50)
    assert running.tokens == 16 + running.outputs
    back = SHOWN[-1].waiting[0]
    assert 10 < running.outputs <= back.outputs <= running.outputs + 2
    assert back.tokens == back.outputs, "the block of the prompt is cached"
