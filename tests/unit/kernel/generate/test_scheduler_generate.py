"""The generate stage: steps one ahead, decisions that carry only changes, growth, preemption, and chunks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import Reversed
from tests.unit.kernel.setups import (
    answering,
    assert_served,
    complete,
    generate_statistics,
    image_request,
    joined,
    make_cluster,
    make_limits,
    submit_texts,
    tight,
    words,
)
from vsched.kernel import SchedulerLimits
from vsched.kernel.decisions import GenerateDecision
from vsched.policy import Admission, StepShares, StepView
from vsched.probes import observed
from vsched.testing import ModelCluster, default_policies, make_request
from vsched.types import Request


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_generate_decisions_go_out_ahead_of_results(depth: int) -> None:
    cluster = make_cluster(make_request("r", words(5), max_tokens=8), generate_depth=depth)
    assert len(cluster.generators["generate"].log) == depth
    most = 0
    while cluster.generators["generate"].log:
        most = max(most, len(cluster.generators["generate"].log))
        cluster.run_generate()
    assert most == depth
    assert_served(cluster, "r")


def test_generate_steady_decode_decisions_name_only_growth() -> None:
    """Cost follows change: with no arrival and no finish a decision is its number, and new blocks."""
    cluster = make_cluster(block_size=4, slots=4)
    submit_texts(cluster, 4, 4, apart=20, max_tokens=40)
    while sum(len(step.joined) for step in cluster.decisions) < 4:
        cluster.run_generate()
    start = len(cluster.decisions)
    for _ in range(24):
        cluster.run_generate()
    steady = cluster.decisions[start:]
    assert len(steady) == 24
    for decision in steady:
        assert decision == GenerateDecision(decision.step, grown=decision.grown)
        assert decision.grown or len(msgspec.msgpack.encode(decision)) < 16
    grown = [slot for decision in steady for slot in decision.grown[::2]]
    assert sorted(grown) == sorted([0, 1, 2, 3] * 6), "each slot grows once in block_size steps"
    assert_served(cluster, "r0", "r1", "r2", "r3")


NAMES = ("r0", "r1", "r2", "r3", "r4")


def test_generate_preempted_requests_return_in_their_order() -> None:
    cluster = ModelCluster(tight())
    submit_texts(cluster, 4, 12, apart=20, max_tokens=24)
    cluster.submit(make_request("r4", words(12, start=200), max_tokens=2))
    passed: list[str] = []
    while cluster.generators["generate"].log:
        before = len(joined(cluster))
        cluster.run_generate()
        for name in joined(cluster)[before:]:
            passed += [cluster.kernel.explain(older) for older in NAMES if older < name]
    assert not [one for one in passed if "waiting for a slot" in one]
    # What a preempted one gave up returns after a step.
    assert not [one for one in passed if "preempted" in one]
    joins = [[cluster.names[join.number] for join in step.joined] for step in cluster.decisions]
    assert ["r1", "r2"] in joins, "two preempted requests return together, the older first"
    assert joined(cluster).index("r4") > max(joined(cluster).index(name) for name in NAMES[:4])
    preempted = [cluster.ended[name].times.preemptions > 0 for name in NAMES[:4]]
    assert preempted == [False, True, True, True], "the oldest is never preempted"
    returns = len(joined(cluster)) - 5
    ended_out = 1  # r4 was given up in the step with its last token: it need not return
    assert generate_statistics(cluster)["preemptions"] == returns + ended_out
    assert_served(cluster, *NAMES)


def test_generate_older_request_is_never_preempted_for_a_younger() -> None:
    """Whatever the policy decides, a request is preempted for older ones only, which ensures progress."""
    cluster = ModelCluster(tight(blocks=6), default_policies(preemption=answering("preemption", 0)))
    cluster.submit(make_request("old", words(9), max_tokens=4))  # never needs another block
    cluster.submit(make_request("young", words(12, start=50), max_tokens=8))
    assert_served(cluster, "old", "young")
    assert cluster.ended["old"].times.preemptions == 0
    assert cluster.ended["young"].times.preemptions > 0


def hold(view: Any) -> Admission:
    """Hold everything until five milliseconds, then admit in order."""
    if view.now_ns < 5_000_000:
        return Admission(hold_until_ns=5_000_000)
    return Admission(range(min(view.entries_free, len(view.waiting))))


@pytest.mark.parametrize("seat", ["encode_admission", "generate_admission"])
def test_scheduler_hold_sets_one_timer_and_its_time_ends_it(seat: str) -> None:
    """Held entries are examined again at that time."""
    cluster = make_cluster(**{seat: answering("admission", hold)})
    for name in ("r1", "r2"):
        cluster.submit(image_request(name, (name.encode(), 8)))
    while cluster.busy("encode"):
        cluster.run_encode()
    assert (cluster.decisions, cluster.timers) == ([], [5_000_000])
    cluster.wait(5_000_000)
    assert_served(cluster, "r1", "r2")
    if seat == "encode_admission":
        assert cluster.encoded == [[b"r1", b"r2"]]


# --- chunks: their ends, their shares by the step policy, and stalls of prefills without embeddings ---


@pytest.mark.parametrize(("text", "stop"), [(3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_chunk_before_a_missing_embedding_ends_at_a_block_boundary(text: int, stop: int) -> None:
    """A little text is not worth a step of its own."""
    cluster = make_cluster(make_request("r", words(text), [(text, 8, b"image")]))
    assert _chunks(cluster) == ([(0, stop)] if stop else [])


def test_chunk_is_never_cut_back_across_rows_of_an_embedding() -> None:
    """Ready embeddings are consumed, or their pages could block the missing one."""
    cluster = make_cluster(encode_items=1)
    cluster.submit(image_request("r", (b"ready", 6), (b"missing", 8)))
    cluster.run_encode()
    assert _chunks(cluster) == [(0, 6)]


def _chunks(cluster: ModelCluster) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for step in cluster.decisions for chunk in step.chunks]


CROPS = make_request("r", words(5), [(3, 14, b"crops")], row_tokens={b"crops": 7})
IMAGES = make_request("r", words(7), [(3, 9, b"first"), (5, 6, b"second")])
ATOMIC: dict[str, Any] = {"chunk_tokens": 4, "item_atomic": True}


@pytest.mark.parametrize(
    ("request_", "limits", "expected"),
    [
        # A chunk is bounded by the chunk size and by the remaining tokens of the step.
        (make_request("r", words(10)), {"chunk_tokens": 4}, [(0, 4), (4, 8), (8, 10)]),
        (make_request("r", words(10)), {"batch_tokens": 6}, [(0, 6), (6, 10)]),
        (make_request("r", words(1)), {"chunk_tokens": 4}, [(0, 1)]),
        (make_request("r", words(8)), {"chunk_tokens": 4}, [(0, 4), (4, 8)]),
        (IMAGES, {"chunk_tokens": 4}, [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 22)]),
        # A bidirectional span is in one chunk, which ends before it or contains it whole.
        (IMAGES, ATOMIC, [(0, 3), (3, 12), (12, 14), (14, 20), (20, 22)]),
        (IMAGES, {"chunk_tokens": 4, "prompt_atomic": True}, [(0, 22)]),
        # Separator tokens, of crops for example, split it; so a run is never longer than an image.
        (CROPS, ATOMIC | {"batch_tokens": 12}, [(0, 3), (3, 10), (10, 11), (11, 18), (18, 20)]),
    ],
)
def test_prompt_is_split_into_chunks(
    request_: Request, limits: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    cluster = make_cluster(request_, **limits)
    cluster.drain()
    assert _chunks(cluster) == expected
    assert_served(cluster, "r")


def test_an_image_that_does_not_fit_a_step_any_more_waits_and_is_not_overtaken() -> None:
    """It fits the next step; otherwise short prompts behind it could take that space again and again."""
    cluster = make_cluster(batch_tokens=20, chunk_tokens=12, item_atomic=True)
    cluster.submit(make_request("first", words(30)))
    cluster.submit(image_request("image", (b"image", 16)))
    complete(cluster, make_request("short", words(5, start=60)))
    assert joined(cluster) == ["first", "image", "short"]
    assert (0, 16) in _chunks(cluster)
    assert_served(cluster, "first", "image", "short")


def test_a_prompt_waits_for_all_its_images() -> None:
    """One chunk reads them all."""
    cluster = make_cluster(encode_items=1, prompt_atomic=True)
    cluster.submit(image_request("r", (b"a", 6), (b"b", 8)))
    cluster.run_encode()
    assert not _chunks(cluster)
    cluster.drain()
    assert _chunks(cluster) == [(0, 15)]


NOBODY = StepShares([])
SEEN: list[StepView] = []


def cluster_of(*prompts: int, choices: list[Any], **limits: Any) -> ModelCluster:
    """A cluster in which requests with these prompts have joined with a block each, and no step is in flight.

    The step policy returns these decisions, the last one repeatedly if it is `NOBODY`, then all requests in order.
    """
    SEEN.clear()
    answers: list[Any] = []

    def share(view: StepView) -> Any:
        if answers == [NOBODY]:
            return NOBODY
        return answers.pop(0) if answers else StepShares(range(len(view.prefilling)))

    step = answering("step", share, SEEN)
    cluster = make_cluster(generate_depth=1, chunk_tokens=4, step=step, **limits)
    for index, tokens in enumerate(prompts):
        cluster.submit(make_request(f"r{index}", words(tokens, start=100 * index), max_tokens=30))
    cluster.run_generate()
    while len(cluster.decisions[-1].chunks) < len(prompts):
        cluster.run_generate()
    answers += choices
    return cluster


def step_chunks(cluster: ModelCluster) -> list[tuple[int, int]]:
    """Slot and tokens of each chunk of the next step."""
    cluster.run_generate()
    return [(chunk.slot, chunk.stop - chunk.start) for chunk in cluster.decisions[-1].chunks]


def test_step_goes_in_the_order_and_by_the_tokens_of_the_policy() -> None:
    cluster = cluster_of(40, 40, 40, choices=[StepShares([2, 0], [3, 2]), StepShares([1])])
    assert step_chunks(cluster) == [(2, 3), (0, 2)]
    assert step_chunks(cluster) == [(1, 4)]
    assert_served(cluster, "r0", "r1", "r2")
    assert cluster.kernel.statistics()["policy_faults"] == {}


def test_step_view_has_the_remaining_budget_and_learned_costs() -> None:
    cluster = cluster_of(40, 40, choices=[])
    step_chunks(cluster)
    first, second = SEEN[-1].prefilling
    assert first.tokens + first.computed == second.tokens + second.computed == 40
    assert SEEN[-1].measured is cluster.kernel.generators[0].measured
    assert SEEN[-1].time_ns is None, "there is no limit"


def test_step_left_empty_by_the_policy_is_filled_in_order_if_nothing_decodes() -> None:
    cluster = cluster_of(40, 40, choices=[NOBODY])
    assert step_chunks(cluster) == [(0, 4), (1, 4)]
    assert cluster.kernel.statistics()["policy_faults"] == {}


def test_step_may_leave_prefill_out_while_others_decode_but_not_for_ever() -> None:
    cluster = cluster_of(9, 60, choices=[NOBODY])
    while not cluster.kernel.generators[0].decoding:
        step_chunks(cluster)
    assert step_chunks(cluster) == []
    cluster.now_ns += cluster.kernel.limits.passed_over_ns
    assert step_chunks(cluster) == [(1, 4)]
    assert_served(cluster, "r0", "r1")


def test_step_policy_is_called_about_requests_that_can_go_on() -> None:
    """Until its image is encoded, a request cannot take more of its prompt."""
    cluster = cluster_of(40, choices=[])
    cluster.submit(image_request("image", (b"one", 8), max_tokens=4))
    SEEN.clear()
    while cluster.busy("generate"):
        cluster.run_generate()
    assert {len(view.prefilling) for view in SEEN} <= {0, 1}, "the image is not encoded"
    requested = len(SEEN)
    assert_served(cluster, "r0", "image")
    assert len(SEEN) > requested


def stalling(limits: SchedulerLimits, *, prefills: int) -> ModelCluster:
    """A cluster whose next event stalls: an image takes all pages, and its request waits behind prefills.

    The oldest request waited for its image; younger ones joined with text, and wait for images behind it.
    """
    cluster = ModelCluster(limits, default_policies(generate_admission=Reversed()))
    cluster.submit(make_request("front", [7], [(0, 16, b"f")], max_tokens=2))
    for index in range(prefills):
        items = [(8, 16, b"p%d" % index)]
        prompt = words(9, start=40 * (index + 1))
        cluster.submit(make_request(f"p{index}", prompt, items, max_tokens=2))
    return cluster


def finish_prefills(cluster: ModelCluster) -> None:
    """Run the chunks of text, then encode the first image."""
    while cluster.busy("generate"):
        cluster.run_generate()
    cluster.run_encode()


def test_youngest_stalled_prefill_gives_way_to_the_front() -> None:
    """The older prefill keeps its slot and its computed tokens."""
    limits = make_limits(blocks=16, pages=4, chunk_tokens=8, prefix_cache=False)
    cluster = stalling(limits, prefills=2)
    with observed() as reached:
        finish_prefills(cluster)
    assert reached["generate.stalled_prefill_preempted"] == 1
    assert joined(cluster)[-1] == "front", "it joins at once: no other event would come"
    cluster.drain()
    order = joined(cluster)
    assert sorted(order[:2]) == ["p0", "p1"]
    assert order[2:] == ["front", "p1"]
    assert_served(cluster, "front", "p0", "p1")


def test_front_that_fits_joins_before_any_prefill_gives_way() -> None:
    """The policy chose a request that did not fit; the front was not tried after it."""
    limits = make_limits(blocks=16, pages=4, chunk_tokens=8, prefix_cache=False)
    cluster = stalling(limits, prefills=1)
    while cluster.busy("generate"):
        cluster.run_generate()
    cluster.submit(make_request("large", words(45, start=500), max_tokens=2))
    with observed() as reached:
        cluster.run_encode()
    assert reached["kernel.stall_unblocked"] == 1
    assert generate_statistics(cluster)["preemptions"] == 0
    cluster.drain()
    assert joined(cluster) == ["p0", "front", "large"]
    assert generate_statistics(cluster)["preemptions"] == 0
    assert_served(cluster, "front", "p0", "large")
