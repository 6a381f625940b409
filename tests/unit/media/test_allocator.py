"""Large images are freed block by block, so that the GIL is never held for long."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from vsched.media.allocator import free_image
from vsched.media.decode import DecodeLimits, decode

CORE: Any = vars(Image)["core"]
LIMITS = DecodeLimits(image=1 << 24, webp=1 << 24)
BLOCK_PIXELS = 4 << 20
"""A block of Pillow's is 16 MiB; a pixel has 4 bytes."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call that frees blocks, the number of blocks that Pillow's pool kept."""
    calls: list[int] = []
    clear = CORE.clear_cache

    def record(count: int) -> None:
        calls.append(count)
        clear(count)

    monkeypatch.setattr(CORE, "clear_cache", record)
    return calls


def png(mode: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4096, 3 * BLOCK_PIXELS // 4096)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def test_a_large_image_is_freed_block_by_block(kept: list[int]) -> None:
    """Three blocks take three calls; the pool is empty afterwards, and keeps nothing of the next image."""
    image = decode(png("RGB"), LIMITS)
    assert kept == []
    free_image(image)
    assert kept[-3:] == [2, 1, 0]
    with pytest.raises(ValueError, match="closed"):
        image.getpixel((0, 0))
    Image.new("RGB", (100, 100)).close()
    assert CORE.get_stats()["blocks_cached"] == 0


def test_an_image_that_is_converted_is_freed_so_as_well(kept: list[int]) -> None:
    """A transparent picture becomes another one, and the first is as large."""
    assert decode(png("RGBA"), LIMITS).mode == "RGB"
    assert kept[-3:] == [2, 1, 0]


def test_a_small_image_is_freed_at_once(kept: list[int]) -> None:
    """With the pool, every later image would get a block cut to its size."""
    free_image(Image.new("RGB", (400, 400)))
    assert kept == []
