"""`python -m tests.bench.parts pruning`: speed and accuracy of pruned videos.

Questions about drawn videos are asked of engines that prune different shares of their tokens.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from demo_training.samples import held_out
from vsched import Engine, SamplingParams
from vsched.cli.demo_command import data_url, is_answer
from vsched.config import load_config
from vsched.media import MediaReference
from vsched.policy import PruningPolicy, PruningView
from vsched.policy.videos import default_kept
from vsched.terminal.options import SetOption
from vsched.worker.contract import PixelBounds, VideoSampling

TASKS = ("number", "colour", "shape", "count")
KINDS = ("rests", "appears", "moves")
ANSWER_TOKENS = 16
PIXELS_MIN = 4 * 28 * 28
SETTLE = 8
"""Frames of a drawn video before the picture appears, and for as long as it is shown."""
_numbers = itertools.count()


class WholeGroups(PruningPolicy, frozen=True, kw_only=True):
    """Keeps whole frame groups at equal distances, as a lower frame rate does; for comparison."""

    def prune(self, view: PruningView) -> bytes:
        return default_kept(view.groups, view.rows * view.columns, view.tokens_max)


WHOLE = f"{WholeGroups.__module__}:{WholeGroups.__qualname__}"


def pruned(rate: float, use: str = "most-changed") -> list[str]:
    """Return the settings that prune a share of the tokens."""
    return [f"media.pruning.use={use}", f"media.pruning.rate={rate}"]


SHARES = {"none": [], **{f"most-changed {rate}": pruned(rate) for rate in (0.5, 0.75)}}
WITH_GROUPS = {**SHARES, **{f"WholeGroups {rate}": pruned(rate, WHOLE) for rate in (0.5, 0.75)}}


class Answer(NamedTuple):
    """The answer to one question about a video; times in milliseconds."""

    text: str
    prompt_tokens: int
    ttft_ms: float
    token_ms: float


def street(seed: int, count: int, *, moves: bool) -> list[Image.Image]:
    """Return frames of 392 x 224 pixels: a picture at rest, over a ninth of which a square moves, with sensor noise."""
    drawn = np.random.default_rng(seed)
    small = Image.fromarray(drawn.integers(0, 255, (7, 12, 3), dtype=np.uint8))
    picture = small.resize((392, 224), Image.Resampling.BICUBIC)
    square = Image.fromarray(drawn.integers(0, 255, (4, 4, 3), dtype=np.uint8)).resize((98, 98))
    frames = []
    for index in range(count):
        frame = picture.copy()
        if moves:
            frame.paste(square, (12 * index % 294, 3 * index % 126))
            noise = drawn.normal(0, 2, (224, 392, 3))
            frame = Image.fromarray(np.clip(np.asarray(frame) + noise, 0, 255).astype(np.uint8))
        frames.append(frame)
    return frames


def drawn_video(picture: Image.Image, kind: str) -> list[Image.Image]:
    """Return a video of a picture that rests, that appears on an empty page, or that moves over it."""
    if kind == "rests":
        return [picture] * 2 * SETTLE
    corner = picture.getpixel((0, 0))
    if kind == "appears":
        return [Image.new("RGB", picture.size, corner)] * SETTLE + [picture] * SETTLE
    frames = []
    for index in range(2 * SETTLE):
        page = Image.new("RGB", (picture.width + 56, picture.height + 28), corner)
        page.paste(picture, (28 * index // SETTLE, 14 * index // SETTLE))
        frames.append(page)
    return frames


@asynccontextmanager
async def engines(
    settings: Sequence[str], compared: dict[str, list[str]]
) -> AsyncIterator[dict[str, Engine]]:
    async with AsyncExitStack() as stack:
        found = {}
        for name, own in compared.items():
            config = load_config(None, sets=[*settings, *own], environ={}).config
            found[name] = await stack.enter_async_context(Engine(config))
        yield found


def video_of(frames: Sequence[Image.Image]) -> MediaReference:
    urls = []
    for frame in frames:
        file = io.BytesIO()
        frame.save(file, "PNG")
        urls.append(data_url(file.getvalue()))
    bounds = PixelBounds(min_pixels=PIXELS_MIN)  # drawn pictures are small
    return MediaReference(
        tuple(urls), is_video=True, sampling=VideoSampling(fps=2.0, bounds=bounds)
    )


async def ask(
    engine: Engine, video: MediaReference, question: str, count: int, **options: Any
) -> Answer:
    """Ask a question about a video, in place of an image: not every chat template has videos."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = engine.preprocessor.render([{"role": "user", "content": content}])
    image, video_token = engine.info.placeholder, engine.info.video_token_id
    assert video_token is not None, "the model takes no videos"
    tokens = engine.preprocessor.tokenize(text)
    prompt = [video_token if token == image else token for token in tokens]
    sampling = SamplingParams(temperature=0.0, max_tokens=count, **options)
    started = time.perf_counter()
    generation = await engine.generate(
        prompt=prompt, images=[video], sampling=sampling, request_id=f"video-{next(_numbers)}"
    )
    said, times = "", []
    async for delta in generation:
        said += delta.text
        times += [time.perf_counter()] * len(delta.token_ids)
    steps = max(len(times) - 1, 1)
    return Answer(
        text=said,
        prompt_tokens=generation.prompt_tokens,
        ttft_ms=(times[0] - started) * 1e3,
        token_ms=(times[-1] - times[0]) / steps * 1e3,
    )


async def measure_speed(
    settings: Sequence[str], *, frames: int, repeats: int
) -> dict[str, dict[str, list[Answer]]]:
    """Return answers by kind of video and share; shares take turns, each video is new."""
    found: dict[str, dict[str, list[Answer]]] = {}
    async with engines(settings, SHARES) as running:
        for kind in ("moves", "rests"):
            answers = found[kind] = {name: [] for name in running}
            for number in range(-1, repeats):
                video = video_of(street(100 + number, frames, moves=kind == "moves"))
                for name, engine in running.items():
                    answer = await ask(engine, video, "What?", 32, ignore_eos=True)
                    if number >= 0:  # the first one warms up
                        answers[name].append(answer)
    return found


def drawn_questions(count: int) -> Iterator[tuple[str, Image.Image, str, str]]:
    """Yield (task, picture, question, answer), the same for every share."""
    for task in TASKS:
        for conversation in held_out(task, count):
            [turn] = conversation.turns
            yield task, turn.images[0], turn.question, turn.answer


async def measure_accuracy(
    settings: Sequence[str], *, count: int
) -> dict[str, dict[str, dict[str, int]]]:
    """Return right answers by kind of video, share and task."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    async with engines(settings, WITH_GROUPS) as running:
        for kind in KINDS:
            right = found[kind] = {name: dict.fromkeys(TASKS, 0) for name in running}
            for task, picture, question, expected in drawn_questions(count):
                video = video_of(drawn_video(picture, kind))
                answers = await asyncio.gather(
                    *(ask(engine, video, question, ANSWER_TOKENS) for engine in running.values())
                )
                for name, answer in zip(running, answers, strict=True):
                    right[name][task] += is_answer(answer.text, expected)
    return found


def pruning(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    frames: Annotated[int, typer.Option(min=4, help="Frames of a video for speed.")] = 64,
    repeats: Annotated[int, typer.Option(min=0, help="Videos per share; 0 for no speed.")] = 3,
    questions: Annotated[
        int, typer.Option(min=0, help="Questions per task, for the demo model; 0 for no accuracy.")
    ] = 0,
) -> None:
    """Compare shares of pruned tokens: prompt, TTFT and TPOT, and right answers about drawn videos."""
    console = Console()
    settings = [*(assignments or ()), f"model.path={path}"]
    if repeats:
        speed = asyncio.run(measure_speed(settings, frames=frames, repeats=repeats))
        table = Table("video", "pruned", "prompt tokens", "TTFT, ms", "TPOT, ms")
        for kind, shares in speed.items():
            for name, answers in shares.items():
                ttft_ms, token_ms = (
                    median(getattr(one, each) for one in answers)
                    for each in ("ttft_ms", "token_ms")
                )
                tokens = str(answers[0].prompt_tokens)
                table.add_row(kind, name, tokens, f"{ttft_ms:,.0f}", f"{token_ms:.1f}")
        console.print(table)
    if questions:
        right = asyncio.run(measure_accuracy(settings, count=questions))
        for kind, of_share in right.items():
            table = Table(f"right answers in %, {kind}", *TASKS)
            for name, counts in of_share.items():
                table.add_row(name, *(f"{100 * counts[task] / questions:.0f}" for task in TASKS))
            console.print(table)
