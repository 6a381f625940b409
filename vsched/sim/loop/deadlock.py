"""Deadlock report of a simulation: each task and the calls it waits in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

TASKS_SHOWN_MAX = 50


class VirtualDeadlock(RuntimeError):
    """Nothing can ever run again: in production this program would hang."""


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """List the tasks of a loop by name, with the calls each one waits in."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    tasks.sort(key=lambda task: (len(task.get_name()), task.get_name()))
    lines = [f"{len(tasks)} tasks wait:" if tasks else "no task is left"]
    for task in tasks[:TASKS_SHOWN_MAX]:
        waited_for = getattr(task, "_fut_waiter", None)
        what = f" for {waited_for.get_name()}" if isinstance(waited_for, asyncio.Task) else ""
        lines.append(f"  {task.get_name()} waits{what} in")
        lines += [f"    {place}" for place in _places(task.get_coro())]
    if len(tasks) > TASKS_SHOWN_MAX:
        lines.append(f"  and {len(tasks) - TASKS_SHOWN_MAX} more")
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
