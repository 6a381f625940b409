"""Thread pool of a process, shared by its kernels."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch

from vsched_workers.backends.cpu.kernels import thread_pool as layout
from vsched_workers.backends.cpu.kernels.thread_pool import work
from vsched_workers.backends.cpu.thread_choice import ThreadChoice

SPIN_NS = 100_000
"""Time that a thread spins before it sleeps: longer than the gap between two products."""
THREADS_MAX = 512


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
        self._choice: ThreadChoice | None = None
        self._torch_threads = 1
        self._set(layout.ACTIVE_AT, 1)
        self._set(layout.SPIN_AT, SPIN_NS)

    @property
    def active(self) -> int:
        """Number of threads in use, not counting a trial."""
        return self._get(layout.ACTIVE_AT) if self._choice is None else self._choice.threads

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
        layout.use(self.state_at, threads)

    def stop(self) -> None:
        """End the other threads: their code and the state must not be freed while they run."""
        for thread in self._others:
            while thread.is_alive():  # one that was about to sleep misses a wake
                self._set(layout.STOP_AT, 1)
                layout.use(self.state_at, 1)
                thread.join(0.01)

    def adapt(self, *, torch_threads: int) -> None:
        """Reduce the number of threads while fewer are faster; torch uses at most `torch_threads`."""
        if self.threads > 1:
            self._choice, self._torch_threads = ThreadChoice(self.threads), torch_threads

    @contextmanager
    def computing(self, kind: Hashable, rows: int) -> Iterator[None]:
        """Time a step, and run it on the best number of threads so far; `kind` identifies comparable steps."""
        choice = self._choice
        if choice is None:
            yield
            return
        threads = choice.next_threads
        if threads != self._get(layout.ACTIVE_AT):
            layout.use(self.state_at, threads)
            torch.set_num_threads(min(threads, self._torch_threads))
        started_s = time.perf_counter()
        yield
        choice.add(kind, rows, time.perf_counter() - started_s)

    def _get(self, at: int) -> int:
        return int(self._words[at // 8])

    def _set(self, at: int, value: int) -> None:
        self._words[at // 8] = value


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
