"""What a virtual loop runs: timers, tasks, and calls in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any


class LoopTimer(asyncio.TimerHandle):
    """A timer that knows whether it has left the clock."""

    __slots__ = ("fired",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fired = False


class _Task(asyncio.Task[Any]):
    """A task whose name, and whose place in a set, are the same in every run."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **settings: Any) -> None:
        self._number = number
        settings["name"] = settings.get("name") or f"Task-{number}"
        super().__init__(coroutine, **settings)

    def __hash__(self) -> int:
        return self._number

    def set_name(self, value: object) -> None:
        """Set the name; Python 3.13.0 sets None where none was given."""
        if value is not None:
            super().set_name(value)


class Numbers:
    """Numbers the tasks of one loop."""

    def __init__(self) -> None:
        self._last = 0

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,  # what typeshed says differs between versions
        /,
        **settings: Any,
    ) -> asyncio.Task[Any]:
        """Make the next task; what asyncio calls a task factory."""
        self._last += 1
        return _Task(self._last, coroutine, loop=loop, **settings)


def has_no_place(handle: asyncio.Handle) -> bool:
    """Return whether asyncio leaves open when this runs among what is ready: a task's step, or a timer."""
    if isinstance(handle, LoopTimer):
        return True
    callback = handle._callback  # type: ignore[attr-defined] # noqa: SLF001
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


class ThreadCall:
    """A call in an executor that waits for its turn, and the future that gets its result."""

    def __init__(
        self, submit: Callable[[], concurrent.futures.Future[Any]], result: asyncio.Future[Any]
    ) -> None:
        self.result = result
        self._submit = submit
        self._running: concurrent.futures.Future[Any] | None = None

    @property
    def started(self) -> bool:
        """Whether its turn has come."""
        return self._running is not None

    @property
    def over(self) -> bool:
        """Whether it has returned, or was cancelled before its turn; one that runs cannot be stopped."""
        return self._running.done() if self._running is not None else self.result.done()

    def start(self, on_done: Callable[[], None]) -> None:
        """Let a thread begin; `on_done` is called in that thread."""
        try:
            self._running = self._submit()
        except RuntimeError as error:  # the executor was shut down meanwhile
            self.result.set_exception(error)
        else:
            self._running.add_done_callback(lambda _: on_done())

    def deliver(self) -> None:
        """Hand on the outcome, unless its future is done already."""
        if self.result.done() or self._running is None:
            return
        if self._running.cancelled():
            self.result.cancel()
        elif (error := self._running.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(self._running.result())
