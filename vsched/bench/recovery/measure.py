"""What a lost generate rank costs: from the kill to the first new token of every stream, in parts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from vsched.aio.replicas.worker_group import STARTING
from vsched.bench.load.cases import draw_image
from vsched.config import load_config
from vsched.engine import Engine
from vsched.types import SamplingParams

STREAMS = 4
TOKENS_BEFORE = 8
TOKENS_AFTER = 24
DEADLINE_S = 300.0
POLL_S = 0.001
PARTS = ("seen lost", "process, imports", "weights", "KV cache", "first new token")
"""What happens one after the other; each ends where the next begins."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One loss: seconds from the kill to the end of each of `PARTS`, and whether all tokens were as undisturbed."""

    ends_s: list[float]
    same_tokens: bool

    @property
    def total_s(self) -> float:
        """From the kill to the first new token of the last stream."""
        return self.ends_s[-1]

    @property
    def parts_s(self) -> list[float]:
        """How long each part took."""
        starts = [0.0, *self.ends_s[:-1]]
        return [end - start for start, end in zip(starts, self.ends_s, strict=True)]


class _Stream:
    """A seeded request with a picture, which is read while it runs."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.token_ids: list[int] = []
        self.heard_s: list[float] = []
        self._engine = engine
        self._number = number
        self.ended = asyncio.create_task(self._read())

    async def _read(self) -> None:
        content = [{"type": "image"}, {"type": "text", "text": f"Question {self._number}"}]
        generation = await self._engine.generate(
            prompt=self._engine.preprocessor.render([{"role": "user", "content": content}]),
            images=[draw_image(self._number, 224)],
            sampling=SamplingParams(
                max_tokens=TOKENS_BEFORE + TOKENS_AFTER,
                temperature=1.0,
                seed=self._number,
                ignore_eos=True,
            ),
            request_id=f"stream-{self._number}-{time.monotonic_ns()}",
        )
        async for delta in generation:
            self.heard_s += [time.monotonic()] * len(delta.token_ids)
            self.token_ids += delta.token_ids

    async def reach(self, tokens: int) -> None:
        """Wait until `tokens` tokens have come, or the end."""
        await _until(lambda: len(self.token_ids) >= tokens or self.ended.done())


class _Stations:
    """When the group that was lost passed the stations of its way back, by what it reports."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.spoke_s = self.sizing_s = 0.0

    def note(self, group: str, what: str, fraction: float) -> None:
        """Take a report of progress."""
        del fraction
        if group.startswith("generate") and what != STARTING:
            self.spoke_s = self.spoke_s or time.monotonic()
            if "KV cache" in what:
                self.sizing_s = self.sizing_s or time.monotonic()


async def measure_recovery(
    settings: Sequence[str], *, rounds: int, advanced: Callable[[], None] = lambda: None
) -> list[Recovery]:
    """Kill a generate rank while it serves, `rounds` times, each in a server of its own."""
    config = load_config(None, sets=[*settings], environ={}).config
    found = []
    for _ in range(rounds):
        stations = _Stations()
        async with asyncio.timeout(DEADLINE_S), Engine(config, on_progress=stations.note) as engine:
            undisturbed = [_Stream(engine, number) for number in range(STREAMS)]
            await asyncio.gather(*(stream.ended for stream in undisturbed))
            expected = [stream.token_ids for stream in undisturbed]
            found.append(await _kill(engine, stations, expected))
        advanced()
    return found


async def _kill(engine: Engine, stations: _Stations, expected: list[list[int]]) -> Recovery:
    streams = [_Stream(engine, number) for number in range(STREAMS)]
    await asyncio.gather(*(stream.reach(TOKENS_BEFORE) for stream in streams))
    stations.forget()
    group = next(one for one in engine.groups() if one["stage"] == "generate" and one["running"])
    killed_s = time.monotonic()
    os.kill(group["ranks"][0]["pid"], signal.SIGKILL)
    seen_s = await _until(lambda: engine.state != "ready")
    ready_s = await _until(lambda: engine.state == "ready")
    await asyncio.gather(*(stream.ended for stream in streams))
    firsts = [min((at for at in one.heard_s if at > seen_s), default=0.0) for one in streams]
    ends = [seen_s, stations.spoke_s, stations.sizing_s, ready_s, max(firsts)]
    return Recovery(
        ends_s=[max(end - killed_s, 0.0) for end in ends],
        same_tokens=[stream.token_ids for stream in streams] == expected,
    )


async def _until(condition: Callable[[], bool]) -> float:
    """Return when a condition holds; the deadline of a round bounds the wait."""
    while not condition():  # noqa: ASYNC110 - nobody tells; a millisecond is exact enough
        await asyncio.sleep(POLL_S)
    return time.monotonic()
