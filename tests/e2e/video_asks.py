"""Questions about videos, and the answers of transformers' `generate` to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.asking import data_url, drawn_image
from tests.parity.compare import expected, library_model, load_on
from tests.parity.video_compare import inputs_of, prompt_of
from tests.patience import patience
from tests.workers.driver import Clip, Question, Stage
from vsched import Engine, SamplingParams
from vsched.media import ImageReference, MediaReference
from vsched.worker.contract import VideoSampling

SIZE = (112, 96)
_numbers = itertools.count()


def drawn_frames(seed: int, count: int, size: tuple[int, int] = SIZE) -> list[Image.Image]:
    """Return different frames; a longer video begins with the frames of a shorter one."""
    return [drawn_image(100 * seed + index, size) for index in range(count)]


def of_frames(frames: Sequence[Image.Image], fps: float = 2.0) -> MediaReference:
    """Return a video that is sent as its frames."""
    sampling = VideoSampling(fps=fps)
    return MediaReference(tuple(map(data_url, frames)), is_video=True, sampling=sampling)


def reference_to(part: Image.Image | Clip | MediaReference) -> ImageReference:
    """Return an image or a video as a client sends it."""
    if isinstance(part, Clip):
        return of_frames(part.frames, part.fps)
    return data_url(part) if isinstance(part, Image.Image) else part


@dataclass(frozen=True)
class VideoAsk:
    """A question: images, videos and texts in order."""

    parts: Sequence[Image.Image | Clip | MediaReference | str]
    count: int = 24

    @property
    def messages(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for part in self.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                is_video = getattr(reference_to(part), "is_video", False)
                content.append({"type": "video" if is_video else "image"})
        return [{"role": "user", "content": content}]

    @property
    def references(self) -> list[ImageReference]:
        return [reference_to(part) for part in self.parts if not isinstance(part, str)]


async def ask_video(engine: Engine, ask: VideoAsk) -> list[int]:
    """Return the tokens of the answer."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ask.count)
    async with patience():
        generation = await engine.generate(
            prompt=engine.preprocessor.render(ask.messages),
            images=ask.references,
            sampling=sampling,
            request_id=f"video-{next(_numbers)}",
        )
        return [token async for delta in generation for token in delta.token_ids]


async def assert_answers(
    engine: Engine, asked: Sequence[VideoAsk], expected: Sequence[Sequence[int]]
) -> None:
    """Ask all at a time, twice: with preemptions, and with cached prefixes the second time."""
    before = engine.statistics()["generate"]
    for _ in range(2):
        assert await asyncio.gather(*[ask_video(engine, ask) for ask in asked]) == expected
    after = engine.statistics()["generate"]
    assert after["preemptions"] > before["preemptions"], "the KV cache was not small enough"
    assert after["tokens_cached"] > before["tokens_cached"]


async def groups_encoded(engine: Engine, video: MediaReference) -> int:
    """Return the number of frame groups that a question about a video encodes."""
    before = engine.statistics()["encode"]["items_encoded"]
    await ask_video(engine, VideoAsk([video, "?"], count=1))
    return int(engine.statistics()["encode"]["items_encoded"] - before)


def question_inputs(stage: Stage, model: Any, ask: VideoAsk) -> dict[str, Any]:
    """Return the inputs of transformers' model for a question: images and clips, then a text."""
    *images, text = ask.parts
    question = Question(str(text), images)
    return inputs_of(stage, model, question, prompt_of(stage, question))


def generate_videos(path: Path, asked: Sequence[VideoAsk]) -> list[list[int]]:
    """Return the tokens of transformers' `generate` for questions about images and clips."""
    stage, model = load_on("cpu", str(path)), library_model(path, sees=True)
    return [expected(model, question_inputs(stage, model, ask), ask.count).output for ask in asked]
