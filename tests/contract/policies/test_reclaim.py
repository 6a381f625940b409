"""Reclaim policies choose the ready embeddings to evict."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vsched.policy import ImagePolicy, ReadyEmbedding, ReclaimView
from vsched.testing import check_policy
from vsched_policies.reclaim import BestFit, LeastUrgent, YoungestEmbedding

BUILT_IN: list[ImagePolicy] = [YoungestEmbedding(), BestFit(), LeastUrgent()]
each = pytest.mark.parametrize("policy", BUILT_IN, ids=lambda policy: type(policy).__name__)


def ready(pages: int = 1, *, priority: int = 0, target_ns: int | None = None) -> ReadyEmbedding:
    return ReadyEmbedding(
        pages=pages,
        tokens=4 * pages,
        requests=1,
        priority=priority,
        arrived_ns=0,
        target_ns=target_ns,
    )


def ask(policy: ImagePolicy, *embeddings: ReadyEmbedding, pages: int = 1, **of: Any) -> list[int]:
    view = ReclaimView(now_ns=0, ready=embeddings, pages=pages, front=False, **of)
    return list(policy.reclaim(view))


@pytest.mark.slow
@each
def test_reclaim_policy_keeps_its_contract(policy: ImagePolicy) -> None:
    check_policy(policy, seeds=range(8))


@each
def test_reclaim_answer_is_one_that_the_kernel_takes(policy: ImagePolicy) -> None:
    rng = random.Random(1)
    for _ in range(200):
        embeddings = [
            ready(rng.randint(1, 9), priority=rng.randrange(2), target_ns=rng.choice([None, 5, 9]))
            for _ in range(rng.randint(1, 6))
        ]
        chosen = ask(policy, *embeddings, pages=rng.randint(1, 9), priority=rng.randrange(2))
        assert len(set(chosen)) == len(chosen)
        assert all(0 <= index < len(embeddings) for index in chosen)


def test_youngest_embedding_goes_first() -> None:
    assert ask(YoungestEmbedding(), ready(), ready(), ready()) == [2, 1, 0]


@pytest.mark.parametrize(
    ("sizes", "pages", "chosen"),
    [
        pytest.param([9, 4, 6], 4, [1], id="just enough"),
        pytest.param([9, 4, 6], 5, [2], id="the smallest that does"),
        pytest.param([9, 4, 6], 10, [0, 1], id="the largest, and what is still missing"),
        pytest.param([4, 4, 4], 4, [2], id="the youngest of equals"),
        pytest.param([1, 2], 9, [1, 0], id="all"),
    ],
)
def test_best_fit_loses_as_little_as_it_can(
    sizes: list[int], pages: int, chosen: list[int]
) -> None:
    assert ask(BestFit(), *map(ready, sizes), pages=pages) == chosen


def test_least_urgent_goes_by_priority_then_target_then_age() -> None:
    embeddings = [
        ready(priority=1),
        ready(target_ns=5),
        ready(target_ns=9),
        ready(),
        ready(),
    ]
    assert ask(LeastUrgent(), *embeddings, priority=1) == [4, 3, 2, 1, 0]


def test_least_urgent_spares_those_that_matter_more() -> None:
    assert ask(LeastUrgent(), ready(priority=2), ready(), priority=1) == [1]
