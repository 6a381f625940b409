"""Dispatch policies assign images to encode groups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.waiting import Item
from vsched.policy import Dispatch, DispatchView, EncodeGroupView, ImagePolicy
from vsched_policies.dispatch import FewestHeldUp, SizeClasses

SECOND_NS = 1_000_000_000


def free(**fields: Any) -> EncodeGroupView:
    return EncodeGroupView(free=True, **fields)


def busy(tokens: int, **fields: Any) -> EncodeGroupView:
    return EncodeGroupView(free=False, items=1, tokens=tokens, largest=tokens, **fields)


def ask(
    policy: ImagePolicy, groups: list[EncodeGroupView], *waiting: int | None, now_ns: int = 0
) -> Dispatch:
    entries = [Item(tokens) for tokens in waiting]
    return policy.dispatch(DispatchView(now_ns=now_ns, groups=groups, waiting=entries))


def test_fewest_held_up_takes_the_first_of_equals() -> None:
    groups = [busy(4), free(held_up=2), free(held_up=1), free(held_up=1)]
    assert ask(FewestHeldUp(), groups, 5) == Dispatch(2)


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
