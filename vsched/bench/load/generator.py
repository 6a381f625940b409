"""The load generator: one process, one loop, and the same bytes in the same order for every server.

Everything is drawn before the measurement starts. Each repeat and each concurrency has its own
seeds, so that a server's caches hold only content that is part of the case. In a conversation the
assistant messages are drawn too: outputs of two servers may differ in a token, but the prompts of
later turns must not.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import importlib
import io
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vsched.bench.load.client import BenchClient, Sample, chat_body
from vsched.bench.load.shapes import Case, Shape
from vsched.errors import ConfigError
from vsched.media.video import has_decoder

_TEXT = (
    "river stone window garden letter bridge yellow market summer engine silver planet winter forest "
    "paper ladder candle basket harbour mirror pepper carpet island button meadow pocket lantern "
    "copper saddle violin"
)
_WORDS = _TEXT.split()
_CELL_PIXELS = 16
VIDEO_RATE = 24
"""Frames per second of a drawn video."""
VIDEO_S = 8


def draw_picture(seed: int, width: int, height: int, kind: str = "PNG", **options: int) -> str:
    """Return a smooth random picture as a `data:` URL; `options` are Pillow's for the file format `kind`."""
    cells = max(height // _CELL_PIXELS, 1), max(width // _CELL_PIXELS, 1), 3
    values = np.random.default_rng(seed).integers(0, 255, cells, dtype=np.uint8)
    picture = Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f"data:image/{kind.lower()};base64,{data}"


def draw_image(seed: int, pixels: int) -> str:
    """Return a smooth random square picture as a `data:` URL."""
    return draw_picture(seed, pixels, pixels)


def draw_video(seed: int, size: tuple[int, int], *, frames: int, rate: int = VIDEO_RATE) -> bytes:
    """Return an H.264 MP4 file in which a smooth random picture moves slowly.

    Raises:
        ConfigError: When PyAV is not installed.
    """
    if not has_decoder():
        raise ConfigError("video: drawing one needs PyAV. Remedy: pip install 'vsched[video]'.")
    av: Any = importlib.import_module("av")

    width, height = size
    cells = np.random.default_rng(seed).integers(0, 255, (12, 12, 3), np.uint8)
    scene = Image.fromarray(cells).resize((2 * width, 2 * height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "ultrafast", "x264-params": "log-level=none"}
        for index in range(frames):
            left, top = index * width // frames, index * height // frames
            picture = scene.crop((left, top, left + width, top + height))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return file.getvalue()


def video_part(file: bytes, **options: float) -> dict[str, Any]:
    """Return the content part of a video file; `options` are those of vsched, such as `num_frames`."""
    url = f"data:video/mp4;base64,{base64.b64encode(file).decode('ascii')}"
    return {"type": "video_url", "video_url": {"url": url}, **options}


def draw_text(rng: random.Random, words: int) -> str:
    """Return random words."""
    return " ".join(rng.choices(_WORDS, k=words))


def draw_session(case: Case, shape: Shape, seed: int) -> list[dict[str, Any]]:
    """Return the user messages of one session, one per turn."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    turns: list[dict[str, Any]] = []
    for _ in range(shape.turns):
        text = draw_text(rng, shape.words)
        if case in {Case.TEXT, Case.SAMPLED}:
            turns.append({"role": "user", "content": text})
            continue
        seed_of_it = 0 if case is Case.SAME_IMAGE else rng.getrandbits(32)
        part = _drawn(case, shape, seed_of_it)
        turns.append({"role": "user", "content": [part, {"type": "text", "text": text}]})
    return turns


def _drawn(case: Case, shape: Shape, seed: int) -> dict[str, Any]:
    if case is not Case.VIDEO:
        return {"type": "image_url", "image_url": {"url": draw_image(seed, shape.image_pixels)}}
    side = shape.image_pixels // 2
    return video_part(draw_video(seed, (side, side), frames=VIDEO_S * VIDEO_RATE))


ERRORS_MAX = 5
NOT_ASKED = "not asked: an earlier turn failed"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a duration; milliseconds."""

    p50: float
    p95: float
    p99: float
    mean: float
    worst: float


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversations."""

    prompt_tokens: float
    ttft_ms: Times | None
    request_ms: Times | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One case at one concurrency against one server.

    Attributes:
        requests: All planned requests; those not sent because of a failed turn count as failed.
        errors: The most frequent errors, each with its count.
        wrong_length: Number of outputs with another number of tokens than requested.
        wall_s: From the first request to the end of the last.
        requests_s: Successful requests per second.
        ttft_ms: From sending a request to its first text.
        itl_ms: Between two pieces of text of one request, which may hold several tokens.
        tpot_ms: From first to last text, divided by the tokens after the first, one value per
            request.
        pieces_mean: Pieces of text per output; fewer than tokens if a server joins tokens or shows
            nothing for one.
        client_cpu: CPU time of the client over wall time: near 1, the client limited the result.
        others: Cores kept busy by other programs meanwhile.
        waiting: Cores kept busy by idle servers of a comparison; None if not measured.
        turns: One entry per turn, for conversations.
    """

    case: str = ""
    concurrency: int = 0
    requests: int
    failed: int
    errors: list[str]
    wrong_length: int
    wall_s: float
    requests_s: float
    output_tokens_s: float
    prompt_tokens_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    pieces_mean: float
    ttft_ms: Times | None
    itl_ms: Times | None
    tpot_ms: Times | None
    request_ms: Times | None
    client_cpu: float
    others: float = 0.0
    waiting: float | None = None
    turns: list[TurnFigures] = []


@dataclass(kw_only=True)
class Answers:
    """Samples of one run, before aggregation.

    Attributes:
        sessions: The samples of each session, one per turn.
        tokens: Requested output tokens of each request, in the same order.
    """

    sessions: list[list[Sample]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        """All samples, session by session."""
        return [sample for session in self.sessions for sample in session]


def times(seconds: Iterable[float]) -> Times | None:
    """Summarise durations; None if there are none."""
    values = np.fromiter(seconds, dtype=float) * 1e3
    if not values.size:
        return None
    p50, p95, p99 = (round(float(value), 3) for value in np.percentile(values, [50, 95, 99]))
    mean, worst = round(float(values.mean()), 3), round(float(values.max()), 3)
    return Times(p50=p50, p95=p95, p99=p99, mean=mean, worst=worst)


def gaps(samples: Iterable[Sample]) -> list[float]:
    """Return the times between two pieces of text."""
    return [after - before for sample in samples for before, after in pairwise(sample.stamps)]


def summarise(case: str, concurrency: int, choices: Answers) -> Figures:
    """Summarise one run. A failed request is in no duration and no rate, but is counted with its error."""
    samples = choices.samples
    good = [sample for sample in samples if sample.error is None]
    errors = Counter(sample.error for sample in samples if sample.error is not None)
    wrong = [
        sample
        for sample, tokens in zip(samples, choices.tokens, strict=True)
        if sample.error is None and sample.output_tokens != tokens
    ]
    wall_s = max(choices.wall_s, 1e-9)
    return Figures(
        case=case,
        concurrency=concurrency,
        requests=len(samples),
        failed=errors.total(),
        errors=[f"{count} x {text}" for text, count in errors.most_common(ERRORS_MAX)],
        wrong_length=len(wrong),
        wall_s=round(wall_s, 4),
        requests_s=round(len(good) / wall_s, 4),
        output_tokens_s=round(sum(sample.output_tokens for sample in good) / wall_s, 2),
        prompt_tokens_s=round(sum(sample.prompt_tokens for sample in good) / wall_s, 2),
        prompt_tokens_mean=_mean([sample.prompt_tokens for sample in good]),
        output_tokens_mean=_mean([sample.output_tokens for sample in good]),
        pieces_mean=_mean([len(sample.stamps) for sample in good]),
        ttft_ms=_first_text(good),
        itl_ms=times(gaps(good)),
        tpot_ms=times(_per_token(good)),
        request_ms=_whole(good),
        client_cpu=round(choices.cpu_s / wall_s, 3),
        turns=_turns(choices.sessions),
    )


def _turns(sessions: Sequence[Sequence[Sample]]) -> list[TurnFigures]:
    count = max(map(len, sessions), default=0)
    if count < 2:
        return []
    columns = [
        [session[turn] for session in sessions if len(session) > turn] for turn in range(count)
    ]
    good = [[sample for sample in column if sample.error is None] for column in columns]
    return [
        TurnFigures(
            prompt_tokens=_mean([sample.prompt_tokens for sample in column]),
            ttft_ms=_first_text(column),
            request_ms=_whole(column),
        )
        for column in good
    ]


def _first_text(samples: Iterable[Sample]) -> Times | None:
    return times(sample.stamps[0] - sample.started for sample in samples if sample.stamps)


def _whole(samples: Iterable[Sample]) -> Times | None:
    return times(sample.ended - sample.started for sample in samples)


def _per_token(samples: Iterable[Sample]) -> list[float]:
    return [
        (sample.stamps[-1] - sample.stamps[0]) / (sample.output_tokens - 1)
        for sample in samples
        if sample.stamps and sample.output_tokens > 1
    ]


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / max(len(values), 1), 2)


def _cell(value: Times | None) -> str:
    return "-" if value is None else f"{value.p50:.1f} / {value.p99:.1f}"


def table(results: Sequence[Figures], title: str) -> Table:
    """Return a table of the figures; times are p50 / p99 in milliseconds."""
    result = Table(title=title, caption="times in ms, p50 / p99", title_justify="left")
    result.add_column("case")
    for heading in ("conc.", "requests", "failed", "req/s", "tok/s", "in tok", "out tok"):
        result.add_column(heading, justify="right")
    for heading in ("TTFT", "ITL", "TPOT", "request", "client CPU"):
        result.add_column(heading, justify="right", no_wrap=True)
    for figures in results:
        result.add_row(
            figures.case,
            str(figures.concurrency),
            str(figures.requests),
            str(figures.failed),
            f"{figures.requests_s:.2f}",
            f"{figures.output_tokens_s:.1f}",
            f"{figures.prompt_tokens_mean:.0f}",
            f"{figures.output_tokens_mean:.0f}",
            _cell(figures.ttft_ms),
            _cell(figures.itl_ms),
            _cell(figures.tpot_ms),
            _cell(figures.request_ms),
            f"{figures.client_cpu:.0%}",
        )
    return result


def turns_table(figures: Figures) -> Table:
    """Return a table of a conversation by turn."""
    result = Table(title=f"conversation, concurrency {figures.concurrency}", title_justify="left")
    for heading in ("turn", "in tok", "TTFT", "request"):
        result.add_column(heading, justify="right")
    for number, turn in enumerate(figures.turns, 1):
        result.add_row(
            str(number), f"{turn.prompt_tokens:.0f}", _cell(turn.ttft_ms), _cell(turn.request_ms)
        )
    return result


WARMUP = 2
REPLY_WORDS = 12
_SESSIONS_MIN = 8

Message = dict[str, Any]
Body = Callable[[list[Message], int], bytes]
"""Creates the body of a request from its messages and its number of output tokens."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One run, without the server.

    Attributes:
        concurrency: Concurrent sessions.
        sessions: Total number of sessions.
        seed: Draws other texts and images.
        warmup: Requests before the measurement.
    """

    case: Case
    shape: Shape
    concurrency: int
    sessions: int
    seed: str = "0"
    warmup: int = WARMUP

    @property
    def requests(self) -> int:
        """Total number of requests."""
        return self.sessions * self.shape.turns


@dataclass(frozen=True, kw_only=True)
class DrawnLoad:
    """Messages to send: one list per turn of each session, and those for warm-up."""

    plan: LoadPlan
    sessions: list[list[list[Message]]]
    warmup: list[list[Message]]


def sessions_for(case: Case, concurrency: int, wanted: int | None) -> int:
    """Return the number of sessions of a run: `wanted`, or by default enough to measure a case within minutes.

    Raises:
        ConfigError: When some clients would have nothing to do.
    """
    if wanted is None:
        return concurrency if case is Case.CONVERSATION else max(2 * concurrency, _SESSIONS_MIN)
    if wanted < concurrency:
        raise ConfigError.of_limit(
            f"sessions: of {concurrency} clients some would have nothing to do",
            value=f"{wanted} sessions",
            limit=f"at least {concurrency}",
            remedy="ask for more sessions, or for fewer clients",
        )
    return wanted


def draw(plan: LoadPlan) -> DrawnLoad:
    """Draw everything for one run."""

    def session(*part: object) -> list[list[Message]]:
        return _session(plan.case, plan.shape, _seed(plan.case, plan.concurrency, plan.seed, *part))

    return DrawnLoad(
        plan=plan,
        sessions=[session(index) for index in range(plan.sessions)],
        warmup=[session("warm", index)[0] for index in range(plan.warmup)],
    )


def _seed(*parts: object) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _session(case: Case, shape: Shape, seed: int) -> list[list[Message]]:
    """Return all messages of each turn."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    history: list[Message] = []
    turns: list[list[Message]] = []
    for message in draw_session(case, shape, seed):
        history.append(message)
        turns.append(list(history))
        history.append({"role": "assistant", "content": draw_text(rng, REPLY_WORDS)})
    return turns


async def run_load(
    client: BenchClient, drawn: DrawnLoad, body: Body, *, finished: Callable[[], None]
) -> Figures:
    """Warm a server up and run a load against it; `finished` is called after each request."""
    plan = drawn.plan
    if plan.case is Case.SAMPLED:
        body = functools.partial(_without_temperature, body)
    for messages in drawn.warmup:
        await client.chat_when_ready(body(messages, plan.shape.output_tokens))
    choices = await _closed_loop(client, drawn, body, finished)
    return summarise(plan.case, plan.concurrency, choices)


def _without_temperature(body: Body, messages: list[Message], tokens: int) -> bytes:
    """Return the body of a request that uses the server's sampling defaults."""
    content = msgspec.json.decode(body(messages, tokens))
    del content["temperature"]
    return msgspec.json.encode(content)


async def _closed_loop(
    client: BenchClient, drawn: DrawnLoad, body: Body, finished: Callable[[], None]
) -> Answers:
    """Keep `concurrency` sessions open, each waiting for its responses."""
    plan = drawn.plan
    tokens = plan.shape.output_tokens
    bodies = [[body(turn, tokens) for turn in session] for session in drawn.sessions]
    results: list[list[Sample]] = [[] for _ in bodies]

    async def talk(index: int) -> None:
        for turn in bodies[index]:
            sample = await client.chat(turn)
            results[index].append(sample)
            finished()
            if sample.error is not None:
                break
        for _ in bodies[index][len(results[index]) :]:
            results[index].append(Sample(0.0, error=NOT_ASKED))
            finished()

    indices = iter(range(len(bodies)))

    async def work() -> None:
        for index in indices:
            await talk(index)

    began, cpu_began = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(bodies))):
            group.create_task(work())
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    counts = [tokens] * plan.requests
    return Answers(sessions=results, tokens=counts, wall_s=wall_s, cpu_s=cpu_s)


PIPE_COLUMNS = 160
"""Width of the tables if standard output is no terminal."""
_CLIENT_CPU_MAX = 0.7


class LoadReport(msgspec.Struct, kw_only=True):
    """Format of the `--json` report."""

    url: str
    model: str
    created: str
    results: list[Figures]


def fixed_length_fields(tokens: int) -> dict[str, Any]:
    """Return request fields for exactly `tokens` output tokens, for servers with vLLM's `min_tokens`."""
    return {"min_tokens": tokens, "ignore_eos": True}


async def measure(
    client: BenchClient,
    plans: Sequence[LoadPlan],
    *,
    url: str,
    model: str,
    fixed_length: bool,
) -> LoadReport:
    """Run the plans against a model, by default the server's first.

    Raises:
        BenchError: When the server does not list its model.
    """
    name = model or await client.model()

    def body(messages: list[dict[str, Any]], tokens: int) -> bytes:
        return chat_body(
            name, messages, tokens, fixed_length_fields(tokens) if fixed_length else {}
        )

    results = await run_plans(client, plans, body)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return LoadReport(url=url, model=name, created=created, results=results)


async def run_plans(client: BenchClient, plans: Sequence[LoadPlan], body: Body) -> list[Figures]:
    """Run plans one after another with a progress bar."""
    results: list[Figures] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for plan in plans:
            task = progress.add_task(f"{plan.case} x {plan.concurrency}", total=plan.requests)
            finished = functools.partial(progress.advance, task)
            results.append(await run_load(client, draw(plan), body, finished=finished))
    return results


def write_report(report: LoadReport, path: Path | None) -> None:
    """Print the tables and write the figures to `path`.

    With the path `-`, the figures go to standard output and the tables to standard error.
    """
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    to_stdout = path is not None and str(path) == "-"
    if to_stdout:
        sys.stdout.buffer.write(encoded)
    elif path is not None:
        path.write_bytes(encoded)
    stream = sys.stderr if to_stdout else sys.stdout
    width = None if stream.isatty() else PIPE_COLUMNS
    console = Console(stderr=to_stdout, width=width, markup=False)
    console.print(table(report.results, report.model))
    for figures in report.results:
        if figures.turns:
            console.print(turns_table(figures))
    for figures in report.results:
        where = f"{figures.case} x {figures.concurrency}"
        if figures.failed:
            console.print(f"{where}: {figures.failed} failed, most often: {figures.errors[0]}")
        if figures.client_cpu > _CLIENT_CPU_MAX:
            busy = f"the client was busy {figures.client_cpu:.0%} of the time"
            console.print(f"{where}: {busy}; it may have limited the result")
