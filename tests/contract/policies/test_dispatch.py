"""Dispatch policies assign images to encode groups."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.contract.waiting import Item
from vsched.policy import Dispatch, DispatchView, EncodeGroupView, ImagePolicy
from vsched.testing import check_policy
from vsched_policies.dispatch import FewestHeldUp, LeastLoadedGroup, SizeClasses

SECOND_NS = 1_000_000_000
BUILT_IN: list[ImagePolicy] = [FewestHeldUp(), LeastLoadedGroup(), SizeClasses(small_tokens=8)]
each = pytest.mark.parametrize("policy", BUILT_IN, ids=lambda policy: type(policy).__name__)


def free(**fields: Any) -> EncodeGroupView:
    return EncodeGroupView(free=True, **fields)


def busy(tokens: int, **fields: Any) -> EncodeGroupView:
    return EncodeGroupView(free=False, items=1, tokens=tokens, largest=tokens, **fields)


def ask(
    policy: ImagePolicy, groups: list[EncodeGroupView], *waiting: int | None, now_ns: int = 0
) -> Dispatch:
    entries = [Item(tokens) for tokens in waiting]
    return policy.dispatch(DispatchView(now_ns=now_ns, groups=groups, waiting=entries))


@pytest.mark.slow
@each
def test_dispatch_policy_keeps_its_contract(policy: ImagePolicy) -> None:
    check_policy(policy, seeds=range(8))


@each
def test_dispatch_answer_is_one_that_the_kernel_takes(policy: ImagePolicy) -> None:
    rng = random.Random(1)
    for _ in range(200):
        groups = [
            free(held_up=rng.randrange(3), tokens_encoded=rng.randrange(99))
            if rng.random() < 0.5
            else busy(rng.choice([4, 40]))
            for _ in range(rng.randint(1, 4))
        ]
        if not any(group.free for group in groups):
            groups.append(free())
        waiting = [rng.choice([None, 4, 40]) for _ in range(rng.randint(1, 5))]
        answer = ask(policy, groups, *waiting, now_ns=rng.choice([0, 10 * SECOND_NS]))
        if answer.group is None:
            assert not all(group.free for group in groups), "nothing is being encoded or proposed"
            continue
        assert groups[answer.group].free
        order = range(len(waiting)) if answer.order is None else answer.order
        assert order
        assert len(set(order)) == len(order)
        assert all(0 <= index < len(waiting) for index in order)


def test_fewest_held_up_takes_the_first_of_equals() -> None:
    groups = [busy(4), free(held_up=2), free(held_up=1), free(held_up=1)]
    assert ask(FewestHeldUp(), groups, 5) == Dispatch(2)


def test_least_loaded_looks_at_the_processes_and_then_at_the_work_so_far() -> None:
    groups = [free(load_tokens=9), free(load_tokens=3, tokens_encoded=8), free(load_tokens=3)]
    assert ask(LeastLoadedGroup(), groups, 5) == Dispatch(2)


@pytest.mark.parametrize(
    ("groups", "waiting", "answer"),
    [
        pytest.param([free(), free()], [40, 4, 4], Dispatch(0, [1, 2]), id="small ones first"),
        pytest.param([free(), free()], [40, 50], Dispatch(0, [0, 1]), id="large ones alone"),
        pytest.param([free(), free()], [None], Dispatch(0, [0]), id="of a failed batch"),
        pytest.param([busy(40), free()], [40, 4], Dispatch(1, [1]), id="a group for small ones"),
        pytest.param([busy(40), free()], [40], Dispatch(None, []), id="large ones wait"),
        pytest.param([busy(4), free()], [40], Dispatch(1, [0]), id="large beside small"),
        pytest.param([free()], [40], Dispatch(0, [0]), id="one group"),
    ],
)
def test_size_classes_keep_small_and_large_apart(
    groups: list[EncodeGroupView], waiting: list[int | None], answer: Dispatch
) -> None:
    assert ask(SizeClasses(small_tokens=8), groups, *waiting) == answer


def test_size_classes_lose_their_patience() -> None:
    policy = SizeClasses(small_tokens=8, patience_s=2)
    assert ask(policy, [free(), free()], 4, 40, now_ns=2 * SECOND_NS) == Dispatch(0, [1])
    assert ask(policy, [free(), free()], 4, 40, now_ns=2 * SECOND_NS - 1) == Dispatch(0, [0])
