"""Waiting in tests: timeouts guard against hanging and never measure speed.

No other file of the tests reads a clock. The speed of a machine depends on its other work; promptness is proved on a
virtual clock, by the order of events, or by a deadline so far away that a test that waited for it would fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Ten times the longest wait on a busy machine, and less than pytest's own limit, which ends the whole process."""

NEVER_S = 100 * PATIENCE_S
"""A deadline that must never be reached: a test that waits for it runs out of patience first."""


def patience(limit_s: float = PATIENCE_S) -> asyncio.Timeout:
    """Return a context that fails with a timeout after `limit_s`."""
    return asyncio.timeout(limit_s)


async def until(
    condition: Callable[[], object], what: str = "", *, limit_s: float = PATIENCE_S
) -> None:
    """Let the loop turn until a condition holds, for conditions of threads and processes that have no event."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out after {limit_s:g} s: {what}"
        await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Wait, without a loop, until a condition holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out after {PATIENCE_S:g} s: {what}"
        time.sleep(0.01)
