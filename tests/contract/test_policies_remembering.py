"""Stateful admission policies: decisions that depend on earlier requests."""

from __future__ import annotations

from tests.contract.waiting import Item, ask
from vsched.policy.measured import EndTime, Measurements
from vsched_policies.admission import OutputLengths, ShortestFirst
from vsched_policies.requests import TENANTS_MAX, ServedTokens, TenantFair

SECOND_NS = 1_000_000_000


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


def test_tenant_fair_takes_tenants_in_turn() -> None:
    assert chosen(TenantFair(), of("aaabb"), state=ServedTokens()) == [0, 3, 1, 4, 2]


def test_tenant_fair_counts_the_tokens_of_what_it_takes() -> None:
    waiting = [Item(100, tenant="a"), Item(100, tenant="a"), *of("bbb", 30)]
    assert chosen(TenantFair(), waiting, state=ServedTokens()) == [0, 2, 3, 4, 1]


def test_tenant_fair_counts_what_ended_once() -> None:
    state = ServedTokens(tokens={"a": 0.0, "b": 0.0}, waited=["a", "b"])
    measured = Measurements(ends=[end(5, 10, 20, "a")])
    for _ in range(2):
        picked = chosen(TenantFair(), of("ab"), state=state, measured=measured, entries_free=1)
        assert picked == [1]
    assert state.tokens == {"a": 50.0, "b": 0.0}


def test_tenant_fair_counts_what_runs() -> None:
    measured = Measurements(tokens_running={"a": 25})
    assert chosen(TenantFair(), of("aabbb"), state=ServedTokens(), measured=measured)[:3] == [
        2,
        3,
        4,
    ]


def test_tenant_fair_raises_the_counter_of_late_tenants() -> None:
    """A tenant that was away has no credit, and one that took more before keeps its debt."""
    state = ServedTokens(tokens={"a": 900.0, "b": 1000.0}, waited=["a"])
    chosen(TenantFair(), of("abc"), state=state)
    assert state.tokens == {"a": 900.0, "b": 1000.0, "c": 900.0}


def test_tenant_fair_keeps_a_bounded_number_of_counters() -> None:
    state = ServedTokens(tokens={f"t{number}": number for number in range(TENANTS_MAX + 50)})
    chosen(TenantFair(), of("ab"), state=state)
    assert len(state.tokens) == TENANTS_MAX
    assert f"t{TENANTS_MAX + 49}" in state.tokens


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
