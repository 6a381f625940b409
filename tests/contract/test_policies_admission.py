"""Decisions of each admission policy, case by case, in the encode stage and in the generate stage."""

from __future__ import annotations

import pytest

from tests.contract.waiting import SECOND_NS, Item, admit, ask
from vsched.policy import RequestPolicy
from vsched_policies.admission import Fifo, Priority, Tiers, TokenBudget

Budgeted = type[TokenBudget] | type[Priority] | type[Tiers]
BUDGETED = pytest.mark.parametrize("cls", [TokenBudget, Priority, Tiers])
"""Policies with a token budget and a count cap."""


@BUDGETED
@pytest.mark.parametrize(
    ("sizes", "admitted", "remaining"),
    [
        ([100, 99], [100, 99], []),
        ([100, 100], [100, 100], []),
        ([100, 101], [100], [101]),
        ([100, 100, 1], [100, 100], [1]),
        ([100, 101, 1], [100], [101, 1]),
    ],
)
def test_budget_stops_before_the_item_that_exceeds(
    cls: Budgeted,
    sizes: list[int | None],
    admitted: list[int | None],
    remaining: list[int | None],
) -> None:
    """Admission stops before the item that would exceed; equal is admitted. Exact order."""
    assert admit(cls(max_tokens=200), sizes) == (admitted, remaining)


@BUDGETED
def test_budget_admits_a_first_item_above_it_alone(cls: Budgeted) -> None:
    """No deadlock, and nothing with it, not even free items."""
    policy = cls(max_tokens=200)
    assert admit(policy, [500, 1]) == ([500], [1])
    assert admit(policy, [500, 0]) == ([500], [0])
    assert admit(policy, [500]) == ([500], [])


@BUDGETED
@pytest.mark.parametrize(
    ("max_items", "entries_free", "admitted"),
    [(2, 100, 2), (100, 2, 2), (100, 100, 4), (1, 100, 1)],
)
def test_budget_holds_count_and_tokens(
    cls: Budgeted, max_items: int, entries_free: int, admitted: int
) -> None:
    """Whichever of count cap and token cap binds first."""
    policy = cls(max_tokens=40, max_items=max_items)
    taken, rest = admit(policy, [10] * 6, entries_free=entries_free)
    assert (len(taken), len(rest)) == (admitted, 6 - admitted)


@BUDGETED
def test_budget_default_derives_from_the_view(cls: Budgeted) -> None:
    """Without a value of its own it takes the stage's."""
    assert admit(cls(), [10, 10, 10], default_tokens=20) == ([10, 10], [10])


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


@BUDGETED
def test_budget_admits_by_what_an_entry_can_take_of_it(cls: Budgeted) -> None:
    """Prompts join with a part of their tokens: one that exceeds the budget uses it up."""
    policy = cls(max_tokens=100)
    assert admit(policy, [60, 60, 60], divisible=True, tokens_free=50) == ([60], [60, 60])
    unlimited = cls(max_tokens=0)
    assert admit(unlimited, [60] * 4, divisible=True, tokens_free=121) == ([60] * 3, [60])
    assert admit(policy, [60, 60, 60], divisible=True, tokens_free=1000) == ([60, 60], [60])


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
