"""Chunks of a step: their ends, their shares by the step policy, and stalls of prefills without embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.kernel.policy_pool import Reversed
from tests.unit.kernel.setups import (
    assert_served,
    complete,
    generate_statistics,
    image_request,
    joined,
    make_cluster,
    make_limits,
    words,
)
from vsched.kernel import SchedulerLimits
from vsched.policy import RequestPolicy, StepShares, StepView
from vsched.probes import observed
from vsched.testing import ModelCluster, default_policies, make_request
from vsched.types import Request

BLOCK = 4


@pytest.mark.parametrize(("text", "stop"), [(3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_chunk_before_a_missing_embedding_ends_at_a_block_boundary(text: int, stop: int) -> None:
    """A little text is not worth a step of its own."""
    cluster = make_cluster(make_request("r", words(text), [(text, 8, b"image")]), block_size=BLOCK)
    assert _chunks(cluster) == ([(0, stop)] if stop else [])


def test_chunk_is_never_cut_back_across_rows_of_an_embedding() -> None:
    """Ready embeddings are consumed, or their pages could block the missing one."""
    cluster = make_cluster(block_size=BLOCK, encode_items=1)
    cluster.submit(image_request("r", (b"ready", 6), (b"missing", 8)))
    cluster.run_encode()
    assert _chunks(cluster) == [(0, 6)]


def _chunks(cluster: ModelCluster) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for step in cluster.decisions for chunk in step.chunks]


CROPS = make_request("r", words(5), [(3, 14, b"crops")], row_tokens={b"crops": 7})
IMAGES = make_request("r", words(7), [(3, 9, b"first"), (5, 6, b"second")])


@pytest.mark.parametrize(
    ("request_", "limits", "expected"),
    [
        # A chunk is bounded by the chunk size and by the remaining tokens of the step.
        (make_request("r", words(10)), {"chunk_tokens": 4}, [(0, 4), (4, 8), (8, 10)]),
        (make_request("r", words(10)), {"batch_tokens": 6}, [(0, 6), (6, 10)]),
        (make_request("r", words(1)), {"chunk_tokens": 4}, [(0, 1)]),
        (make_request("r", words(8)), {"chunk_tokens": 4}, [(0, 4), (4, 8)]),
        (
            IMAGES,
            {"chunk_tokens": 4},
            [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 22)],
        ),
        # A bidirectional span is in one chunk, which ends before it or contains it whole.
        (
            IMAGES,
            {"chunk_tokens": 4, "item_atomic": True},
            [(0, 3), (3, 12), (12, 14), (14, 20), (20, 22)],
        ),
        (IMAGES, {"chunk_tokens": 4, "prompt_atomic": True}, [(0, 22)]),
        # Separator tokens, of crops for example, split it; so a run is never longer than an image.
        (
            CROPS,
            {"chunk_tokens": 4, "batch_tokens": 12, "item_atomic": True},
            [(0, 3), (3, 10), (10, 11), (11, 18), (18, 20)],
        ),
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


ANSWERS: list[Any] = []
SEEN: list[StepView] = []


class Scripted(RequestPolicy, frozen=True, kw_only=True):
    """Returns the test's decisions, then advances all requests in order."""

    def share(self, view: StepView) -> Any:
        SEEN.append(view)
        if not ANSWERS:
            return StepShares(range(len(view.prefilling)))
        return ANSWERS[0] if len(ANSWERS) == 1 and ANSWERS[0] is NOBODY else ANSWERS.pop(0)


NOBODY = StepShares([])


def cluster_of(*prompts: int, choices: list[Any], **limits: Any) -> ModelCluster:
    """A cluster in which requests with these prompts have joined with a block each, and no step is in flight."""
    SEEN.clear()
    ANSWERS.clear()
    made = make_limits(generate_depth=1, chunk_tokens=4, **limits)
    cluster = ModelCluster(made, default_policies(step=Scripted()))
    for index, tokens in enumerate(prompts):
        cluster.submit(make_request(f"r{index}", words(tokens, start=100 * index), max_tokens=30))
    cluster.run_generate()
    while len(cluster.decisions[-1].chunks) < len(prompts):
        cluster.run_generate()
    ANSWERS.extend(choices)
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
    assert SEEN[-1].time_ns is None, "no request decodes"


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
    SEEN.clear()
    ANSWERS.clear()
    cluster = make_cluster(chunk_tokens=4, step=Scripted())
    cluster.submit(image_request("image", (b"one", 8), max_tokens=4))
    cluster.submit(make_request("text", words(40), max_tokens=4))
    while cluster.kernel.generators[0].steps_in_flight:
        cluster.run_generate()
    assert {len(view.prefilling) for view in SEEN} <= {0, 1}, "the image is not encoded"
    requested = len(SEEN)
    cluster.drain()
    assert len(SEEN) > requested
    assert_served(cluster, "image", "text")


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
    assert reached["kernel.stall_favoured"] == 1
    assert generate_statistics(cluster)["preemptions"] == 0
    cluster.drain()
    assert joined(cluster) == ["p0", "front", "large"]
    assert generate_statistics(cluster)["preemptions"] == 0
    assert_served(cluster, "front", "p0", "large")
