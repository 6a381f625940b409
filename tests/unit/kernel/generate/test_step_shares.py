"""The kernel carries out the step policy's decisions, and ensures that every request advances in the end."""

from __future__ import annotations

from typing import Any

from tests.unit.kernel.setups import assert_served, image_request, make_limits, words
from vsched.policy import RequestPolicy, StepShares, StepView
from vsched.testing import ModelCluster, default_policies, make_request

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


def chunks(cluster: ModelCluster) -> list[tuple[int, int]]:
    """Slot and tokens of each chunk of the next step."""
    cluster.run_generate()
    return [(chunk.slot, chunk.stop - chunk.start) for chunk in cluster.decisions[-1].chunks]


def test_step_goes_in_the_order_and_by_the_tokens_of_the_policy() -> None:
    cluster = cluster_of(40, 40, 40, choices=[StepShares([2, 0], [3, 2]), StepShares([1])])
    assert chunks(cluster) == [(2, 3), (0, 2)]
    assert chunks(cluster) == [(1, 4)]
    assert_served(cluster, "r0", "r1", "r2")
    assert cluster.kernel.statistics()["policy_faults"] == {}


def test_step_view_has_the_remaining_budget_and_learned_costs() -> None:
    cluster = cluster_of(40, 40, choices=[])
    chunks(cluster)
    first, second = SEEN[-1].prefilling
    assert first.tokens + first.computed == second.tokens + second.computed == 40
    assert SEEN[-1].measured is cluster.kernel.generators[0].measured
    assert SEEN[-1].time_ns is None, "no request decodes"


def test_step_left_empty_by_the_policy_is_filled_in_order_if_nothing_decodes() -> None:
    cluster = cluster_of(40, 40, choices=[NOBODY])
    assert chunks(cluster) == [(0, 4), (1, 4)]
    assert cluster.kernel.statistics()["policy_faults"] == {}


def test_step_may_leave_prefill_out_while_others_decode_but_not_for_ever() -> None:
    cluster = cluster_of(9, 60, choices=[NOBODY])
    while not cluster.kernel.generators[0].decoding:
        chunks(cluster)
    assert chunks(cluster) == []
    cluster.now_ns += cluster.kernel.limits.passed_over_ns
    assert chunks(cluster) == [(1, 4)]
    assert_served(cluster, "r0", "r1")


def test_step_policy_is_called_about_requests_that_can_go_on() -> None:
    """Until its image is encoded, a request cannot take more of its prompt."""
    SEEN.clear()
    ANSWERS.clear()
    limits = make_limits(chunk_tokens=4)
    cluster = ModelCluster(limits, default_policies(step=Scripted()))
    cluster.submit(image_request("image", (b"one", 8), max_tokens=4))
    cluster.submit(make_request("text", words(40), max_tokens=4))
    while cluster.kernel.generators[0].steps_in_flight:
        cluster.run_generate()
    assert {len(view.prefilling) for view in SEEN} <= {0, 1}, "the image is not encoded"
    requested = len(SEEN)
    cluster.drain()
    assert len(SEEN) > requested
    assert_served(cluster, "image", "text")


def test_request_waiting_for_an_embedding_delays_no_other() -> None:
    """The policy advances only that request."""

    class Last(RequestPolicy, frozen=True, kw_only=True):
        def share(self, view: StepView) -> StepShares:
            return StepShares([len(view.prefilling) - 1] if view.prefilling else [])

    limits = make_limits(generate_depth=1, chunk_tokens=4, pages=8)
    cluster = ModelCluster(limits, default_policies(step=Last()))
    cluster.submit(make_request("a", words(30), max_tokens=4))
    cluster.submit(image_request("b", (b"one", 4), (b"two", 4), (b"three", 4), max_tokens=4))
    assert_served(cluster, "a", "b")
