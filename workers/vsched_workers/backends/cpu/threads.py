"""The thread pool of a process, shared by its kernels, and the number of its threads: fewer while that is faster.

If another program keeps a core busy, one of this process's threads waits for the core, and one thread fewer can be
faster. Each stage has its own number: next to a busy core, the long products of an encoder gain from a second thread
that is often off its core; decoding, with a join after each short product, can lose. The choice is based on measured
steps. A *trial* runs some steps with the present number of threads and some with another, in turns, and compares the
time per row. It is started

- with fewer threads, if threads were ready and had no core (`/proc/PID/task/TID/schedstat`);
- with more, if cores were idle or ran niced programs, which yield (`/proc/stat`), and periodically in any case: a
  core that looks busy may run a program of the idle scheduling class.

The other number is chosen if it is 5 % faster, so that noise causes no oscillation. Results do not depend on the
number of threads.
"""

from __future__ import annotations

import atexit
import enum
import math
import os
import resource
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch

from vsched.worker.spec import THREADS_MAX
from vsched_workers.backends.cpu.kernels import thread_pool as layout
from vsched_workers.backends.cpu.kernels.thread_pool import work

FASTER = 0.95
"""Maximum ratio of times at which another number of threads is chosen."""
WAITED_MIN = 0.15
"""Minimum share of time without a core, over all threads, for a trial with fewer threads."""
SLICE_S = 0.003
"""Approximate time slice of the system: estimated cost of an involuntary context switch without schedstat."""
SAMPLE_S = 0.1
"""Seconds of steps over which that share is measured."""
IDLE_MIN = 0.4
"""Minimum number of idle cores for a trial with more threads."""
RETRY_S, RETRY_MAX_S = 0.5, 8.0
"""Seconds until the next trial for the same reason; doubled after each trial without a change."""
BLIND_S, BLIND_MAX_S = 2.0, 15.0
"""The same for more threads when no core looks idle."""
TURN_S = 0.015
"""Minimum turn of a trial: some time slices of the system."""
SIDE_S, SIDE_STEPS, SIDE_LONG_S = 0.06, 3, 0.3
"""Minimum for each side of a trial: this time and this number of steps, or the longer time."""
TRIAL_S = 2.0
"""Maximum time that a trial waits for comparable steps."""
LATELY_S = 10.0
"""Time after its last step during which a stage counts in the reported number of threads."""
ROWS_ALIKE = 64
"""From this number of rows on, time is compared per row; below, only steps with equal rows are compared."""


def waited_s() -> float:
    """Total seconds that threads of this process were ready to run and had no core.

    Source: Documentation/scheduler/sched-stats.rst of Linux.
    """
    total_ns = 0
    for thread in threading.enumerate():
        try:
            with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as file:
                total_ns += int(file.read().split()[1])
        except (OSError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw * SLICE_S
    return total_ns / 1e9


class IdleCores:
    """Average number of this process's cores that were idle, or ran niced programs, since the last call."""

    def __init__(self) -> None:
        self._idle_s = self._read()
        self._at_s = time.monotonic()

    def __call__(self) -> float:
        """Return idle cores; infinity if the system does not report them."""
        idle_s, now_s = self._read(), time.monotonic()
        passed_s = now_s - self._at_s
        found = (idle_s - self._idle_s) / passed_s if passed_s > 0 else 0.0
        self._idle_s, self._at_s = idle_s, now_s
        return found if idle_s > 0 else math.inf

    @staticmethod
    def _read() -> float:
        """Idle and niced seconds of these cores since the system started; 0 without `/proc/stat`.

        Source: proc_stat(5): the columns after the name are user, nice, system, idle.
        """
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        try:
            with open("/proc/stat", encoding="ascii") as file:
                lines = [line.split() for line in file if line.startswith("cpu")]
        except OSError:
            return 0.0
        ticks = sum(
            int(words[2]) + int(words[4]) for words in lines if words[0] in names and len(words) > 4
        )
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class _Side:
    """Measurements with one number of threads: seconds of steps by kind, total time, number of steps."""

    seconds: dict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list))
    total_s: float = 0.0
    steps: int = 0

    def add_step(self, kind: Hashable, cost_s: float, seconds: float) -> None:
        self.seconds[kind].append(cost_s)
        self.total_s += seconds
        self.steps += 1

    @property
    def is_enough(self) -> bool:
        return self.total_s >= SIDE_S and (self.steps >= SIDE_STEPS or self.total_s >= SIDE_LONG_S)


class _Reason(enum.Enum):
    """Reason for a trial: the first and the longest time between two trials."""

    WAITED = RETRY_S, RETRY_MAX_S, "fewer threads, since some had no core"
    IDLE = RETRY_S, RETRY_MAX_S, "more threads, since cores are idle"
    BLIND = BLIND_S, BLIND_MAX_S, "more threads, since it is time"


class _Trial:
    """Steps with two numbers of threads, in turns."""

    def __init__(self, reason: _Reason, present: int, other: int) -> None:
        self.reason = reason
        self.numbers = present, other
        self._sides = _Side(), _Side()
        self._turn = 1
        self._turn_s = 0.0

    @property
    def threads(self) -> int:
        """Number of threads in the current turn."""
        return self.numbers[self._turn]

    def add_step(self, kind: Hashable, cost_s: float, seconds: float) -> float | None:
        """Add a step's time; return the ratio of times, other to present number of threads, once it is known."""
        self._sides[self._turn].add_step(kind, cost_s, seconds)
        self._turn_s += seconds
        if self._turn_s >= TURN_S:
            self._turn, self._turn_s = 1 - self._turn, 0.0
        if not all(side.is_enough for side in self._sides):
            return None
        ratio = self._ratio()
        if ratio is None and sum(side.total_s for side in self._sides) >= TRIAL_S:
            return 1.0
        return ratio

    def _ratio(self) -> float | None:
        """Ratio over the kinds of steps that both sides have; None if they have none in common."""
        present, other = (side.seconds for side in self._sides)
        present_s = other_s = 0.0
        for kind in present.keys() & other.keys():
            weight = min(len(present[kind]), len(other[kind]))
            present_s += weight * statistics.fmean(present[kind])
            other_s += weight * statistics.fmean(other[kind])
        return other_s / present_s if present_s else None


class CoreWaits:
    """Share of the steps' time, over all stages, in which threads were ready and had no core.

    Attributes:
        share: That of the last steps; it can exceed 1, since the threads add up.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        waited_s: Callable[[], float] = waited_s,
    ) -> None:
        self.share = 0.0
        self._now_s, self._waited_s = now_s, waited_s
        self._ended_s = now_s()
        self._seen_s = waited_s()
        self._sampled_s = 0.0

    def add_step(self, seconds: float) -> None:
        """Add a step that has just ended."""
        now_s = self._now_s()
        if now_s - seconds - self._ended_s >= SAMPLE_S:
            # Between steps spinning threads waited for cores as well; that must not count.
            self._seen_s, self._sampled_s, self.share = self._waited_s(), 0.0, 0.0
        else:
            self._sampled_s += seconds
        self._ended_s = now_s
        if self._sampled_s >= SAMPLE_S:
            seen_s = self._waited_s()
            self.share = (seen_s - self._seen_s) / self._sampled_s
            self._seen_s, self._sampled_s = seen_s, 0.0


class ThreadChoice:
    """Chooses the number of threads of a stage, step by step.

    Attributes:
        threads: Best number so far.
        ended_s: End of the last step.
    """

    def __init__(
        self,
        most: int,
        waits: CoreWaits,
        *,
        now_s: Callable[[], float] = time.monotonic,
        idle_cores: Callable[[], float] | None = None,
    ) -> None:
        """Start with all threads, `most`; the other arguments measure the load of other programs, and the time."""
        self.threads = self._most = most
        self._waits, self._now_s = waits, now_s
        self._idle_cores = idle_cores or IdleCores()
        self._trial: _Trial | None = None
        self._retry_s = {reason: reason.value[0] for reason in _Reason}
        self._last_s = self._requested_s = self.ended_s = now_s()

    @property
    def next_threads(self) -> int:
        """Number of threads for the next step."""
        return self.threads if self._trial is None else self._trial.threads

    def add_step(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Add the time of a step, with its kind and rows, that ran with `next_threads`."""
        self.ended_s = self._now_s()
        alike = (kind, min(rows, ROWS_ALIKE))
        cost_s = seconds / max(rows, ROWS_ALIKE)
        if self._trial is None:
            self._start_trial()
            return
        ratio = self._trial.add_step(alike, cost_s, seconds)
        if ratio is not None:
            self._end_trial(self._trial, ratio)

    def _start_trial(self) -> None:
        """Start a trial if there is a reason for one."""
        reason = self._reason()
        if reason is None:
            return
        step = max(self.threads // 8, 1)
        if reason is _Reason.WAITED:
            step = -step
        other = min(max(self.threads + step, 1), self._most)
        self._trial = _Trial(reason, self.threads, other)

    def _reason(self) -> _Reason | None:
        passed_s = self.ended_s - self._last_s
        if self.threads < self._most:
            if passed_s >= self._retry_s[_Reason.BLIND]:
                return _Reason.BLIND
            if (
                passed_s >= self._retry_s[_Reason.IDLE]
                and self.ended_s - self._requested_s >= RETRY_S
            ):
                self._requested_s = self.ended_s
                if self._idle_cores() >= IDLE_MIN:
                    return _Reason.IDLE
        waited = self._waits.share >= WAITED_MIN and passed_s >= self._retry_s[_Reason.WAITED]
        return _Reason.WAITED if waited and self.threads > 1 else None

    def _end_trial(self, trial: _Trial, ratio: float) -> None:
        if ratio < FASTER:
            self.threads = trial.numbers[1]
            self._retry_s = {reason: reason.value[0] for reason in _Reason}
        else:
            longest_s = trial.reason.value[1]
            self._retry_s[trial.reason] = min(2 * self._retry_s[trial.reason], longest_s)
        self._trial, self._last_s = None, self._now_s()


SPIN_NS = 100_000
"""Time that a thread spins before it sleeps: longer than the gap between two products."""


class ThreadPool:
    """Threads that take part in every kernel that is given the address of their state.

    Attributes:
        state_at: Address of the state (`kernels/thread_pool.py`).
        threads: Number of threads, including the calling one.
    """

    def __init__(self) -> None:
        """Start with one thread, the calling one."""
        size = layout.RANGES_AT + THREADS_MAX * layout.LINE
        buffer = np.zeros(size + layout.LINE, dtype=np.uint8)
        skipped = -buffer.ctypes.data % layout.LINE
        self._words: Any = buffer[skipped : skipped + size].view(np.int64)
        self.state_at: int = buffer.ctypes.data + skipped
        self.threads = 1
        self._others: list[threading.Thread] = []
        self._waits: CoreWaits | None = None
        self._choices: dict[str, ThreadChoice] = {}
        self._set(layout.ACTIVE_AT, 1)
        self._set(layout.SPIN_AT, SPIN_NS)

    @property
    def active(self) -> int:
        """Number of threads in use, not counting a trial: the least of the stages that computed lately."""
        choices = self._choices.values()
        since_s = max((choice.ended_s for choice in choices), default=0.0) - LATELY_S
        chosen = [choice.threads for choice in choices if choice.ended_s >= since_s]
        return min(chosen, default=self._get(layout.ACTIVE_AT))

    def use(self, threads: int) -> None:
        """Set the number of threads from the next kernel on; missing threads are started."""
        assert 1 <= threads <= THREADS_MAX, f"from 1 to {THREADS_MAX} threads"
        if threads > self.threads:
            # here: otherwise each thread would wait for the compiler
            work.compile((numba.intp, numba.intp))
        for number in range(self.threads, threads):
            thread = threading.Thread(
                target=work, args=(self.state_at, number), name=f"kernels-{number}", daemon=True
            )
            thread.start()
            self._others.append(thread)
        self.threads = max(self.threads, threads)
        layout.set_active_threads(self.state_at, threads)

    def stop(self) -> None:
        """End the other threads: their code and the state must not be freed while they run."""
        for thread in self._others:
            while thread.is_alive():  # one that was about to sleep misses a wake
                self._set(layout.STOP_AT, 1)
                layout.set_active_threads(self.state_at, 1)
                thread.join(0.01)

    def adapt(self) -> None:
        """Reduce the number of threads while fewer are faster."""
        if self.threads > 1:
            self._waits = self._waits or CoreWaits()

    @contextmanager
    def computing(
        self, stage: str, rows: int, kind: Hashable = None, *, torch_threads: int
    ) -> Iterator[None]:
        """Time a step, and run it on the stage's best number of threads so far; torch uses at most `torch_threads`.

        Steps are comparable that have the same `kind` and rows of the same cost.
        """
        if self._waits is None:
            _use_torch_threads(torch_threads)
            yield
            return
        if stage not in self._choices:
            self._choices[stage] = ThreadChoice(self.threads, self._waits)
        choice = self._choices[stage]
        threads = choice.next_threads
        if threads != self._get(layout.ACTIVE_AT):
            layout.set_active_threads(self.state_at, threads)
        _use_torch_threads(min(threads, torch_threads))
        started_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_s
        self._waits.add_step(seconds)
        choice.add_step(kind, rows, seconds)

    def _get(self, at: int) -> int:
        return int(self._words[at // 8])

    def _set(self, at: int, value: int) -> None:
        self._words[at // 8] = value


def _use_torch_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


_POOL: list[ThreadPool] = []


def process_pool() -> ThreadPool:
    """Return the pool of this process."""
    if not _POOL:
        _POOL.append(ThreadPool())
        atexit.register(_POOL[0].stop)
    return _POOL[0]


def pool_of(threads: int) -> int:
    """Return the address of the pool's state, with at least `threads` threads; 0 for one thread."""
    if threads == 1:
        return 0
    pool = process_pool()
    if pool.threads < threads:
        pool.use(threads)
    return pool.state_at
