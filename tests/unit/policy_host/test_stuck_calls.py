"""Policy calls that do not return are interrupted; nothing else is."""

from __future__ import annotations

import importlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernel.setups import words
from tests.unit.record.recorded import RecordedCluster
from vsched.kernel import SchedulerLimits
from vsched.policy import (
    Admission,
    AdmissionView,
    CachePolicy,
    EvictionOrder,
    RequestPolicy,
    StepShares,
    StepView,
)
from vsched.policy_host import GuardedOrder, PolicySeats, SeatPolicies
from vsched.policy_host.seats import PolicyFaults
from vsched.policy_host.stuck_calls import SIGNAL, PolicyStuckError, StuckCalls
from vsched.record import replay
from vsched.testing import make_request
from vsched.testing.cluster import default_policies
from vsched_policies.eviction import LruOrder

LIMIT_S = 0.05
LIMITS = SchedulerLimits(blocks=64, slots=4, context_tokens=256, pages=8)
STEP = "generate.step"
VIEW = StepView(now_ns=0, prefilling=(), waiting=0, decodes=0, tokens_free=1)


def loop() -> None:
    while True:
        pass


def stubborn_loop() -> None:
    """Catch the first five exceptions."""
    for _ in range(5):
        with suppress(BaseException):
            loop()
    loop()


def wait_for_itself() -> None:
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    with lock, lock:
        pass


def answer_endlessly() -> Iterator[int]:
    """Yield the elements of an endless answer, slowly."""
    while True:
        time.sleep(0.001)
        yield 0


class Stuck(RequestPolicy, frozen=True, kw_only=True):
    """Does not return from a call about shares, or about admission with two running requests."""

    def share(self, view: StepView) -> StepShares:
        HARM[0]()
        return StepShares(())

    def admit(self, view: AdmissionView) -> Admission:
        if view.running == 2:
            HARM[0]()
        return Admission(range(1))


HARM: list[Callable[[], object]] = [loop]


@pytest.mark.parametrize(
    "harm",
    [loop, stubborn_loop, wait_for_itself, lambda: time.sleep(3600), lambda: [*answer_endlessly()]],
)
def test_call_that_does_not_return_is_interrupted_once(harm: Callable[[], object]) -> None:
    HARM[0] = harm
    seats = PolicySeats(SeatPolicies(by_table={STEP: Stuck()}))
    seat = seats.add_seat(STEP)
    earlier = StuckCalls(LIMIT_S)
    with closing(StuckCalls(LIMIT_S)):
        earlier.close()  # another engine of this process, which ends first
        assert [seat.decide(VIEW, 0) for _ in range(3)] == [seat._default(0)] * 3
    assert seats.failed() == {STEP: 1}
    assert "within 0.05 s (policies.call_limit_s)" in seats.replaced()[STEP]
    (notice,) = seats.faults.take_notices()
    assert re.search(r"Stuck failed at test_stuck_calls.py:\d+ in .*PolicyStuckError", notice)


class StuckOrder(LruOrder[int]):
    def victim(self) -> int:
        HARM[0]()
        return 0


class StuckCache(CachePolicy, frozen=True, kw_only=True):
    def build_order(self) -> EvictionOrder[Any]:
        return StuckOrder()


def test_stuck_eviction_order_loses_no_entry() -> None:
    HARM[0] = loop
    faults = PolicyFaults()
    order: GuardedOrder[int] = GuardedOrder(StuckCache(), faults)
    order.add_all([3, 1, 2])
    with closing(StuckCalls(LIMIT_S)):
        assert order.take_victims(2) == [3, 1]
    assert list(order) == [2]
    assert faults.counts == {"StuckCache": 1}


def test_only_policies_are_interrupted() -> None:
    """Neither long work of the host, nor many short calls, nor a call on a thread, nor one after the end."""
    HARM[0] = lambda: None
    seats = PolicySeats(SeatPolicies(by_table={STEP: Stuck()}))
    seat = seats.add_seat(STEP)
    before = signal.getsignal(SIGNAL)
    with closing(StuckCalls(LIMIT_S)):
        time.sleep(3 * LIMIT_S)
        for _ in range(50_000):
            seat.decide(VIEW, 0)
        signal.raise_signal(SIGNAL)
        HARM[0] = lambda: time.sleep(4 * LIMIT_S)
        thread = threading.Thread(target=seat.decide, args=(VIEW, 0))
        thread.start()
        thread.join()
    seat.decide(VIEW, 0)
    assert not seats.failed()
    assert signal.getsignal(SIGNAL) == before


def test_record_of_an_interrupted_call_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HARM[0] = loop
    module = importlib.import_module("vsched.record.replay")
    monkeypatch.setattr(module, "StuckCalls", lambda _: StuckCalls(LIMIT_S))
    path = tmp_path / "run"
    policies = default_policies(generate_admission=Stuck())
    cluster = RecordedCluster(LIMITS, policies, path, {})
    with closing(StuckCalls(LIMIT_S)):
        for index in range(4):
            cluster.submit(make_request(f"{index}", words(20, start=20 * index), max_tokens=8))
            cluster.run_generate()
        cluster.drain()
    assert cluster.recorder is not None
    cluster.recorder.close()
    assert list(cluster.kernel.statistics()["policy_replaced"]) == ["generate.admission"]
    report = replay(path)
    assert report.difference is None
    assert report.events > 10


def test_error_is_no_exception_that_a_policy_catches() -> None:
    assert not issubclass(PolicyStuckError, Exception)
