"""Decisions of each admission policy, case by case, in both stages; some depend on earlier requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vsched.policy import (
    Admission,
    AdmissionView,
    ArrivalView,
    ArrivingRequest,
    RequestPolicy,
    RunningView,
    WaitingEntry,
)
from vsched.policy.measured import EndTime, Measurements
from vsched.policy_host.seats import STATE_BYTES_MAX
from vsched_policies.admission import (
    Fifo,
    OutputLengths,
    Priority,
    ShortestFirst,
    Tiers,
    TokenBudget,
)
from vsched_policies.requests import ServedTokens, TenantFair

SECOND_NS = 1_000_000_000


class Item(WaitingEntry, frozen=True):
    """A waiting entry whose tokens may be given by position."""

    tokens: int | None


def ask(
    policy: RequestPolicy, waiting: list[Item], *, divisible: bool = False, **view: Any
) -> Admission:
    """Call a policy with these entries, of the generate stage if divisible, else of the encode stage."""
    usual: dict[str, Any] = {"now_ns": 0, "tokens_free": 0, "entries_free": 100, "running": 0}
    usual |= {"blocks_free": 0, "default_tokens": 2048, "measured": Measurements()}
    stage = "generate" if divisible else "encode"
    return policy.admit(
        AdmissionView(stage=stage, waiting=waiting, divisible=divisible, **{**usual, **view})
    )


def admit(
    policy: RequestPolicy, sizes: list[int | None], **view: Any
) -> tuple[list[int | None], list[int | None]]:
    """Return the sizes admitted and the sizes that remain, each in order; the entries arrived at 0."""
    admission = ask(policy, [Item(size) for size in sizes], **view)
    assert admission.hold_until_ns is None, "the policy holds all entries"
    chosen = list(admission.indices)
    rest = [size for index, size in enumerate(sizes) if index not in chosen]
    return [sizes[index] for index in chosen], rest


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
    [TokenBudget(max_tokens=200), TokenBudget(max_tokens=0), Fifo(), Priority(max_tokens=0)],
    ids=repr,
)
def test_admission_runs_an_item_of_unknown_size_alone(policy: RequestPolicy) -> None:
    """Unknown is never 0, with a budget or without."""
    assert admit(policy, [None, 1]) == ([None], [1])
    assert admit(policy, [None, None]) == ([None], [None])
    taken, rest = admit(policy, [1, None])
    assert (taken, rest) == ([1], [None])


def test_fifo_fills_the_room() -> None:
    assert admit(Fifo(), [9999] * 4, entries_free=3) == ([9999] * 3, [9999])
    assert admit(Fifo(), [60, 60, 60], divisible=True, tokens_free=100) == ([60, 60], [60])
    assert admit(Fifo(), [60, 60], divisible=True, tokens_free=60) == ([60], [60])
    assert admit(Fifo(), []) == ([], [])


def test_priority_is_strict_and_first_come_within_a_level() -> None:
    waiting = [Item(1, priority=level) for level in (0, 5, -1, 5, 1)]
    assert list(ask(Priority(), waiting).indices) == [1, 3, 4, 0, 2]


def test_priority_lets_nothing_pass_the_more_urgent() -> None:
    """Strict even if the urgent one does not fit together with the others."""
    waiting = [Item(10), Item(50, priority=1), Item(60, priority=1), Item(10)]
    assert list(ask(Priority(max_tokens=100), waiting).indices) == [1]


def test_tiers_preempts_no_more_requests_than_may_join_in_a_step() -> None:
    running = [RunningView(tokens=1, blocks=1, outputs=1, arrived_ns=0)] * 3
    seen: dict[str, Any] = {"running_requests": running, "eligible": (0, 1, 2), "tokens_free": 100}
    waiting = [Item(10, priority=1)] * 4
    for policy, count in ((Tiers(), 3), (Tiers(max_items=1), 1), (Tiers(max_tokens=20), 2)):
        admission = ask(policy, waiting, divisible=True, entries_free=0, **seen)
        assert len(admission.indices) == len(admission.preempt) == count


@pytest.mark.parametrize(("waited_s", "order"), [(9.9, [1, 0]), (10.0, [0, 1]), (100.0, [0, 1])])
def test_priority_rises_with_age(waited_s: float, order: list[int]) -> None:
    """A level for every 10 s; at the same level the earlier arrival goes first."""
    now_ns = int(waited_s * SECOND_NS)
    waiting = [Item(1, priority=0, arrived_ns=0), Item(1, priority=1, arrived_ns=now_ns)]
    assert list(ask(Priority(ageing_s=10.0), waiting, now_ns=now_ns).indices) == order
    assert list(ask(Priority(ageing_s=0.0), waiting, now_ns=now_ns).indices) == [1, 0]


# --- policies that remember earlier requests ---


def end(ended_ns: int, prompt: int, output: int, tenant: str = "") -> EndTime:
    return EndTime(
        ended_ns=ended_ns, total_ns=1, prompt_tokens=prompt, output_tokens=output, tenant=tenant
    )


def chosen(policy: TenantFair | ShortestFirst, waiting: list[Item], **view: object) -> list[int]:
    admission = ask(policy, waiting, divisible=True, tokens_free=100_000, **view)
    return list(admission.indices)


def of(tenants: str, tokens: int = 10) -> list[Item]:
    """Return an entry for each letter."""
    return [Item(tokens, tenant=tenant) for tenant in tenants]


@pytest.mark.parametrize(
    ("waiting", "running", "order"),
    [
        (of("aaabb"), {}, [0, 3, 1, 4, 2]),
        ([*of("aa", 100), *of("bbb", 30)], {}, [0, 2, 3, 4, 1]),
        (of("aabbb"), {"a": 25}, [2, 3, 4, 0, 1]),
    ],
)
def test_tenant_fair_takes_tenants_in_turn_by_tokens_of_admitted_and_running_requests(
    waiting: list[Item], running: dict[str, int], order: list[int]
) -> None:
    measured = Measurements(tokens_running=running)
    assert chosen(TenantFair(), waiting, state=ServedTokens(), measured=measured) == order


def test_tenant_fair_counts_ended_requests_once() -> None:
    state = ServedTokens(tokens={"a": 0.0, "b": 0.0}, waited=["a", "b"])
    measured = Measurements(ends=[end(5, 10, 20, "a")])
    for _ in range(2):
        picked = chosen(TenantFair(), of("ab"), state=state, measured=measured, entries_free=1)
        assert picked == [1]
    assert state.tokens == {"a": 50.0, "b": 0.0}


def test_tenant_fair_raises_the_counter_of_late_tenants() -> None:
    """A tenant that was away has no credit, and one that took more before keeps its debt."""
    state = ServedTokens(tokens={"a": 900.0, "b": 1000.0}, waited=["a"])
    chosen(TenantFair(), of("abc"), state=state)
    assert state.tokens == {"a": 900.0, "b": 1000.0, "c": 900.0}


def test_tenant_fair_keeps_its_state_within_the_limit_for_long_names() -> None:
    """With rates and a queue, all three fields have names; a name of any length leaves room for the others."""
    policy, state = TenantFair(rate=0.001, burst=2), ServedTokens()
    names = ["x" * 20_000, *(f"{number:064}" for number in range(300))]
    for name in names:
        request = ArrivingRequest(tenant=name, arrived_ns=1)
        policy.arrive(ArrivalView(now_ns=1, request=request, state=state))
    state.floor = 5.0
    chosen(policy, [Item(10, tenant=name) for name in names], state=state)
    assert len(msgspec.msgpack.encode(state)) <= STATE_BYTES_MAX
    assert min(len(state.tokens), len(state.full_ns), len(state.waited)) >= 64


def test_shortest_first_learns_lengths_by_prompt() -> None:
    """Short prompts had long outputs, so the longer prompt is done first."""
    ends = [end(1, 10, 500), end(2, 200, 5)]
    waiting = [Item(12), Item(180)]
    assert chosen(ShortestFirst(), waiting, state=OutputLengths()) == [0, 1]
    measured = Measurements(ends=ends)
    state = OutputLengths()
    assert chosen(ShortestFirst(), waiting, state=state, measured=measured) == [1, 0]
    before = list(state.means)
    chosen(ShortestFirst(), waiting, state=state, measured=measured)
    assert state.means == before, "each end counts once"


def test_shortest_first_ages() -> None:
    waiting = [Item(1000, arrived_ns=0), Item(10, arrived_ns=9 * SECOND_NS)]
    policy = ShortestFirst(ageing_s=10.0)
    assert chosen(policy, waiting, state=OutputLengths(), now_ns=9 * SECOND_NS) == [1, 0]
    assert chosen(policy, waiting, state=OutputLengths(), now_ns=10 * SECOND_NS) == [0, 1]
