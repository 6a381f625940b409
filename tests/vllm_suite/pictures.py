"""Replacements for the pictures that vLLM's tests download: drawn for any name, and served by the tests themselves."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

PORT = int(os.environ.get("VSCHED_SUITE_PORT", "0"))
"""Port on which vLLM's tests serve pictures; it is known before the servers start, which may fetch from it."""
SIZE = (160, 112)


@cache
def folder() -> Path:
    """Return the folder of the drawn pictures."""
    return Path(tempfile.mkdtemp(prefix="vllm-suite-"))


def draw(filename: str, s3_prefix: str | None = None) -> Path:
    """Return a picture of that name, in the mode that the name contains."""
    from PIL import Image

    path = folder() / filename
    if not path.exists():
        mode = "RGBA" if "RGBA" in filename else "L" if "Gray" in filename else "RGB"
        shade = sum(filename.encode()) % 256
        plane = Image.linear_gradient("L").resize(SIZE).point(lambda value: (value + shade) % 256)
        Image.merge(mode, [plane] * len(mode)).save(path)
    return path
