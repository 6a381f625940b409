"""Thread pool: every piece is computed once, with late threads, concurrent calls and changing numbers of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("numba")

import numba
import numpy as np
import numpy.typing as npt

from tests.patience import PATIENCE_S, wait_until
from tests.programs import ended
from tests.workers.properties import thorough
from vsched_workers.backends.cpu.kernels import thread_pool as layout
from vsched_workers.backends.cpu.kernels.thread_pool import UNITS_MAX, add, load, now_ns, spread
from vsched_workers.backends.cpu.threads import ThreadPool

pytestmark = pytest.mark.slow  # kernels are compiled

GRAIN = 7
SIZES = [0, 1, GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN, 1000, UNITS_MAX * GRAIN + 1, 70_000]
PATIENCE_NS = int(PATIENCE_S * 1e9)


@numba.njit(nogil=True)
def _count(first: int, stop: int, counts_at: int) -> None:
    for piece in range(first, stop):
        add(counts_at + 8 * piece, 1)


@numba.njit(nogil=True)
def count(state: int, pieces: int, grain: int, counts_at: int, calls: int) -> None:
    """Count the computations of each piece over some consecutive calls."""
    for _ in range(calls):
        spread(state, pieces, grain, _count, (counts_at,))


@numba.njit(nogil=True)
def _meet(first: int, stop: int, met_at: int, wanted: int) -> None:
    until_ns = now_ns() + PATIENCE_NS
    for _ in range(first, stop):
        add(met_at, 1)
        while load(met_at) < wanted and now_ns() < until_ns:
            pass
        if load(met_at) < wanted:
            add(met_at + 8, 1)


@numba.njit(nogil=True)
def meet(state: int, threads: int, met_at: int) -> None:
    """Compute pieces that wait for each other: every thread has to hold one at the same time."""
    spread(state, threads, 1, _meet, (met_at, threads))


def counted(state: int, pieces: int, *, grain: int = GRAIN, calls: int = 1) -> npt.NDArray[Any]:
    found = np.zeros(pieces, dtype=np.int64)
    count(state, pieces, grain, found.ctypes.data, calls)
    return found


def all_meet(pool: ThreadPool, threads: int) -> bool:
    met = np.zeros(2, dtype=np.int64)
    meet(pool.state_at, threads, met.ctypes.data)
    return met.tolist() == [threads, 0]


def cpu_ns(pool: ThreadPool) -> list[int]:
    """Return the CPU time of each thread that the pool has started."""
    clocks = [time.pthread_getcpuclockid(each.ident) for each in pool._others if each.ident]
    return [time.clock_gettime_ns(clock) for clock in clocks]


def wait_until_asleep(pool: ThreadPool, first: int = 1) -> None:
    """Wait until the threads from `first` on use no CPU time."""

    def sleep() -> bool:
        before = cpu_ns(pool)[first - 1 :]
        time.sleep(0.02)
        return cpu_ns(pool)[first - 1 :] == before

    wait_until(sleep, "the threads sleep")


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool()
    yield made
    made.stop()
    assert not any(each.is_alive() for each in made._others)


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 5])
def test_every_piece_is_computed_once(threads: int, pool: ThreadPool) -> None:
    if threads:
        pool.use(threads)
    for pieces in SIZES:
        found = counted(pool.state_at if threads else 0, pieces, calls=3)
        assert (found == 3).all(), pieces
    assert (counted(pool.state_at, 70_000, grain=1) == 1).all()


@pytest.mark.parametrize(
    ("threads", "given"),
    [
        *((threads, {}) for threads in (2, 3, 5)),
        (3, {layout.EPOCH_AT: 0x7FFFFFFF - 20}),
        (2, {layout.SPIN_AT: 0}),
    ],
    ids=["2", "3", "5", "their numbers begin again", "the caller sleeps"],
)
def test_thousands_of_calls_in_a_row_compute_every_piece_once(
    threads: int, given: dict[int, int], pool: ThreadPool
) -> None:
    """A late thread finds another call, and claims none of its pieces for the earlier one."""
    for field, value in given.items():
        pool._set(field, value)
    pool.use(threads)
    for pieces, grain in ((2, 1), (5, 1), (20, 1), (64, 3)):
        assert (counted(pool.state_at, pieces, grain=grain, calls=5000) == 5000).all()


def test_the_number_of_threads_changes_within_a_call(pool: ThreadPool) -> None:
    found = np.zeros(100, dtype=np.int64)
    caller = threading.Thread(target=count, args=(pool.state_at, 100, 1, found.ctypes.data, 20_000))
    pool.use(4)
    caller.start()
    while caller.is_alive():
        for threads in (1, 4, 2, 3):
            pool.use(threads)
    assert (found == 20_000).all()


def test_a_caller_that_finds_the_pool_busy_computes_alone(pool: ThreadPool) -> None:
    pool.use(3)
    found = [np.zeros(100, dtype=np.int64) for _ in range(3)]
    callers = [
        threading.Thread(target=count, args=(pool.state_at, 100, 1, each.ctypes.data, 3000))
        for each in found
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((each == 3000).all() for each in found)
    assert pool._get(layout.BUSY_AT) == 0


def test_a_thread_that_never_comes_delays_nothing(pool: ThreadPool) -> None:
    """Other threads steal its pieces."""
    pool.use(2)
    layout.set_active_threads(pool.state_at, 5)
    assert (counted(pool.state_at, 1000, calls=500) == 500).all()


@pytest.mark.parametrize("before", [1, 2, 4])
def test_all_threads_take_part_when_they_are_used_again(before: int, pool: ThreadPool) -> None:
    pool.use(5)
    assert all_meet(pool, 5)
    for threads in (2, 3, 5):
        pool.use(before)
        wait_until_asleep(pool)
        pool.use(threads)
        assert all_meet(pool, threads)


def test_a_thread_that_is_used_again_is_woken_though_others_went_to_sleep_before_it(
    pool: ThreadPool,
) -> None:
    pool._set(layout.SPIN_AT, PATIENCE_NS)  # active threads do not sleep
    pool.use(5)
    assert all_meet(pool, 5)
    for threads in (4, 3, 2, 1):
        pool._set(layout.ACTIVE_AT, threads)
        wait_until_asleep(pool, threads)
    pool.use(2)
    assert all_meet(pool, 2)


def test_threads_sleep_after_a_while_and_are_woken_by_the_next_call(pool: ThreadPool) -> None:
    pool.use(3)
    for _ in range(5):
        assert (counted(pool.state_at, 1000) == 1).all()
        wait_until_asleep(pool)
        assert pool._get(layout.SLEEPERS_AT) == 2
        assert all_meet(pool, 3)


def test_stopped_threads_end_whether_they_sleep_or_look_and_the_caller_computes_alone(
    pool: ThreadPool,
) -> None:
    pool.use(4)
    pool.use(2)
    assert (counted(pool.state_at, 1000) == 1).all()
    pool.stop()
    assert not any(each.is_alive() for each in pool._others)
    assert (counted(pool.state_at, 1000) == 1).all()


LEAVES = """
import sys, threading
import numpy as np
from vsched_workers.backends.cpu.kernels.activation import swiglu
from vsched_workers.backends.cpu.threads import process_pool
pool = process_pool()
pool.use(3)
gate, up = np.zeros((2, 20000, 37), dtype=np.uint16)
def call(times):
    for _ in range(times):
        swiglu(pool.state_at, gate.ctypes.data, up.ctypes.data, *gate.shape)
call(20)
how = sys.argv[1]
if how == "calling":
    threading.Thread(target=call, args=(10**9,), daemon=True).start()
elif how == "exit":
    sys.exit(3)
elif how == "error":
    raise ValueError("an error")
"""


@pytest.mark.parametrize(
    ("how", "code"), [("calling", 0), *thorough(("end", 0), ("exit", 3), ("error", 1))]
)
def test_a_process_with_a_pool_ends_as_any_other(how: str, code: int) -> None:
    """Even while another thread calls kernels."""
    left = ended("-c", LEAVES, how)
    assert left.returncode == code, left.stderr
    assert ("ValueError: an error" in left.stderr) == (how == "error")
