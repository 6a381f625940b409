"""Handles of a virtual loop: timers, tasks, and calls in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any


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


class Numbers:
    """Task factory that numbers the tasks of one loop."""

    def __init__(self) -> None:
        self._last = 0

    def make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,  # the type in typeshed differs between versions
        /,
        **settings: Any,
    ) -> asyncio.Task[Any]:
        """Create the next task; an asyncio task factory."""
        self._last += 1
        return _Task(self._last, coroutine, loop=loop, **settings)


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
