"""A policy that raises or returns invalid decisions is counted, and the kernel's own default decides."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.unit.kernel.setups import answering, assert_served, image_request, make_cluster, words
from tests.workers.properties import thorough
from vsched.policy import (
    DECISIONS,
    Admission,
    AdmissionView,
    CachePolicy,
    Dispatch,
    Draft,
    Hold,
    Policy,
    Preemption,
    Redirect,
    RequestPolicy,
    Shed,
    StepShares,
    WaitingEntry,
)
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.seats import PolicyFaults
from vsched.testing import ModelCluster, make_request
from vsched_policies.eviction import LruOrder


class BadOrder(LruOrder[Any]):
    """An eviction order with one broken method."""

    def __init__(self, broken: str, answer: Any) -> None:
        super().__init__()
        self.broken, self.answer = broken, answer
        setattr(self, broken, self._do)

    def _do(self, *_: object) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


NO_VICTIMS: list[object] = [None, b"not in it", 12345, []]
BOOM = RuntimeError("a bug in the policy")


def serve_all(policies: dict[str, Policy]) -> ModelCluster:
    """Serve requests that need every kind of decision."""
    cluster = make_cluster(blocks=14, slots=4, pages=8, chunk_tokens=12, **policies)
    for index in range(5):
        image = (b"image%d" % (index % 3), 10)
        cluster.submit(image_request(f"image{index}", image, max_tokens=20))
        cluster.submit(make_request(f"text{index}", words(12, start=20 * index), max_tokens=24))
    assert_served(cluster, *cluster.requests)
    return cluster


WAITING = [WaitingEntry(tokens=3, arrived_ns=5), WaitingEntry(tokens=3, arrived_ns=6)]
ANY_ADMISSION: Any = Admission
ANY_DISPATCH: Any = Dispatch
ANY_PREEMPTION: Any = Preemption
ANY_DRAFT: Any = Draft
ANY_STEPSHARES: Any = StepShares
INVALID: dict[str, tuple[tuple[Any, ...], list[Any]]] = {
    "admission": (
        (WAITING, 2, 0, 7, 60, (1, 3)),
        [
            None,
            *[ANY_ADMISSION(one) for one in ([99], [-1], [0, 0], ["first"], [0.5], None, ())],
            *[ANY_ADMISSION([], hold_until_ns=one) for one in (1, "soon", 1 << 60)],
            ANY_ADMISSION([0], hold_until_ns=1 << 60),
            *[ANY_ADMISSION([0], preempt=one) for one in ([0], [4], [1, 3], ["first"])],
            ANY_ADMISSION([0, 1], preempt=[1, 1]),
            ANY_ADMISSION([0], preempt=[1], mode="forget"),
            ANY_ADMISSION([0], preempt=[1], hold_until_ns=8),
        ],
    ),
    "encoding": ((3,), [None, [99], [-1], ["first"], [0.5], 3]),
    "preemption": ((2,), [None, 99, -1, "youngest", 0.5, ANY_PREEMPTION(0, "forget")]),
    "dispatch": (
        (2, {0: 0}, 0),
        [
            *(None, 0),
            *[ANY_DISPATCH(one) for one in (1, -1, None, "encode")],
            *[ANY_DISPATCH(0, one) for one in ([99], [0, 0], [], 3)],
        ],
    ),
    "reclaim": ((2,), [None, [99], [-1], [0, 0], ["a"], 0]),
    "insertion": ((2,), [None, 99, -1, "all", 0.5, [0]]),
    "routing": ((2, [0], [5, 5]), [None, 2, -1, "first"]),
    "drafting": ((), [None, ANY_DRAFT(-1), ANY_DRAFT(33), ANY_DRAFT(1, -1), ANY_DRAFT("all")]),
    "step": (
        (2,),
        [
            None,
            *[ANY_STEPSHARES(one) for one in ([2], [0, 0], ["first"])],
            *[ANY_STEPSHARES([0], one) for one in ([1, 2], [-1])],
            ANY_STEPSHARES([0], None, -1),
        ],
    ),
    "arrival": (
        (7, 5, 60),
        [None, Hold(7), Hold(66), Shed(""), Shed("full", 0), Shed("full", 1, 500), Redirect("x")],
    ),
}
"""Facts of a call, and answers that are invalid for them, by decision."""


@pytest.mark.parametrize("decision", INVALID)
def test_invalid_answers_are_refused(decision: str) -> None:
    check, (facts, answers) = DECISIONS[decision].check, INVALID[decision]
    assert check is not None
    for answer in answers:
        with pytest.raises((TypeError, ValueError, AttributeError)):
            raise AssertionError(f"{check(answer, *facts)} was accepted")


@pytest.mark.parametrize("cache", ["encode_eviction", *thorough("generate_eviction")])
@pytest.mark.parametrize(
    "order",
    [
        BOOM,
        None,
        Admission(),
        *[BadOrder(method, SystemExit()) for method in ("add", "reuse", "drop", "victim")],
        *[BadOrder("victim", answer) for answer in NO_VICTIMS],
    ],
    ids=lambda order: f"{getattr(order, 'broken', order)} {getattr(order, 'answer', '')}",
)
def test_guard_eviction_default_decides(cache: str, order: Any) -> None:
    """A broken order is replaced by the kernel's own, without losing anything cached."""
    cluster = serve_all({cache: answering("eviction", order)})
    assert "policy Answering failed" in cluster.notices[0]
    assert cluster.kernel.statistics()["policy_faults"] == {"Answering": 1}


class NumpyOrder(BadOrder):
    def victim(self) -> Any:
        return np.int64(super().victim())


def test_guard_eviction_takes_out_the_keys_that_were_added() -> None:
    """A record and the ranks could not take another type."""
    faults = PolicyFaults()
    policy = cast("CachePolicy", answering("eviction", NumpyOrder("nothing", None)))
    order: GuardedOrder[int] = GuardedOrder(policy, faults)
    order.add_all([3, 1, 2])
    assert [(type(key), key) for key in order.take_victims(2)] == [(int, 3), (int, 1)]
    assert not faults.counts


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("decision", "facts", "answer"),
    [
        ("admission", (WAITING[:1], 1, 0, 7, 60), Admission([], np.int64(9))),  # type: ignore[arg-type]
        ("preemption", (2,), Preemption(np.int8(1), Word("swap"))),  # type: ignore[arg-type]
        ("drafting", (), Draft(np.int64(2), np.int64(3), np.int64(2), np.True_)),  # type: ignore[arg-type]
        ("step", (2,), StepShares(np.array([1, 0]), np.array([3, 4]), np.int64(9))),  # type: ignore[arg-type]
        ("arrival", (7, 5, 60), Hold(np.int64(9))),  # type: ignore[arg-type]
        ("arrival", (7, 5, 60), Shed(Word("full"), np.int64(3), np.int64(503))),  # type: ignore[arg-type]
        ("arrival", (7, 5, 60), Redirect(Word("http://other:8000"))),
        ("dispatch", (1, {}, 1), Dispatch(None, [np.int8(0)])),  # type: ignore[list-item]
    ],
    ids=lambda one: type(one).__name__,
)
def test_checked_answers_can_be_recorded(decision: str, facts: Any, answer: Any) -> None:
    """A record holds the resulting commands, in the built-in types."""
    check = DECISIONS[decision].check
    assert check is not None
    seen = check(answer, *facts)
    data = msgspec.msgpack.encode(seen)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(data, type=type(seen))) == data


class Deep(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Any:
        return stumble(len(view.waiting))


def stumble(count: int) -> int:
    return count // 0


class Wrong(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Admission:
        return Admission([99])


def test_guard_notice_says_where_a_policy_failed() -> None:
    """The innermost frame, by file, line and function, or the method whose answer is invalid.

    The traceback of the first failure is kept.
    """
    cluster = serve_all({"generate_admission": Deep()})
    line = stumble.__code__.co_firstlineno + 1
    where = f"policy Deep failed at test_policy_faults.py:{line} in stumble (ZeroDivisionError: "
    assert cluster.notices[0].startswith(where)
    assert "Input: AdmissionView(" in cluster.notices[0]
    text = "".join(cluster.kernel.policy_failures["Deep"].format())
    assert f'File "{__file__}", line {line}, in stumble' in text
    assert "return stumble(len(view.waiting))" in text
    cluster = serve_all({"generate_admission": Wrong()})
    line = Wrong.admit.__code__.co_firstlineno
    where = f"policy Wrong failed at test_policy_faults.py:{line}, the answer of admit "
    assert where in cluster.notices[0]


def test_guard_notices_do_not_flood() -> None:
    """A policy that fails in every step is logged a hundred times; later failures are only counted."""
    cluster = make_cluster(waiting=200, encoding=answering("encoding", BOOM))
    for index in range(110):
        cluster.submit(image_request(f"r{index}", (b"image%d" % index, 4), max_tokens=1))
    assert len(cluster.notices) == 100
    assert cluster.kernel.statistics()["policy_faults"]["Answering"] >= 110


def test_guard_notice_can_be_recorded_whatever_an_error_says() -> None:
    """A lone surrogate, as in names of files, has no UTF-8."""
    error = ValueError("no file \udcff")
    cluster = serve_all({"generate_admission": answering("admission", error)})
    assert r"(ValueError: no file \udcff)" in cluster.notices[0]
    assert cluster.notices[0].encode()
