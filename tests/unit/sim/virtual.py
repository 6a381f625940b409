"""Runs a coroutine on a virtual loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vsched.sim.loop import VirtualLoop

T = TypeVar("T")


def play(main: Coroutine[Any, Any, T], *, tie_seed: int | None = None) -> T:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(tie_seed)) as runner:
        return runner.run(main)


def current() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
