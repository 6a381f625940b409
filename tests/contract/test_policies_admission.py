"""Decisions of each admission policy, case by case, in the encode stage and in the generate stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.waiting import SECOND_NS, Item, admit, ask
from vsched.policy import RequestPolicy
from vsched_policies.admission import Fifo, Priority, Tiers, TokenBudget


@pytest.mark.parametrize("cls", [TokenBudget, Priority, Tiers])
@pytest.mark.parametrize(
    ("fields", "sizes", "view", "joining"),
    [
        # Admission stops before the item that would exceed the budget; equal is admitted.
        ({"max_tokens": 200}, [100, 99], {}, 2),
        ({"max_tokens": 200}, [100, 100], {}, 2),
        ({"max_tokens": 200}, [100, 101], {}, 1),
        ({"max_tokens": 200}, [100, 100, 1], {}, 2),
        ({"max_tokens": 200}, [100, 101, 1], {}, 1),
        # A first item above the budget is no deadlock, and nothing joins with it, not even free items.
        ({"max_tokens": 200}, [500, 1], {}, 1),
        ({"max_tokens": 200}, [500, 0], {}, 1),
        ({"max_tokens": 200}, [500], {}, 1),
        # Of the caps on entries and on tokens, the first binds.
        ({"max_tokens": 40, "max_items": 2}, [10] * 6, {}, 2),
        ({"max_tokens": 40, "max_items": 100}, [10] * 6, {"entries_free": 2}, 2),
        ({"max_tokens": 40, "max_items": 100}, [10] * 6, {}, 4),
        ({"max_tokens": 40, "max_items": 1}, [10] * 6, {}, 1),
        # Without a budget of its own, it takes the stage's.
        ({}, [10, 10, 10], {"default_tokens": 20}, 2),
        # Prompts join with a part of their tokens: one that exceeds the budget uses it up.
        ({"max_tokens": 100}, [60] * 3, {"divisible": True, "tokens_free": 50}, 1),
        ({"max_tokens": 0}, [60] * 4, {"divisible": True, "tokens_free": 121}, 3),
        ({"max_tokens": 100}, [60] * 3, {"divisible": True, "tokens_free": 1000}, 2),
    ],
)
def test_budget_admits_the_first_entries_that_fit(
    cls: type[TokenBudget | Priority | Tiers],
    fields: dict[str, Any],
    sizes: list[int | None],
    view: dict[str, Any],
    joining: int,
) -> None:
    assert admit(cls(**fields), sizes, **view) == (sizes[:joining], sizes[joining:])


@pytest.mark.parametrize(
    "policy",
    [
        TokenBudget(max_tokens=200),
        TokenBudget(max_tokens=0),
        Fifo(),
        Priority(max_tokens=0),
    ],
    ids=repr,
)
def test_admission_runs_an_item_of_unknown_size_alone(policy: RequestPolicy) -> None:
    """Unknown is never 0, with a budget or without."""
    assert admit(policy, [None, 1]) == ([None], [1])
    assert admit(policy, [None, None]) == ([None], [None])
    taken, rest = admit(policy, [1, None])
    assert (taken, rest) == ([1], [None])


def test_fifo_takes_what_there_is_room_for() -> None:
    assert admit(Fifo(), [9999] * 4, entries_free=3) == ([9999] * 3, [9999])
    assert admit(Fifo(), [60, 60, 60], divisible=True, tokens_free=100) == ([60, 60], [60])
    assert admit(Fifo(), [60, 60], divisible=True, tokens_free=60) == ([60], [60])
    assert admit(Fifo(), []) == ([], [])


# --- priority ---


def test_priority_is_strict_and_first_come_within_a_level() -> None:
    waiting = [Item(1, priority=level) for level in (0, 5, -1, 5, 1)]
    assert list(ask(Priority(), waiting).indices) == [1, 3, 4, 0, 2]


def test_priority_lets_nothing_pass_the_more_urgent() -> None:
    """Strict even if the urgent one does not fit together with the others."""
    waiting = [Item(10), Item(50, priority=1), Item(60, priority=1), Item(10)]
    assert list(ask(Priority(max_tokens=100), waiting).indices) == [1]


@pytest.mark.parametrize(("waited_s", "order"), [(9.9, [1, 0]), (10.0, [0, 1]), (100.0, [0, 1])])
def test_priority_rises_with_age(waited_s: float, order: list[int]) -> None:
    """A level for every 10 s; at the same level the earlier arrival goes first."""
    now_ns = int(waited_s * SECOND_NS)
    waiting = [Item(1, priority=0, arrived_ns=0), Item(1, priority=1, arrived_ns=now_ns)]
    assert list(ask(Priority(ageing_s=10.0), waiting, now_ns=now_ns).indices) == order
    assert list(ask(Priority(ageing_s=0.0), waiting, now_ns=now_ns).indices) == [1, 0]
