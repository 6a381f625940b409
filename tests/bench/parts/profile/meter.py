"""Time of a process by component, with timers at the probe points between them.

A probe point is a function or method that is wrapped while a profile runs and restored afterwards,
so that the serving code is unchanged. Time belongs to the innermost probe point: entering one stops
the timer of the enclosing one. A coroutine counts while it runs, not while it waits. Time in no
probe point counts as `outside`.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

OUTSIDE = "outside"


class ProbePoint(NamedTuple):
    """A function of a class or module, by its name there, and the component that it enters."""

    owner: Any
    name: str
    component: str


class TimeSpent(NamedTuple):
    """Cost of one component."""

    calls: int
    wall_ns: float
    cpu_ns: float


class _Laps:
    """Timers of one thread; see `read_cells` for the layout of the cells."""

    __slots__ = ("cells", "cpu_at", "cpu_clock", "now", "outer", "outer_row", "wall_at", "width")

    def __init__(self, cells: Any, width: int, cpu_clock: Callable[[], int]) -> None:
        self.cells = cells
        self.width = width
        self.cpu_clock = cpu_clock
        self.now = self.outer = 0
        self.outer_row = 2 * width
        self.wall_at = time.perf_counter_ns()
        self.cpu_at = cpu_clock()

    def switch(self, place: int) -> int:
        """Continue in another component; return the previous one."""
        wall, before = time.perf_counter_ns(), self.now
        self.cells[self.outer_row + before] += wall - self.wall_at
        self.wall_at, self.now = wall, place
        if not (before and place):
            # At an outermost probe point only: reading the system's clock is expensive.
            cpu = self.cpu_clock()
            self.cells[self.width + self.outer] += cpu - self.cpu_at
            self.cpu_at, self.outer = cpu, place
            self.outer_row = (2 + place) * self.width
        return before


class Meter:
    """Timers for the threads of a process.

    `cells` are for the thread that creates the meter, and may be in shared memory.
    """

    def __init__(
        self,
        components: Sequence[str],
        *,
        cells: Any = None,
        cpu_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.names = (OUTSIDE, *components)
        self._cpu_clock = cpu_clock
        self._places = {name: index for index, name in enumerate(self.names)}
        self._local = threading.local()
        self._threads: list[_Laps] = []
        self._join(cells)

    def _join(self, cells: Any = None) -> _Laps:
        if cells is None:
            cells = [0] * cell_count(len(self.names))
        laps = _Laps(cells, len(self.names), self._cpu_clock)
        self._local.laps = laps
        self._threads.append(laps)
        return laps

    def _laps(self) -> _Laps:
        try:
            laps: _Laps = self._local.laps
        except AttributeError:
            laps = self._join()
        return laps

    def cells(self) -> list[int]:
        """Return all counts so far, summed over all threads; for this thread up to now."""
        laps = self._laps()
        laps.switch(laps.now)
        return [sum(column) for column in zip(*(one.cells for one in self._threads), strict=True)]

    def wrap(self, function: Callable[..., Any], component: str) -> Callable[..., Any]:
        """Return the function with a timer."""
        place = self._places[component]
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def stepped(*args: Any, **kwargs: Any) -> Any:
                return await _Stepped(function(*args, **kwargs), self._laps(), place)

            return stepped

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            laps = self._laps()
            laps.cells[place] += 1
            before = laps.switch(place)
            try:
                return function(*args, **kwargs)
            finally:
                laps.switch(before)

        return timed

    @contextmanager
    def at(self, probe_points: Sequence[ProbePoint]) -> Iterator[None]:
        """Measure at these probe points within the context."""
        kept = [
            (owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in probe_points
        ]
        try:
            for owner, name, component in probe_points:
                self.install(owner, name, component)
            yield
        finally:
            for owner, name, function in reversed(kept):
                setattr(owner, name, function)

    def install(self, owner: Any, name: str, component: str) -> None:
        """Measure at this probe point from now on."""
        setattr(owner, name, self.wrap(getattr(owner, name), component))


class _Stepped:
    """A coroutine whose steps are timed."""

    __slots__ = ("_coroutine", "_laps", "_place")

    def __init__(self, coroutine: Any, laps: _Laps, place: int) -> None:
        self._coroutine = coroutine
        self._laps = laps
        self._place = place

    def __await__(self) -> Generator[Any, Any, Any]:
        laps, place, inner = self._laps, self._place, self._coroutine
        laps.cells[place] += 1
        step, value = inner.send, None
        while True:
            before = laps.switch(place)
            try:
                yielded = step(value)
            except StopIteration as stop:
                return stop.value
            finally:
                laps.switch(before)
            try:
                value = yield yielded
                step = inner.send
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                step, value = inner.throw, error


def cell_count(width: int) -> int:
    """Return the number of cells for `width` components."""
    return width * (2 + width)


def read_cells(names: Sequence[str], cells: Sequence[int]) -> dict[str, TimeSpent]:
    """Return the cost of each component.

    The cells are the calls of each component; the CPU time of each while it was the outermost;
    then, for each as the outermost, the wall time of each within it. CPU time of an outermost
    component is divided like its wall time.
    """
    width = len(names)
    walls, cpus = [0.0] * width, [0.0] * width
    for outer in range(width):
        row = cells[(2 + outer) * width : (3 + outer) * width]
        total = sum(row)
        for place, wall in enumerate(row):
            walls[place] += wall
            if total > 0:
                cpus[place] += cells[width + outer] * wall / total
    return {
        name: TimeSpent(cells[place], walls[place], cpus[place]) for place, name in enumerate(names)
    }
