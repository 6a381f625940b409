"""Questions about videos, and the answers of transformers' `generate` to them."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.e2e.asking import data_url, drawn_image
from tests.patience import patience
from tests.workers.driver import values_of
from tests.workers.reference import Reference
from vsched import Engine, SamplingParams
from vsched.media import ImageReference, MediaReference
from vsched.types import MediaItem
from vsched.worker.contract import VideoSampling, view_arrays
from vsched_workers.families.qwen_image import grid_of

SIZE = (112, 96)
_numbers = itertools.count()


def drawn_frames(seed: int, count: int, size: tuple[int, int] = SIZE) -> list[Image.Image]:
    """Return different frames; a longer video begins with the frames of a shorter one."""
    return [drawn_image(100 * seed + index, size) for index in range(count)]


def video_file(frames: Sequence[Image.Image], *, rate: int = 8, codec: str = "libx264") -> bytes:
    """Return an MP4 of these frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.options = "yuv420p", {"g": "5", "x264-params": "log-level=none"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame))))
        container.mux(stream.encode())
    return file.getvalue()


def of_frames(frames: Sequence[Image.Image], fps: float = 2.0) -> MediaReference:
    """Return a video that is sent as its frames."""
    return MediaReference(
        tuple(map(data_url, frames)), is_video=True, sampling=VideoSampling(fps=fps)
    )


@dataclass(frozen=True)
class VideoAsk:
    """A question: images, videos and texts in order."""

    parts: Sequence[Image.Image | MediaReference | str]
    count: int = 24

    @property
    def messages(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for part in self.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                is_video = isinstance(part, MediaReference) and part.is_video
                content.append({"type": "video" if is_video else "image"})
        return [{"role": "user", "content": content}]

    @property
    def references(self) -> list[ImageReference]:
        return [
            data_url(part) if isinstance(part, Image.Image) else part
            for part in self.parts
            if not isinstance(part, str)
        ]


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


@dataclass
class Visual:
    """An image or a video of a question, as transformers gets it; `at` are the places of its items."""

    kind: str
    values: torch.Tensor
    grid: list[int]
    seconds: float
    at: list[int]


def visuals_of(engine: Engine, ask: VideoAsk, items: Sequence[MediaItem]) -> list[Visual]:
    """Return the images and videos of a question, whose pixels are in the engine's arena."""
    assert engine._running is not None
    found, first = [], 0
    for part in ask.parts:
        if isinstance(part, str):
            continue
        kind, groups, seconds = "image", 1, 0.0
        if isinstance(part, MediaReference):
            assert part.source is not None
            kind, groups = "video", -(-len(part.source) // 2)
            assert part.sampling.fps is not None
            seconds = 2 / part.sampling.fps
            if isinstance(part.source, str):
                groups = 4  # 16 frames, 8 a second, sampled 4 a second
        made = []
        for item in items[first : first + groups]:
            assert item.extent is not None
            pixels = engine._running.arena.read(item.extent)
            made.append(values_of([view_arrays(item.arrays, pixels)]))
            rows, columns = grid_of(item.metadata)[1:]
        at = list(range(first, first + groups))
        found.append(Visual(kind, torch.cat(made), [groups, rows, columns], seconds, at))
        first += groups
    assert first == len(items)
    return found


def model_inputs(
    reference: Reference, ids: Sequence[int], visuals: Sequence[Visual]
) -> dict[str, Any]:
    """Return the inputs of transformers' model, besides the pixels."""
    config = reference.model.config
    tokens = torch.tensor([list(ids)])
    kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
    inputs: dict[str, Any] = {"input_ids": tokens, "mm_token_type_ids": kinds}
    for kind in ("image", "video"):
        grids = [each.grid for each in visuals if each.kind == kind]
        if grids:
            inputs[f"{kind}_grid_thw"] = torch.tensor(grids)
    seconds = [each.seconds for each in visuals if each.kind == "video"]
    if seconds and config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return inputs


async def generate_video(engine: Engine, reference: Reference, ask: VideoAsk) -> list[int]:
    """Return the tokens of transformers' `generate`, for the frames in the engine's arena."""
    assert engine._running is not None
    prompt = engine.preprocessor.render(ask.messages)
    prepared = await engine._running.media.prepare(prompt, ask.references)
    visuals = visuals_of(engine, ask, prepared.items)
    inputs = model_inputs(reference, prepared.token_ids, visuals)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if values := [each.values for each in visuals if each.kind == kind]:
            inputs[name] = torch.cat(values)
    prepared.lease.release()
    with torch.inference_mode():
        out = reference.model.generate(
            **inputs, do_sample=False, eos_token_id=None, max_new_tokens=ask.count
        )
    tokens: list[int] = out[0, len(prepared.token_ids) :].tolist()
    return tokens


def patches_of(frames: Sequence[Image.Image], patch: int) -> np.ndarray[Any, Any]:
    """Return the bytes of frames as transformers' video processor orders them, [patches, patch values]."""
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
    video = pixels.permute(0, 3, 1, 2)[None]
    rows, columns = video.shape[-2] // patch, video.shape[-1] // patch
    cut = video.reshape(1, len(frames) // 2, 2, 3, rows // 2, 2, patch, columns // 2, 2, patch)
    cut = cut.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return cut.reshape(len(frames) // 2 * rows * columns, -1).numpy()
