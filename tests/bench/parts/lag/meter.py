"""Delay of an event loop; as a program, delay of an idle loop until its input ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np

INTERVAL_S = 0.001


class LagMeter:
    """Records the delays of the running event loop."""

    def __init__(self) -> None:
        self._gaps: list[float] = []

    async def run(self) -> None:
        """Record until cancelled."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(INTERVAL_S)
            now = time.perf_counter()
            self._gaps.append(now - last)
            last = now

    def percentiles_ms(self) -> tuple[float, float, float]:
        """Return p50, p99 and the maximum delay."""
        late = lateness(self._gaps)
        p50, p99, worst = np.percentile(late, [50, 99, 100]) * 1e3
        return float(p50), float(p99), float(worst)


def lateness(gaps: Sequence[float]) -> list[float]:
    """Return the delay at each moment of a grid of `INTERVAL_S`; gaps are seconds between two wake-ups."""
    late: list[float] = []
    for gap in gaps:
        over = max(gap - INTERVAL_S, 0.0)
        late += [over - missed * INTERVAL_S for missed in range(int(over / INTERVAL_S) + 1)]
    return late or [0.0]


async def _until_input_ends() -> None:
    meter = LagMeter()
    metering = asyncio.create_task(meter.run())
    await asyncio.to_thread(sys.stdin.read)
    metering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await metering
    sys.stdout.write(msgspec.json.encode(meter.percentiles_ms()).decode())


if __name__ == "__main__":
    asyncio.run(_until_input_ends())
