"""How long tests wait for what has to come: a guard against hanging, never a measure of speed.

No other file of the tests reads a clock. What a machine does in a second depends on what else it does; that something
is prompt is proved on a virtual clock, by the order of events, or by a deadline so far away that waiting for it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""Ten times what anything takes beside other work, and less than pytest's own limit, which ends the whole process."""

NEVER_S = 100 * PATIENCE_S
"""A deadline that must not be what ends a wait: a test that waits for it runs out of patience first."""


def patience(limit_s: float = PATIENCE_S) -> asyncio.Timeout:
    """Return a context that fails when what is awaited in it does not come."""
    return asyncio.timeout(limit_s)


async def until(
    condition: Callable[[], object], what: str = "", *, limit_s: float = PATIENCE_S
) -> None:
    """Let the loop turn until a condition holds for which there is no event: threads and processes are at work."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"in vain for {limit_s:g} s: {what}"
        await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Wait, without a loop, until a condition holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"in vain for {PATIENCE_S:g} s: {what}"
        time.sleep(0.01)
