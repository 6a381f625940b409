"""A policy that raises or returns invalid decisions is counted, and the kernel's own default decides."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.kernel.setups import (
    assert_holds_nothing,
    assert_served,
    image_request,
    make_limits,
    words,
)
from vsched.kernel.guarded_order import GuardedOrder
from vsched.kernel.policy_seats import PolicyFaults
from vsched.policy import (
    DECISIONS,
    Admission,
    AdmissionView,
    CachePolicy,
    Dispatch,
    DispatchView,
    Draft,
    EncodingView,
    EvictionOrder,
    Hold,
    ImagePolicy,
    InsertionView,
    Policy,
    Preemption,
    PreemptionView,
    ReclaimView,
    Redirect,
    RequestPolicy,
    Shed,
    StepShares,
)
from vsched.testing import ModelCluster, default_policies, make_request
from vsched_policies.eviction import Lru


class Answers:
    """Returns its decisions in turn, the last for ever; raises those that are exceptions."""

    def __init__(self, *choices: Any) -> None:
        self.choices = list(choices)

    def __call__(self) -> Any:
        answer = self.choices.pop(0) if len(self.choices) > 1 else self.choices[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Said:
    """Looks like an admission."""

    def __init__(self, indices: Any = (), hold_until_ns: Any = None) -> None:
        self.indices = indices
        self.hold_until_ns = hold_until_ns

    def __repr__(self) -> str:
        return f"Said({self.indices!r}, {self.hold_until_ns!r})"


class BadAdmission(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Any:
        return BROKEN["admission"]()


class BadEncoding(ImagePolicy, frozen=True, kw_only=True):
    def select(self, view: EncodingView) -> Any:
        return BROKEN["encoding"]()


class BadPreemption(RequestPolicy, frozen=True, kw_only=True):
    def victim(self, view: PreemptionView) -> Any:
        return BROKEN["preemption"]()


class BadEviction(CachePolicy, frozen=True, kw_only=True):
    def build_order(self) -> Any:
        return BROKEN["eviction"]()


class BadDispatch(ImagePolicy, frozen=True, kw_only=True):
    def dispatch(self, view: DispatchView) -> Any:
        return BROKEN["dispatch"]()


class BadReclaim(ImagePolicy, frozen=True, kw_only=True):
    def reclaim(self, view: ReclaimView) -> Any:
        return BROKEN["reclaim"]()


class BadInsertion(CachePolicy, frozen=True, kw_only=True):
    def keep(self, view: InsertionView) -> Any:
        return BROKEN["insertion"]()


BROKEN: dict[str, Answers] = {}


class BadOrder:
    """An eviction order with one broken method."""

    def __init__(self, broken: str, answer: Any) -> None:
        self._broken = broken
        self._answer = answer
        self._order: EvictionOrder[Hashable] = Lru().build_order()

    def _do(self, name: str, *arguments: Any) -> Any:
        if name == self._broken:
            if isinstance(self._answer, BaseException):
                raise self._answer
            return self._answer
        return getattr(self._order, name)(*arguments)

    def add(self, key: Hashable, size: int) -> Any:
        return self._do("add", key, size)

    def reuse(self, key: Hashable) -> Any:
        return self._do("reuse", key)

    def drop(self, key: Hashable) -> Any:
        return self._do("drop", key)

    def victim(self) -> Any:
        return self._do("victim")

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._order)


NO_VICTIMS: list[object] = [None, b"not in it", 12345, []]
BOOM = RuntimeError("a bug in the policy")


def serve_all(policies: dict[str, Policy]) -> ModelCluster:
    """Serve requests that need every kind of decision."""
    limits = make_limits(blocks=14, slots=4, pages=8, chunk_tokens=12)
    cluster = ModelCluster(limits, default_policies(**policies))
    for index in range(5):
        image = (b"image%d" % (index % 3), 10)
        cluster.submit(image_request(f"image{index}", image, max_tokens=20))
        cluster.submit(make_request(f"text{index}", words(12, start=20 * index), max_tokens=24))
    cluster.drain()
    assert_served(cluster, *cluster.requests)
    assert_holds_nothing(cluster)
    return cluster


@pytest.mark.parametrize("stage", ["encode_admission", "generate_admission"])
@pytest.mark.parametrize(
    "answer",
    [
        BOOM,
        None,
        Said([99]),
        Said([-1]),
        Said([0, 0]),
        Said(["first"]),
        Said([0.5]),
        Said([], hold_until_ns=1),
        Said([], hold_until_ns="soon"),
        Said([0], hold_until_ns=1 << 60),
        Said([], hold_until_ns=1 << 60),
        Said(None),
    ],
    ids=repr,
)
def test_guard_admission_default_decides(stage: str, answer: Any) -> None:
    """Requests are served in order of arrival; the failures are counted and logged."""
    BROKEN["admission"] = Answers(answer)
    cluster = serve_all({stage: BadAdmission()})
    faults = cluster.kernel.statistics()["policy_faults"]
    assert isinstance(faults, dict)
    assert faults["BadAdmission"] >= len(cluster.notices) > 0
    assert "policy BadAdmission failed" in cluster.notices[0]
    assert "the default decided. Input: AdmissionView(stage=" in cluster.notices[0]


def test_guard_admission_that_admits_nobody_is_overruled_when_nothing_runs() -> None:
    """With nothing running and no time to hold until, some request must join."""
    BROKEN["admission"] = Answers(Said())
    cluster = serve_all({"generate_admission": BadAdmission()})
    assert any("nothing is admitted" in notice for notice in cluster.notices)
    assert cluster.kernel.statistics()["policy_faults"]


@pytest.mark.parametrize("answer", [BOOM, None, [99], [-1], ["first"], [0.5], 3], ids=repr)
def test_guard_encoding_default_decides(answer: Any) -> None:
    """The items that a chunk needs are encoded, whatever the policy returns."""
    BROKEN["encoding"] = Answers(answer)
    cluster = serve_all({"encoding": BadEncoding()})
    assert "policy BadEncoding failed" in cluster.notices[0]
    assert cluster.kernel.statistics()["policy_faults"]


def test_guard_encoding_that_forgets_the_needed_items_is_completed() -> None:
    """An empty list is legal: items that the chunk needs are always added."""
    BROKEN["encoding"] = Answers([])
    cluster = serve_all({"encoding": BadEncoding()})
    assert cluster.notices == []
    assert cluster.kernel.statistics()["policy_faults"] == {}


@pytest.mark.parametrize("answer", [BOOM, None, 99, -1, "youngest", 0.5], ids=repr)
def test_guard_preemption_default_decides(answer: Any) -> None:
    """The youngest is preempted."""
    BROKEN["preemption"] = Answers(answer)
    cluster = serve_all({"preemption": BadPreemption()})
    assert "policy BadPreemption failed" in cluster.notices[0]
    assert "Input: PreemptionView(" in cluster.notices[0]
    assert cluster.ended["image0"].times.preemptions == 0


@pytest.mark.parametrize(
    "answer",
    [
        BOOM,
        None,
        0,
        Dispatch(1),
        Dispatch(-1),
        Dispatch(None),
        Dispatch(0, [99]),
        Dispatch(0, [0, 0]),
        Dispatch(0, []),
        Dispatch(0, 3),  # type: ignore[arg-type]
        Dispatch("encode"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_guard_dispatch_default_decides(answer: Any) -> None:
    """The group that delays the fewest requests encodes, in order of arrival."""
    BROKEN["dispatch"] = Answers(answer)
    cluster = serve_all({"dispatch": BadDispatch()})
    assert "policy BadDispatch failed" in cluster.notices[0]
    assert "Input: DispatchView(" in cluster.notices[0]


@pytest.mark.parametrize("answer", [BOOM, None, [99], [-1], [0, 0], ["a"], 0], ids=repr)
def test_guard_reclaim_default_decides(answer: Any) -> None:
    """The youngest is evicted."""
    BROKEN["reclaim"] = Answers(answer)
    cluster = ModelCluster(
        make_limits(pages=8, slots=1, chunk_tokens=16), default_policies(reclaim=BadReclaim())
    )
    claim_and_take(cluster)
    assert "policy BadReclaim failed" in cluster.notices[0]
    assert "Input: ReclaimView(" in cluster.notices[0]
    assert cluster.kernel.statistics()["encode"]["cache_preemptions"] == 1


def claim_and_take(cluster: ModelCluster) -> None:
    """Let an older request need the pages of embeddings of younger ones, which wait for a slot."""
    cluster.submit(make_request("old", words(64), [(64, 24, b"late")], max_tokens=2))
    for name in ("young", "younger"):
        cluster.submit(image_request(name, (name.encode(), 8), max_tokens=2))
    cluster.drain()
    assert_served(cluster, "old", "young", "younger")


@pytest.mark.parametrize("answer", [BOOM, None, 99, -1, "all", 0.5, [0]], ids=repr)
def test_guard_insertion_default_decides(answer: Any) -> None:
    """All blocks are kept."""
    BROKEN["insertion"] = Answers(answer)
    cluster = serve_all({"insertion": BadInsertion()})
    assert "policy BadInsertion failed" in cluster.notices[0]
    assert "Input: InsertionView(" in cluster.notices[0]
    assert cluster.kernel.statistics()["generate"]["blocks_cached"] > 0


@pytest.mark.parametrize("cache", ["encode_eviction", "generate_eviction"])
@pytest.mark.parametrize(
    "order",
    [
        BOOM,
        None,
        Said(),
        *[BadOrder(method, BOOM) for method in ("add", "reuse", "drop", "victim")],
        *[BadOrder(method, SystemExit()) for method in ("add", "reuse", "drop", "victim")],
        *[BadOrder("victim", answer) for answer in NO_VICTIMS],
    ],
    ids=lambda order: f"{getattr(order, '_broken', order)} {getattr(order, '_answer', '')}",
)
def test_guard_eviction_default_decides(cache: str, order: Any) -> None:
    """A broken order is replaced by the kernel's own, without losing anything cached."""
    BROKEN["eviction"] = Answers(order)
    cluster = serve_all({cache: BadEviction()})
    assert "policy BadEviction failed" in cluster.notices[0]
    faults = cluster.kernel.statistics()["policy_faults"]
    assert faults == {"BadEviction": 1}


def test_guard_eviction_may_keep_nothing() -> None:
    """`add` may return False: the entry is dropped at once."""
    BROKEN["eviction"] = Answers(BadOrder("add", False))
    cluster = serve_all({"encode_eviction": BadEviction()})
    assert cluster.notices == []
    encode = cluster.kernel.statistics()["encode"]
    assert isinstance(encode, dict)
    assert encode["cache_entries"] == 0


class NumpyOrder(BadOrder):
    def victim(self) -> Any:
        return np.int64(self._order.victim())  # type: ignore[arg-type]


def test_guard_eviction_takes_out_the_keys_that_were_added() -> None:
    """A record and the ranks could not take another type."""
    BROKEN["eviction"] = Answers(NumpyOrder("nothing", None))
    faults = PolicyFaults()
    order: GuardedOrder[int] = GuardedOrder(BadEviction(), faults)
    order.add_all([3, 1, 2])
    assert [(type(key), key) for key in order.take_victims(2)] == [(int, 3), (int, 1)]
    assert not faults.counts


ARRIVED = SimpleNamespace(now_ns=7, request=SimpleNamespace(arrived_ns=5))


class PreemptionMode(str):
    __slots__ = ()


class Reason(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("decision", "facts", "answer"),
    [
        (
            "admission",
            ([SimpleNamespace(arrived_ns=5)], 1, 0, 7, 60),
            Admission([], np.int64(9)),  # type: ignore[arg-type]
        ),
        ("preemption", (2,), Preemption(np.int8(1), PreemptionMode("swap"))),  # type: ignore[arg-type]
        ("drafting", (), Draft(np.int64(2), np.int64(3), np.int64(2), np.True_)),  # type: ignore[arg-type]
        ("step", (2,), StepShares(np.array([1, 0]), np.array([3, 4]), np.int64(9))),  # type: ignore[arg-type]
        ("front_door", (7, 5, 60), Hold(np.int64(9))),  # type: ignore[arg-type]
        ("front_door", (7, 5, 60), Shed(Reason("full"), np.int64(3), np.int64(503))),  # type: ignore[arg-type]
        ("front_door", (7, 5, 60), Redirect(Reason("http://other:8000"))),
        ("dispatch", (1, {}, 1), Dispatch(None, [np.int8(0)])),  # type: ignore[list-item]
    ],
    ids=lambda one: type(one).__name__,
)
def test_checked_answers_can_be_recorded(decision: str, facts: Any, answer: Any) -> None:
    """A record holds the resulting commands, in the built-in types."""
    check = DECISIONS[decision].check
    assert check is not None
    seen = check(answer, *facts)
    assert seen == msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=type(seen))


class Deep(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Any:
        return stumble(len(view.waiting))


def stumble(count: int) -> int:
    return count // 0


def test_guard_notice_says_where_a_policy_failed() -> None:
    """The innermost frame, by file, line and function; the traceback of the first failure is kept."""
    cluster = serve_all({"generate_admission": Deep()})
    line = stumble.__code__.co_firstlineno + 1
    where = f"policy Deep failed at test_policy_faults.py:{line} in stumble (ZeroDivisionError: "
    assert cluster.notices[0].startswith(where)
    text = "".join(cluster.kernel.policy_failures["Deep"].format())
    assert f'File "{__file__}", line {line}, in stumble' in text
    assert "return stumble(len(view.waiting))" in text


def test_guard_notice_says_whose_answer_is_invalid() -> None:
    BROKEN["admission"] = Answers(Said([99]))
    cluster = serve_all({"generate_admission": BadAdmission()})
    line = BadAdmission.admit.__code__.co_firstlineno
    assert (
        f"policy BadAdmission failed at test_policy_faults.py:{line}, the answer of admit "
        in cluster.notices[0]
    )


def test_guard_notices_do_not_flood() -> None:
    """A policy that fails in every step is logged a hundred times; later failures are only counted."""
    BROKEN["encoding"] = Answers(BOOM)
    policies = default_policies(encoding=BadEncoding())
    cluster = ModelCluster(make_limits(), policies)
    for index in range(150):
        cluster.submit(image_request(f"r{index}", (b"image%d" % index, 4), max_tokens=1))
        cluster.drain()
    assert len(cluster.notices) == 100
    faults = cluster.kernel.statistics()["policy_faults"]
    assert isinstance(faults, dict)
    assert faults["BadEncoding"] >= 150
