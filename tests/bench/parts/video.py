"""`python -m tests.bench.parts video`: stalls next to videos, and the cost of further questions about one.

Videos and damaged files are sent to a real server over HTTP. A stream's gap is the time between two pieces of its text.
A stall is a gap less the median of all gaps.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from tests.bench.servers import processes
from tests.bench.servers.server import Server, serving
from tests.bench.servers.sides import spec_of
from vsched.bench.load.client import BenchClient, BenchError, Sample, chat_body
from vsched.bench.load.generator import draw_text, draw_video, video_part
from vsched.terminal.options import SetOption

READY_S = 600.0
DECODER_TOKENS = 2048
QUIET_S = 5.0
POLL_S = 0.25
DECODERS = 31
TURNS = 6
CLIENTS = 2
SIZE, RATE = (224, 224), 24
REPLY_TOKENS = 16


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps of streams in milliseconds."""

    p50_ms: float
    p99_ms: float
    worst_ms: float

    @property
    def text(self) -> str:
        ratio = self.worst_ms / self.p50_ms
        return f"gap p50 {self.p50_ms} ms, p99 {self.p99_ms}, worst {self.worst_ms} ({ratio:.1f}x)"


class _Streams:
    """Arrival times of text of some requests."""

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}

    def note(self, sample: Sample) -> None:
        self.samples[id(sample)] = sample

    def gaps(self, since: float, until: float) -> Gaps:
        """Return the gaps that overlap a period."""
        found = sorted(
            (after - before) * 1e3
            for sample in self.samples.values()
            for before, after in itertools.pairwise(sample.stamps)
            if after > since and before < until
        )
        return Gaps(
            p50_ms=round(statistics.median(found), 2),
            p99_ms=round(found[int(len(found) * 0.99)], 2),
            worst_ms=round(found[-1], 2),
        )


@asynccontextmanager
async def _decoding(server: Server, count: int) -> AsyncIterator[_Streams]:
    """Keep requests decoding; one that ends is sent again."""
    streams, client = _Streams(), BenchClient(server.spec.url)
    client.on_text = streams.note

    async def decode(seed: int) -> NoReturn:
        while True:
            sample = await client.chat(_body(server, _words(seed), DECODER_TOKENS))
            if sample.error:
                raise BenchError(f"a decoding request failed: {sample.error}")

    tasks = [asyncio.create_task(decode(seed)) for seed in range(count)]

    def check() -> None:
        for task in tasks:
            if task.done():
                task.result()

    try:
        while len(streams.samples) < count:
            check()
            await asyncio.sleep(POLL_S)
        yield streams
        check()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _words(seed: int) -> str:
    return draw_text(random.Random(seed), 20)


def _body(server: Server, content: Any, tokens: int) -> bytes:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    # Some tokens have no text.
    return chat_body(
        server.spec.model, messages, tokens, {"ignore_eos": True, "return_token_ids": True}
    )


def _about(part: dict[str, Any], text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


async def measure_beside_video(server: Server, frames: int) -> dict[str, Any]:
    """Measure the gaps of decoding requests alone, and from the arrival of a video to its first token."""
    file = draw_video(7, SIZE, frames=frames, rate=RATE)
    client = BenchClient(server.spec.url)
    async with _decoding(server, DECODERS) as streams:
        await asyncio.sleep(POLL_S)
        began = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        sent = time.perf_counter()
        part = video_part(file, num_frames=frames)
        sample = await client.chat(_body(server, _about(part, "What happens?"), 1))
        if sample.error:
            raise BenchError(f"the video failed: {sample.error}")
        return {
            "frames": frames,
            "prompt_tokens": sample.prompt_tokens,
            "ttft_s": round(sample.ended - sent, 2),
            "alone": streams.gaps(began, sent),
            "beside": streams.gaps(sent, sample.ended),
        }


async def measure_turns(server: Server, frames: int) -> list[dict[str, Any]]:
    """Ask about one video again and again, with all earlier questions and answers; the first turn encodes it."""
    file = draw_video(8, SIZE, frames=frames, rate=RATE)
    client = BenchClient(server.spec.url)
    messages = _about(video_part(file, num_frames=frames), "What happens?")
    found = []
    for turn in range(TURNS):
        before = server.statistics()["encode"]["items_encoded"]
        sample = await client.chat(_body(server, messages, REPLY_TOKENS))
        if sample.error:
            raise BenchError(f"turn {turn + 1} failed: {sample.error}")
        encoded = server.statistics()["encode"]["items_encoded"] - before
        ttft_ms = round((sample.stamps[0] - sample.started) * 1e3, 1)
        turned = {"encoded": encoded, "prompt_tokens": sample.prompt_tokens, "ttft_ms": ttft_ms}
        found.append(turned)
        messages = [
            *messages,
            {"role": "assistant", "content": sample.text},
            {"role": "user", "content": _words(turn)},
        ]
    return found


async def measure_beside_files(
    server: Server, files: Sequence[tuple[str, bytes]]
) -> dict[str, Any]:
    """Measure one decoding request, and the memory of all processes of the server, while damaged files arrive."""
    statuses: Counter[str] = Counter()
    client = BenchClient(server.spec.url)
    waiting = iter(files)

    async def send() -> None:
        for name, file in waiting:
            body = _body(server, _about(video_part(file, num_frames=4), "?"), 1)
            sample = await client.chat(body)
            if sample.status is None or sample.status >= 500:
                raise BenchError(f"{name}: {sample.error}")
            statuses[str(sample.status)] += 1

    async with _decoding(server, 1) as streams, _memory(server) as memory:
        began = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        sent, before = time.perf_counter(), memory[-1]
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(send())
        ended = time.perf_counter()
        return {
            "files": len(files),
            "seconds": round(ended - sent, 1),
            "statuses": dict(sorted(statuses.items())),
            "alone": streams.gaps(began, sent),
            "beside": streams.gaps(sent, ended),
            "memory_before_mib": before,
            "memory_peak_mib": max(memory),
        }


@asynccontextmanager
async def _memory(server: Server) -> AsyncIterator[list[float]]:
    """Sample the memory of all processes of a server; the list grows."""
    found: list[float] = []

    def read() -> float:
        return round(sum(processes.memory_mib(server.pids()).values()), 1)

    async def sample() -> None:
        while True:
            found.append(await asyncio.to_thread(read))
            await asyncio.sleep(POLL_S)

    found.append(read())
    task = asyncio.create_task(sample())
    try:
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _measure(server: Server, frames: int) -> dict[str, Any]:
    from tests.unit.media.video_files import hostile_files  # PyAV, which other commands do without

    files = list(hostile_files())
    return {
        "beside_video": await measure_beside_video(server, frames),
        "turns": await measure_turns(server, frames),
        "beside_files": await measure_beside_files(server, files),
    }


def _show(row: dict[str, Any], console: Console) -> None:
    one = row["beside_video"]
    console.print(
        f"{DECODERS} decoders beside a video of {one['frames']} frames, {one['prompt_tokens']} tokens, "
        f"first token after {one['ttft_s']} s: {one['beside'].text}; alone {one['alone'].text}"
    )
    for number, turn in enumerate(row["turns"], 1):
        console.print(
            f"turn {number}: {turn['prompt_tokens']} prompt tokens, {turn['encoded']} frame groups encoded, "
            f"first token after {turn['ttft_ms']:.0f} ms"
        )
    one = row["beside_files"]
    beside: Gaps = one["beside"]
    statuses = ", ".join(f"{count} x {status}" for status, count in one["statuses"].items())
    console.print(
        f"{one['files']} damaged files from {CLIENTS} clients in {one['seconds']} s ({statuses}): stall of a decoder "
        f"p99 {beside.p99_ms - beside.p50_ms:.1f} ms ({beside.text}); alone {one['alone'].text}; "
        f"memory {one['memory_before_mib']:.0f} MiB, at most {one['memory_peak_mib']:.0f}"
    )


def video(
    path: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    frames: Annotated[int, typer.Option(min=2, help="Frames of the video.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Servers, one after another.")] = 3,
) -> None:
    """Serve a checkpoint, and measure decoding next to a long video, a conversation, and damaged files."""
    console = Console()
    spec = spec_of(path.resolve(), assignments or ())
    for _ in range(repeats):
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(spec, Path(folder) / "server.log") as server,
        ):
            server.wait_ready(READY_S)
            _show(asyncio.run(_measure(server, frames)), console)
