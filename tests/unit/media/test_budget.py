"""The memory budget of decoding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vsched.media.budget import ByteBudget, Grant


class Bench:
    """A budget, and the order of its grants."""

    def __init__(self, size: int = 100) -> None:
        self.budget = ByteBudget(size)
        self.started: list[Grant] = []

    def ask(self, size: int) -> Grant:
        return self.budget.ask(size, self.started.append)

    @property
    def state(self) -> tuple[int, int]:
        statistics = self.budget.statistics()
        return statistics.bytes_used, statistics.waiting


def test_budget_release_while_beginning_does_not_nest() -> None:
    """A pool that is gone returns every grant at once, however many requests wait."""
    bench = Bench()
    first = bench.ask(100)
    for _ in range(5000):
        bench.budget.ask(100, Grant.release)
    first.release()
    assert bench.state == (0, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(0, 10)),
            st.tuples(st.just("release"), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
@settings(derandomize=True, database=None, deadline=None, max_examples=200)
def test_budget_under_any_schedule(steps: list[tuple[str, int]]) -> None:
    """Never over its size, in the order of arrival, never idle with space for the first, empty at the end."""
    bench = Bench(10)
    requested: list[Grant] = []
    released: set[int] = set()
    for action, value in steps:
        if action == "ask":
            requested.append(bench.ask(value))
        elif value < len(requested):
            requested[value].release()
            released.add(value)
        started = [requested.index(grant) for grant in bench.started]
        assert started == sorted(started)
        held = [requested[index].size for index in started if index not in released]
        waiting = [i for i in range(len(requested)) if i not in released and i not in started]
        assert bench.state == (sum(held), len(waiting))
        assert sum(held) <= 10
        if waiting:
            assert requested[waiting[0]].size > 10 - sum(held)
    for grant in requested:
        grant.release()
    assert bench.state == (0, 0)
