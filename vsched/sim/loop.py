"""An event loop on a virtual clock: a seed determines the order of everything, and a day passes in no time.

Prior art: looptime, aiotools' virtual clock, trio's `MockClock`, and the simulations of
FoundationDB and TigerBeetle. The published loops for asyncio do not make runs exactly repeatable;
this loop does:

- *Time* is an integer number of nanoseconds. It stands still while anything can run, then jumps to
  the next timer. A timer set for a later time fires at a later time, so a wait made slightly too
  short by floating point still ends.
- *Equal deadlines* fire in the order they were set; asyncio's heap does not guarantee that.
- *Threads*: a call in an executor starts when nothing else can run, in order and alone, and the
  clock stands still until it returns. So neither races between threads nor their speed change
  anything.
- *Sets of tasks*: asyncio cancels the tasks of a group in set order, that is, by address. Tasks of
  this loop are hashed by their number.
- *Ties*: code must not rely on orders that asyncio does not guarantee. With a seed, tasks and
  timers due at the same moment run in a random order drawn from it; plain callbacks keep theirs,
  because `call_soon` guarantees it.
- *Stalls*: everything started under one value of the context variable `PLACE` can be stalled for a
  while, like a machine that stands still: its callbacks and tasks continue together afterwards, in
  order.
- *Deadlocks*: if nothing can run, no timer is set and no thread is awaited, an error is raised at
  once, with the calls each task waits in.

Sockets work if the peer is in the same process. ZeroMQ does not: its threads are unknown to the
loop. Code that polls with `sleep(0)` stops the clock forever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import queue
import random
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack


class VirtualDeadlock(RuntimeError):
    """Nothing can ever run again: in production this program would hang."""


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """List the tasks of a loop by name, with the calls each one waits in."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    tasks.sort(key=lambda task: (len(task.get_name()), task.get_name()))
    lines = [f"{len(tasks)} tasks wait:" if tasks else "no task is left"]
    for task in tasks:
        lines.append(f"  {task.get_name()} waits in")
        lines += [f"    {place}" for place in _places(task.get_coro())]
    return "\n".join(lines)


def _places(waiting: object) -> Iterator[str]:
    """Yield the source position of a coroutine, then of the one it awaits, and so on."""
    while waiting is not None:
        # Coroutines, generators and asynchronous generators use different attribute names for it.
        kind = next((one for one in ("cr", "gi", "ag") if hasattr(waiting, f"{one}_frame")), None)
        if kind is None:
            return
        frame = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            name = getattr(waiting, "__qualname__", frame.f_code.co_name)
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} {name}"
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


class LoopTimer(asyncio.TimerHandle):
    """A timer that records whether it was taken from the queue."""

    __slots__ = ("fired",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fired = False


class _Task(asyncio.Task[Any]):
    """A task whose name and hash are the same in every run."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **settings: Any) -> None:
        self._number = number
        settings["name"] = settings.get("name") or f"Task-{number}"
        super().__init__(coroutine, **settings)

    def __hash__(self) -> int:
        return self._number

    def set_name(self, value: object) -> None:
        """Set the name; Python 3.13.0 passes None if there is none."""
        if value is not None:
            super().set_name(value)


def has_no_place(handle: asyncio.Handle) -> bool:
    """Return True if asyncio does not define the order of a ready handle: a task step or a timer."""
    if isinstance(handle, LoopTimer):
        return True
    callback = handle._callback  # type: ignore[attr-defined] # noqa: SLF001
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


class ThreadCall:
    """A queued executor call, and the future of its result."""

    def __init__(
        self, submit: Callable[[], concurrent.futures.Future[Any]], result: asyncio.Future[Any]
    ) -> None:
        self.result = result
        self._submit = submit
        self._running: concurrent.futures.Future[Any] | None = None

    @property
    def started(self) -> bool:
        """Whether it was submitted."""
        return self._running is not None

    @property
    def over(self) -> bool:
        """Whether it has returned, or was cancelled before it started; a running call cannot be stopped."""
        return self._running.done() if self._running is not None else self.result.done()

    def start(self, on_done: Callable[[], None]) -> None:
        """Submit the call; `on_done` is called in the worker thread."""
        try:
            self._running = self._submit()
        except RuntimeError as error:  # the executor was shut down meanwhile
            self.result.set_exception(error)
        else:
            self._running.add_done_callback(lambda _: on_done())

    def deliver(self) -> None:
        """Pass the outcome to the future, unless that is already done."""
        if self.result.done() or self._running is None:
            return
        if self._running.cancelled():
            self.result.cancel()
        elif (error := self._running.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(self._running.result())


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
SECOND_NS = 1_000_000_000
OUTSIDE_LIMIT_S = 60.0
"""Real seconds to wait for a thread while nothing else can run, before it counts as stuck."""
_CANCELLED_MIN = 100
"""Up to this number, cancelled timers are not removed."""
PLACE: ContextVar[object] = ContextVar("PLACE", default=None)
"""Location of a callback or task that can be stalled; inherited by everything started there."""

_Event = tuple[selectors.SelectorKey, int]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing can run.

    Args:
        tie_seed: Draw the order of ties from this seed; None runs them in order of arrival.
        outside_limit_s: Real seconds to wait for a thread, see `OUTSIDE_LIMIT_S`.
    """

    _ready: deque[asyncio.Handle]
    _thread_id: int | None
    _default_executor: concurrent.futures.ThreadPoolExecutor | None

    def __init__(
        self, tie_seed: int | None = None, *, outside_limit_s: float = OUTSIDE_LIMIT_S
    ) -> None:
        self._virtual = _Selector(self)
        self._now_ns = 0
        self._timers: list[tuple[int, int, LoopTimer]] = []
        self._timers_cancelled = 0
        self._timers_set = 0
        self._calls: deque[ThreadCall] = deque()
        self._posted: queue.SimpleQueue[asyncio.Handle] = queue.SimpleQueue()
        self._outside = 0
        self._outside_limit_s = outside_limit_s
        self._ties: random.Random | None = None
        self._held: dict[object, list[asyncio.Handle]] = {}
        super().__init__(self._virtual)
        self._virtual.own = frozenset(key.fd for key in self._virtual.get_map().values())
        self.permute_ties(tie_seed)
        self._tasks_made = 0
        self.set_task_factory(self._make_task)

    # --- time ---

    def now_ns(self) -> int:
        """Return the virtual time in nanoseconds; a new loop starts at 0."""
        return self._now_ns

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_ns / SECOND_NS

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback, with the time rounded to nanoseconds; runs after timers already set for that time."""
        due_ns = round(when * SECOND_NS)
        if due_ns <= self._now_ns and when > self.time():
            due_ns = self._now_ns + 1  # otherwise a waiter for `when` would set it again forever
        return self.call_at_ns(due_ns, callback, *args, context=context)

    def call_at_ns(
        self,
        due_ns: int,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback at a time in nanoseconds; runs after timers already set for that time."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = LoopTimer(due_ns / SECOND_NS, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (due_ns, self._timers_set, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        assert isinstance(handle, LoopTimer)
        if handle.fired:
            return
        self._timers_cancelled += 1
        if self._timers_cancelled > max(_CANCELLED_MIN, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    # --- ties ---

    def permute_ties(self, seed: int | None) -> None:
        """Draw the order of simultaneous callbacks from this seed from now on; None restores arrival order."""
        self._ties = None if seed is None else random.Random(f"ties {seed}")  # noqa: S311

    def _make_task(
        self,
        _: asyncio.AbstractEventLoop,
        coroutine: Any,  # the type in typeshed differs between versions
        /,
        **settings: Any,
    ) -> asyncio.Task[Any]:
        """Create the next task, numbered on this loop."""
        self._tasks_made += 1
        return _Task(self._tasks_made, coroutine, loop=self, **settings)

    # --- stalls ---

    def stand_still(self, place: object, until_ns: int) -> None:
        """Run nothing whose context has this `PLACE` until then; no-op if the place is already stalled."""
        if place not in self._held:
            self._held[place] = []
            self.call_at_ns(until_ns, self._go_on, place)

    def _go_on(self, place: object) -> None:
        self._ready.extend(self._held.pop(place))

    def _hold(self) -> None:
        """Move ready handles of stalled places aside."""
        going: list[asyncio.Handle] = []
        for handle in self._ready:
            place = handle._context.get(PLACE)  # type: ignore[attr-defined] # noqa: SLF001
            self._held.get(place, going).append(handle)
        self._ready.clear()
        self._ready.extend(going)

    # --- threads and processes outside the loop ---

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[Unpack[Ts]], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run a call in a thread once nothing else can run; it runs alone, and the clock stands still.

        A call that waits for another concurrent call never ends.
        """
        self._check_closed()  # type: ignore[attr-defined]
        if executor is None:
            self._check_default_executor()  # type: ignore[attr-defined]
            if self._default_executor is None:
                threads = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="virtual")
                self.set_default_executor(threads)
            executor = self._default_executor
            assert executor is not None
        call = ThreadCall(partial(executor.submit, func, *args), self.create_future())
        self._calls.append(call)
        return call.result

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Wait in real time for the threads of the default executor to end."""
        if self._calls:
            await asyncio.wait([call.result for call in self._calls])
        self._outside += 1
        try:
            if sys.version_info >= (3, 12):
                await super().shutdown_default_executor(timeout)
            else:
                await super().shutdown_default_executor()
        finally:
            self._outside -= 1

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback soon; from another thread, once nothing else can run."""
        if self._thread_id is None or self._thread_id == threading.get_ident():
            return super().call_soon_threadsafe(callback, *args, context=context)
        self._check_closed()  # type: ignore[attr-defined]
        handle = asyncio.Handle(callback, args, self, context)
        self._posted.put(handle)
        self._wake()
        return handle

    def _wake(self) -> None:
        self._write_to_self()  # type: ignore[attr-defined]

    def forget_wakes(self) -> None:
        """Drain the wake-up socket written by `_wake`."""
        self._read_from_self()  # type: ignore[attr-defined]

    # --- calls by the selector ---

    def idle(self) -> list[_Event]:
        """Find the next thing to do when no handle is ready; return events of file descriptors.

        Raises:
            VirtualDeadlock: When there is nothing to do.
        """
        until_s = time.monotonic() + self._outside_limit_s
        while not self._ready:
            if not self._posted.empty():
                self._ready.append(self._posted.get())
            elif self._calls and self._calls[0].over:
                self._calls.popleft().deliver()
            elif self._calls and not self._calls[0].started:
                self._calls[0].start(self._wake)
            elif self._calls or self._outside:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    self._give_up(f"a thread has not come back for {self._outside_limit_s:g} s")
                if events := self._virtual.poll(left_s):
                    return events
            elif self._virtual.foreign and (events := self._virtual.poll(0)):
                return events
            else:
                self._jump()
                break
        return []

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
            self._timers_cancelled -= 1
        if not self._timers:
            self._give_up("nothing can run, no timer is set and no thread is at work")
        if self._timers[0][0] > self._now_ns:
            self._now_ns = self._timers[0][0]

    def _give_up(self, why: str) -> None:
        raise VirtualDeadlock(f"at {self.time():.9f} s: {why}\n{describe_tasks(self)}")

    def take_due(self) -> None:
        """Move due timers to the ready queue, and apply the drawn order to it."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= self._now_ns:
            timer = heapq.heappop(timers)[2]
            timer.fired = True
            if timer.cancelled():
                self._timers_cancelled -= 1
            else:
                ready.append(timer)
        if self._held:
            self._hold()
        if self._ties is not None and len(ready) > 1:
            self._draw_order(self._ties)

    def _draw_order(self, ties: random.Random) -> None:
        places = [place for place, handle in enumerate(self._ready) if has_no_place(handle)]
        if len(places) > 1:
            handles = [self._ready[place] for place in places]
            ties.shuffle(handles)
            for place, handle in zip(places, handles, strict=True):
                self._ready[place] = handle


class _Selector(selectors.DefaultSelector):
    """Selector called by asyncio once per round: the only hook that can keep a loop from blocking.

    Attributes:
        own: File descriptors that only wake the loop.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self.own: frozenset[int] = frozenset()

    def select(self, timeout: float | None = None) -> list[_Event]:
        if timeout != 0:
            events = self._loop.idle()
        elif self.foreign:
            events = self.poll(0)
        else:
            events = []
        self._loop.take_due()
        return events

    @property
    def foreign(self) -> bool:
        """Whether any file descriptor not owned by the loop is registered."""
        return len(self.get_map()) > len(self.own)

    def poll(self, timeout_s: float) -> list[_Event]:
        """Wait in real time; return events of file descriptors not owned by the loop."""
        events = super().select(timeout_s)
        foreign = [event for event in events if event[0].fd not in self.own]
        if len(foreign) < len(events):
            self._loop.forget_wakes()
        return foreign
