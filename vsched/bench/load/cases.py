"""Texts and images of the load generator, drawn from a seed before any measurement starts.

Text is random words, so that a prefix cache only helps with the chat template. Images are smooth
random pictures with the entropy of photographs rather than of noise. In `conversation` caching is
the point: turn k adds one new image and repeats everything before it.
"""

from __future__ import annotations

import base64
import io
import random
from typing import Any

import numpy as np
from PIL import Image

from vsched.bench.load.shapes import Case, Shape

_TEXT = (
    "river stone window garden letter bridge yellow market summer engine silver planet winter forest "
    "paper ladder candle basket harbour mirror pepper carpet island button meadow pocket lantern "
    "copper saddle violin"
)
_WORDS = _TEXT.split()
_CELL_PIXELS = 16


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
        image_seed = 0 if case is Case.SAME_IMAGE else rng.getrandbits(32)
        image = {"url": draw_image(image_seed, shape.image_pixels)}
        parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": text}]
        turns.append({"role": "user", "content": parts})
    return turns
