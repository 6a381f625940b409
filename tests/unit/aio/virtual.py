"""An event loop whose clock jumps to the next timer when nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

LATE_S = 1e-8
"""Timers fire late by this much, as real ones do; asyncio takes one for due that is a clock tick ahead."""


class _Selector(selectors.BaseSelector):
    """Watches descriptors without ever waiting for them: waiting is what moves the clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, (
            "nothing runs and no timer is set: this loop would sleep for ever"
        )
        ready = self._real.select(0)
        if not ready and timeout > 0:
            self.now_s += timeout + LATE_S
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Hours of it pass in the time that its callbacks take."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = LATE_S / 2

    def time(self) -> float:
        return self._virtual.now_s
