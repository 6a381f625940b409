"""Whatever a policy does to its view, answers or raises: the kernel serves, and names the policy."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.harmful import (
    KINDS,
    ODD,
    RAISES,
    Odd,
    answers_of,
    changed_by,
    default_of,
    everywhere,
    forced,
    places,
    reachable,
    wrapped,
)
from tests.unit.kernel.setups import image_request, make_cluster, outcome, words
from tests.workers.properties import thorough
from vsched.policy import POLICY_TABLES, Policy, RequestPolicy
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import SEATS, default_policies, seats_of

FEW = settings(max_examples=3, deadline=None, derandomize=True, database=None)
USUAL = {"None", "a negative", "duplicates", "a long range"}
USUAL |= {"an endless generator", "an angry value"}
"""Odd values of `make test`."""


def serve(**policies: Policy) -> ModelCluster:
    """Serve requests that need every kind of decision, some of which come while others run."""
    limits = {"blocks": 28, "pages": 8, "chunk_tokens": 12, "generators": 2, "encoders": 2}
    cluster = make_cluster(**limits, drafts=True, **policies)
    for index in range(6):
        image = (b"image%d" % (index % 3), 10)
        cluster.arrive(image_request(f"image{index}", image, max_tokens=6))
        cluster.arrive(make_request(f"text{index}", words(20, start=20 * index), max_tokens=24))
    late = image_request("late", (b"old", 8), (b"large", 24), max_tokens=4)
    cluster.submit(make_request("old", words(64), [(64, 24, b"late")], max_tokens=2))
    cluster.submit(late)
    cluster.drain()
    assert not cluster.unserved()
    assert all(one.reason == "length" for one in cluster.ended.values())
    cluster.check_settled()
    return cluster


served_by_defaults = cache(serve)


def test_every_kind_is_tried() -> None:
    assert {POLICY_TABLES[table] for table in SEATS.values()} == {*KINDS, "eviction"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_view_can_be_changed(kind: str) -> None:
    """All mutations of all objects that a view leads to raise, and so the run goes as it does without them."""
    done: list[str] = []
    seen: set[str] = set()

    def around(ask: Any, view: Any) -> Any:
        done.extend(changed_by(view))
        seen.update(type(one).__name__ for one in reachable(view))
        return ask(view)

    defaults = default_policies().by_table
    policies = {place: type(defaults[SEATS[place]]) for place in seats_of(kind)}
    cluster = serve(**{place: wrapped(cls, around) for place, cls in policies.items()})
    assert not done
    assert len(seen) > 1, "no view was seen"
    assert outcome(cluster) == outcome(served_by_defaults())
    assert not cluster.notices


@settings(FEW, max_examples=5)
@given(
    choices=st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    value=st.sampled_from([None, -1, 10**9, "", ()]),
    keep=st.booleans(),
)
def test_views_changed_by_force_do_no_harm(choices: list[int], value: object, keep: bool) -> None:
    """Fields that are forced, during the call or later, at most change what policies see."""
    kept: list[Any] = []
    calls = iter(choices * 1000)

    def around(ask: Any, view: Any) -> Any:
        answer = ask(view)
        if keep:
            kept.append(view)
        forced(kept[0] if keep else view, next(calls, 0), value)
        return answer

    serve(**everywhere(around))


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(one, id=one.name, marks=[] if one.name in USUAL else [pytest.mark.thorough])
        for one in ODD
    ],
)
def test_odd_answers_do_no_harm(odd: Odd) -> None:
    serve(**everywhere(lambda *_: odd.make()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if answers_of(kind)])
@FEW
@given(data=st.data())
def test_odd_fields_of_answers_do_no_harm(kind: str, data: st.DataObject) -> None:
    drawn = data.draw(st.sampled_from(answers_of(kind)), "answer")
    fields: dict[str, Odd] = {
        name: data.draw(st.sampled_from(ODD), name)
        for name in drawn.__struct_fields__
        if data.draw(st.booleans())
    }

    def around(ask: Any, view: Any) -> Any:
        answer = ask(view)
        if isinstance(answer, drawn):
            made = {name: getattr(answer, name) for name in drawn.__struct_fields__}
        else:
            made = dict.fromkeys(drawn.__struct_fields__, 0)
        return drawn(**{**made, **{name: one.make() for name, one in fields.items()}})

    serve(**places(kind, wrapped(default_of(kind), around)))


@pytest.mark.parametrize("number", [0, 1, *thorough(*range(2, len(RAISES)))])
def test_no_exception_ends_the_kernel(number: int) -> None:
    """The failure is counted, named with file and line, and its traceback is kept once."""

    def around(ask: Any, view: Any) -> Any:
        RAISES[number]()
        return ask(view)

    policies = everywhere(around)
    cluster = serve(**policies)
    names = {type(policy).__name__ for policy in policies.values()}
    assert cluster.kernel.statistics()["policy_faults"].keys() == names
    traces = cluster.kernel.policy_failures
    assert traces.keys() == names
    for name in names:
        where = f"policy {name} failed at harmful.py:"
        said = [notice for notice in cluster.notices if notice.startswith(where)]
        assert "the default decided. Input: " in said[0]
        assert f'File "{__file__}"' in "".join(traces[name].format())


def test_traceback_of_each_kind_of_failure_is_kept_once() -> None:
    errors = [ValueError("first"), KeyError("second"), ValueError("third")]

    def around(ask: Any, view: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return ask(view)

    cluster = serve(generate_admission=wrapped(default_of("admission"), around))
    kept = [*cluster.kernel.policy_failures]
    assert kept == ["HarmfulTokenBudget", "HarmfulTokenBudget, KeyError"]


def test_interrupt_by_the_user_passes() -> None:
    """Ctrl-C ends a program whose policy never returns; the failure is not the policy's."""

    def around(ask: Any, view: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    policy = wrapped(default_of("admission"), around)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            serve(generate_admission=policy)
    finally:
        signal.signal(signal.SIGINT, before)


class Hoard(msgspec.Struct):
    names: list[str] = []


class Keeping(RequestPolicy, frozen=True, kw_only=True):
    """Keeps its states, and changes them after the call that they were lent to."""

    state_type = Hoard

    def admit(self, view: Any) -> Any:
        state: Hoard = view.state
        assert state.names == ["x"] * len(state.names)
        for old in KEPT:
            old.names.append("changed later")
        KEPT[:] = [*KEPT[-5:], state]
        state.names.append("x")
        del state.names[10:]
        return default_of("admission")().admit(view)  # type: ignore[attr-defined]


KEPT: list[Hoard] = []


def test_states_that_are_kept_and_changed_later_do_no_harm() -> None:
    KEPT.clear()
    cluster = serve(generate_admission=Keeping())
    assert not cluster.notices


def test_state_that_can_no_longer_be_read_replaces_the_policy() -> None:
    calls: list[int] = []

    class Brittle(msgspec.Struct):
        count: int = 0

        def __post_init__(self) -> None:
            if len(calls) > 3:
                raise SystemExit

    class Tries(RequestPolicy, frozen=True, kw_only=True):
        state_type = Brittle

        def admit(self, view: Any) -> Any:
            calls.append(1)
            return default_of("admission")().admit(view)  # type: ignore[attr-defined]

    cluster = serve(generate_admission=Tries())
    replaced = cluster.kernel.statistics()["policy_replaced"]
    assert set(replaced) == {"generate-0.admission"} or len(replaced) == 2
