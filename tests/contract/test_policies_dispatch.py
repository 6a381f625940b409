"""Dispatch policies assign images to encode groups."""

from __future__ import annotations

from typing import Any

from tests.contract.waiting import Item
from vsched.policy import Dispatch, DispatchView, EncodeGroupView, ImagePolicy
from vsched_policies.dispatch import FewestHeldUp


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
