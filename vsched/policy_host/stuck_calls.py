"""Interruption of policy calls that do not return.

Policies run on the event loop, so one endless loop in a policy would stop the server. A thread looks at the stack of
the main thread five times per limit. If it finds the same call of a policy each time, it sends a signal to the main
thread, whose handler raises `PolicyStuckError` in the policy's code. The host handles that like any exception of the
policy: the default decides, and replaces the policy.

A handler of a Python signal runs in the main thread, between two instructions, so it sees exactly where the exception
would be raised: only in code that a function marked with `interruptible` has called, never in the host's own. Such a
function must catch all exceptions, and leave a consistent state whichever of its calls raises one.

Out of reach are calls on other threads, and calls in native code that never gets back to the interpreter, such as
`sum(range(10**15))`. Waiting for a lock, a socket, a sleep or a regular expression is interrupted.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

SIGNAL = signal.SIGRTMIN + 5
"""A signal that neither Python nor the libraries use, unlike SIGALRM or SIGUSR1."""
LOOKS = 5
"""Number of looks per limit that must find the same call. A process that was stopped and continued is not looked at
meanwhile, so it interrupts nothing."""
AnyCall = TypeVar("AnyCall", bound=Callable[..., object])

_interruptible: set[CodeType] = set()


class PolicyStuckError(BaseException):
    """A policy call was interrupted; not an `Exception`, because the policy's code may catch these."""


def interruptible(function: AnyCall) -> AnyCall:
    """Mark a function that calls policies and catches all exceptions, so that these calls can be interrupted."""
    _interruptible.add(function.__code__)
    return function


class StuckCalls:
    """Interrupts policy calls on the main thread, from its creation there until `close`."""

    def __init__(self, limit_s: float) -> None:
        """Interrupt calls that take over `limit_s`; with 0, or on another thread, none."""
        self._limit_s = limit_s
        self._closed = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread: threading.Thread | None = None
        if limit_s and threading.get_ident() == self._main:
            self._handler_before = signal.signal(SIGNAL, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="policy calls", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; may be called twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            # Another engine may have installed its own handler since; without one, its signal would end the process.
            if signal.getsignal(SIGNAL) == self._interrupt and threading.get_ident() == self._main:
                signal.signal(SIGNAL, self._handler_before or signal.SIG_DFL)

    def _watch(self) -> None:
        seen, times = None, 0
        while not self._closed.wait(self._limit_s / LOOKS):
            # No variable for the stacks: it would keep the locals of all frames alive until the next look.
            call = _policy_call(sys._current_frames().get(self._main))  # noqa: SLF001 - documented
            times = times + 1 if call is not None and call is seen else 0
            seen = call
            if times >= LOOKS:  # again at each further look, since the policy may catch everything
                signal.pthread_kill(self._main, SIGNAL)

    def _interrupt(self, _signal: int, frame: FrameType | None) -> None:
        call = _policy_call(frame)
        if call is not None and call is not frame:
            raise PolicyStuckError(
                f"it did not return within {self._limit_s:g} s (policies.call_limit_s)"
            )


def _policy_call(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a stack that calls a policy; None if there is none."""
    while frame is not None and frame.f_code not in _interruptible:
        frame = frame.f_back
    return frame
