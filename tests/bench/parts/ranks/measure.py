"""Latency of a decision from a leader to a rank process, compared with plain ZeroMQ and the same message.

One-way latency: from before encoding until the other process has decoded it, on the clock shared by
the processes of a host. For vsched this includes computing and checking the digest. Each message
waits for the reply to the previous one, and the transports take turns in every round, so that other
load on the machine affects all of them alike.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from vsched.kernel.decisions import GenerateDecision
from vsched.transport.zmq_link import LeaderLink, make_socket_folder
from vsched.wire import GenerateResult, LeaderLog, Stop, decode_report

WAYS = ("vsched", "zmq.asyncio", "pyzmq")
"""vsched's log and links; XPUB and SUB on a uvloop at both ends; the same with blocking calls."""
PAUSES_S = (0.0, 0.01)
WARM_UP = 0.1
"""Share of a round that is not counted."""
GROWING_SLOTS = 8
_START_S = 30.0


class RanksRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transport at one pause between messages; microseconds.

    The percentiles are medians over the rounds; `spread_us` are the lowest and the highest p50 of a
    round.
    """

    way: str
    pause_ms: float
    messages: int
    rounds: int
    p50_us: float
    p99_us: float
    spread_us: tuple[float, float]
    p99_spread_us: tuple[float, float]


class _Way(Protocol):
    async def send(self, decision: GenerateDecision) -> int:
        """Send a decision; return the nanoseconds until it was decoded."""
        ...

    async def stop(self) -> None: ...


class _Vsched:
    """The decision log and links of a group."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, _back: str) -> None:
        self._log = LeaderLog()
        self._link = LeaderLink(context, address, self._receive)
        self._received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def _receive(self, _identity: bytes, frame: bytes) -> None:
        report = decode_report(frame)
        self._received.set_result(report.tokens if isinstance(report, GenerateResult) else b"")

    async def up(self) -> None:
        await self._received

    async def send(self, decision: GenerateDecision) -> int:
        self._received = asyncio.get_running_loop().create_future()
        sent_ns = time.monotonic_ns()
        assert self._link.send(0, self._log.append(decision))
        return int.from_bytes(await self._received, "little") - sent_ns

    async def stop(self) -> None:
        self._link.send(0, self._log.append(Stop()))
        await asyncio.sleep(0.1)
        self._link.close()


class _OnALoop:
    """A broadcast with zmq.asyncio."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, back: str) -> None:
        shadow = zmq.asyncio.Context.shadow(context)
        self._out, self._in = shadow.socket(zmq.XPUB), shadow.socket(zmq.PULL)
        self._out.bind(address)
        self._in.bind(back)
        self._encoder = msgspec.msgpack.Encoder()

    async def up(self) -> None:
        await self._out.recv()

    async def send(self, decision: GenerateDecision) -> int:
        sent_ns = time.monotonic_ns()
        await self._out.send(self._encoder.encode(decision))
        return int.from_bytes(await self._in.recv(), "little") - sent_ns

    async def stop(self) -> None:
        await self._out.send(b"")
        self._out.close(linger=100)
        self._in.close(linger=0)


class _Blocking:
    """A broadcast with blocking calls."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, back: str) -> None:
        self._out, self._in = context.socket(zmq.XPUB), context.socket(zmq.PULL)
        self._out.bind(address)
        self._in.bind(back)
        self._encoder = msgspec.msgpack.Encoder()

    async def up(self) -> None:
        self._out.recv()

    async def send(self, decision: GenerateDecision) -> int:
        sent_ns = time.monotonic_ns()
        self._out.send(self._encoder.encode(decision))
        return int.from_bytes(self._in.recv(), "little") - sent_ns

    async def stop(self) -> None:
        self._out.send(b"")
        self._out.close(linger=100)
        self._in.close(linger=0)


_KINDS: dict[str, Any] = {"vsched": _Vsched, "zmq.asyncio": _OnALoop, "pyzmq": _Blocking}


@asynccontextmanager
async def _way(
    kind: str, context: zmq.Context[zmq.Socket[bytes]], folder: Path
) -> AsyncIterator[_Way]:
    address, back = (f"ipc://{folder / f'{kind}-{end}'}" for end in ("out", "in"))
    way = _KINDS[kind](context, address, back)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.parts.ranks.peer", kind, address, back
    )
    try:
        async with asyncio.timeout(_START_S):
            await way.up()
        yield way
        await way.stop()
        async with asyncio.timeout(_START_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def measure_ranks(
    *, messages: int, rounds: int, advanced: Callable[[], object], ways: Sequence[str] = WAYS
) -> list[RanksRow]:
    """Measure every transport at every pause; with a pause, a tenth of the messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder = Path(make_socket_folder())
    samples: dict[tuple[str, float], list[list[float]]] = {}
    counts = {pause_s: max(20, messages // 10) if pause_s else messages for pause_s in PAUSES_S}
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        stack.callback(context.destroy, linger=0)
        running = {
            kind: await stack.enter_async_context(_way(kind, context, folder)) for kind in ways
        }
        for turn in range(rounds):
            for pause_s, count in counts.items():
                order = list(running)[turn % len(running) :] + list(running)[: turn % len(running)]
                for kind in order:
                    samples.setdefault((kind, pause_s), []).append(
                        await _round(running[kind], count, pause_s)
                    )
                    advanced()
    return [
        _row(kind, pause_s, samples[kind, pause_s], counts[pause_s])
        for pause_s in PAUSES_S
        for kind in ways
    ]


async def _round(way: _Way, messages: int, pause_s: float) -> list[float]:
    times_us = []
    for step in range(messages):
        grown = [number for slot in range(GROWING_SLOTS) for number in (slot, step + slot)]
        if pause_s:
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(_START_S):  # a process that ended does not reply
            times_us.append(await way.send(GenerateDecision(step, grown=grown)) / 1e3)
    return times_us[int(messages * WARM_UP) :]


def _row(way: str, pause_s: float, samples: list[list[float]], messages: int) -> RanksRow:
    halves, tails = (
        [float(np.percentile(one, percent)) for one in samples] for percent in (50, 99)
    )
    return RanksRow(
        way=way,
        pause_ms=pause_s * 1e3,
        messages=messages,
        rounds=len(samples),
        p50_us=round(statistics.median(halves), 1),
        p99_us=round(statistics.median(tails), 1),
        spread_us=(round(min(halves), 1), round(max(halves), 1)),
        p99_spread_us=(round(min(tails), 1), round(max(tails), 1)),
    )
