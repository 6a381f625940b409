"""State of a policy: kept if its decision is accepted, else unchanged; by place, in bytes, plain values."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import Tallied, Tally
from tests.unit.kernel.setups import answering, complete, make_cluster, make_limits, words
from vsched.errors import PolicyError, RecordError
from vsched.kernel import Scheduler
from vsched.plugins import check_contract
from vsched.policy import DECISIONS, Admission, AdmissionView, MemoryPolicy, Policy, RequestPolicy
from vsched.policy_host.seats import STATE_BYTES_MAX, PolicyFaults, PolicySeat
from vsched.policy_host.snapshot import encode_snapshot, restore_snapshot
from vsched.testing import ModelCluster, default_policies, make_request


class Doing(RequestPolicy, frozen=True, kw_only=True):
    """Counts its calls, and then does what the test wants."""

    class State(msgspec.Struct):
        calls: int = 0
        sizes: tuple[int, ...] = ()
        text: str = ""

    state_type = State

    def admit(self, view: AdmissionView) -> Admission:
        view.state.calls += 1
        return ACTS.pop(0)(view) if ACTS else Admission([0])


ACTS: list[Any] = []


def raises(view: AdmissionView) -> Admission:
    raise RuntimeError("a bug in the policy")


def spoils(field: str, value: Any) -> Callable[[AdmissionView], Admission]:
    """Return an act that leaves a value in the state that cannot be kept."""

    def act(view: AdmissionView) -> Admission:
        setattr(view.state, field, value)
        return Admission([0])

    return act


def serve(cluster: ModelCluster, count: int) -> None:
    for index in range(count):
        name = f"r{len(cluster.requests)}"
        complete(cluster, make_request(name, words(4, start=10 * index), max_tokens=1))


def calls_of(cluster: ModelCluster, seat: str = "generate.admission") -> int:
    return int(msgspec.msgpack.decode(cluster.kernel.policy_states()[seat])["calls"])


@pytest.mark.parametrize(
    "act",
    [
        raises,
        lambda _: Admission([99]),
        spoils("text", "x" * STATE_BYTES_MAX),
        spoils("sizes", "many"),
        spoils("text", object()),
        spoils("calls", 1 << 70),
    ],
    ids=["raises", "nonsense", "too much", "another type", "an object", "a huge number"],
)
def test_state_is_as_it_was_after_a_call_that_failed(act: Any) -> None:
    """The next call sees it so, not only the record."""
    seen: list[int] = []

    def look(view: AdmissionView) -> Admission:
        seen.append(view.state.calls)
        return Admission([0])

    ACTS[:] = [look, act, look]
    cluster = make_cluster(generate_admission=Doing())
    serve(cluster, 3)
    assert seen == [1, 2], "the second call failed, so the third is the second that counts"
    assert calls_of(cluster) == 2
    assert cluster.kernel.statistics()["policy_faults"] == {"Doing": 1}
    assert len(cluster.notices) == 1
    assert sorted(cluster.ended) == ["r0", "r1", "r2"], "the default served it"


def test_state_has_the_declared_types_in_the_next_call() -> None:
    """As after a restart: a list stored in a tuple field is a tuple."""

    def leave_list(view: AdmissionView) -> Admission:
        view.state.sizes = [1, 2]
        return Admission([0])

    def find_tuple(view: AdmissionView) -> Admission:
        assert view.state.sizes == (1, 2)
        return Admission([0])

    ACTS[:] = [leave_list, find_tuple]
    cluster = make_cluster(generate_admission=Doing())
    serve(cluster, 2)
    assert cluster.notices == []


def test_states_are_kept_by_place_and_replica() -> None:
    places = ("encode_admission", "generate_admission", "routing")
    cluster = make_cluster(generators=2, **{place: Tallied() for place in places})
    serve(cluster, 6)
    seats = ["encode.admission", "generate-0.admission", "generate-1.admission", "routing"]
    assert sorted(cluster.kernel.policy_states()) == seats
    calls = [calls_of(cluster, seat) for seat in seats]
    assert calls[0] == 0
    assert calls[1] + calls[2] >= calls[3] == 6
    assert min(calls[1:]) > 0


def test_snapshot_refuses_the_state_of_another_policy() -> None:
    limits = make_limits()
    cluster = ModelCluster(limits, default_policies(generate_admission=Doing()))
    data = encode_snapshot(cluster.kernel)
    with pytest.raises(RecordError, match="Fifo: it has no state, and one was recorded"):
        restore_snapshot(Scheduler(limits, default_policies()), data)
    seat = PolicySeat(Tallied(), DECISIONS["routing"], PolicyFaults())
    with pytest.raises(RecordError, match="Tallied: its state cannot be kept"):
        seat.kept = b"\xc0"


class Colour(enum.Enum):
    """A plain value, too."""

    RED = "red"


class Node(msgspec.Struct):
    children: list[Node] = []
    colour: Colour = Colour.RED
    pair: tuple[int, float] | None = None


def class_with(state_type: Any, decision: str = "admission") -> type[Policy]:
    made = type(answering(decision, Admission([0])))
    made.state_type = state_type
    return made


def state_of(*field: Any, frozen: bool = False) -> Any:
    """Return a type of states with one field: its name, its type, and the default, if it has one."""
    return msgspec.defstruct("State", [field], frozen=frozen)


@pytest.mark.parametrize(
    ("state_type", "words"),
    [
        (state_of("seen", set[str], set()), "the state State.seen is a set, whose order differs"),
        (state_of("by_name", dict[str, list[frozenset[int]]], {}), "State.by_name is a set"),
        (state_of("lock", complex, 0j), "the state State.lock is no plain value"),
        (state_of("wish", Any, None), "the state State.wish has no type of its own"),
        (state_of("rate", float), "must have a default for every field"),
        (state_of("rate", float, 0.0, frozen=True), "is frozen, and a policy changes it in place"),
        (state_of("rate", float, "fast"), "has defaults that cannot be kept"),
        (dict, "must be a msgspec.Struct"),
        (Tally(), "must be a msgspec.Struct"),
    ],
)
def test_contract_refuses_a_state_that_cannot_be_kept(state_type: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words) as caught:
        check_contract(class_with(state_type), "admission")
    assert "Answering: " in str(caught.value)


@pytest.mark.parametrize("state_type", [None, Tally, Node])
def test_contract_takes_a_state_of_plain_values(state_type: Any) -> None:
    check_contract(class_with(state_type), "admission")


class Plan(MemoryPolicy, frozen=True, kw_only=True):
    state_type = Tally

    def plan(self, view: Any) -> Any:
        yield


@pytest.mark.parametrize(
    ("cls", "kind"), [(class_with(Tally, "eviction"), "eviction"), (Plan, "memory")]
)
def test_contract_refuses_a_state_if_none_is_kept(cls: type[Policy], kind: str) -> None:
    with pytest.raises(PolicyError, match=f"of the kind {kind} has no state"):
        check_contract(cls, kind)
