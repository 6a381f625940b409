"""Texts and images of the load generator, drawn from a seed before any measurement starts.

Text is random words, so that a prefix cache only helps with the chat template. Images are smooth
random pictures with the entropy of photographs rather than of noise. In `conversation` caching is
the point: turn k adds one new image and repeats everything before it.
"""

from __future__ import annotations

import base64
import importlib
import io
import random
from typing import Any

import numpy as np
from PIL import Image

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
