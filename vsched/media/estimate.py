"""How much host memory an image takes while a thread prepares it: an upper bound, from its header alone.

What Pillow, libjpeg and libwebp allocate was measured (`tests/unit/media/test_estimate.py` keeps measuring it):

- Pillow stores a pixel in 1, 2 or 4 bytes. Turning an image upright takes it twice, converting it takes the RGB copy
  and a strip of intermediates.
- A JPEG that is progressive, or whose components come in scans of their own, is decoded from the coefficients of the
  whole image: 2 bytes a sample. Pillow does not tell of the latter, so the markers are walked here as libjpeg does.
- A WEBP goes through two canvases, a copy and Pillow's own store, 4 bytes each; its encoded bytes are copied as well.
- What the processor takes beyond the image is in proportion to what it returns, or as its plan says where resizing
  takes more; `ARRAYS_RATIO` is its allowance, which the checkpoints' processors are tested against.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from vsched.worker.contract import ImagePlan

STRIP_PIXELS: Final = 1_000_000
"""Pixels that are converted in one go."""

OVERHEAD_BYTES: Final = 2 << 20
"""For rows, code tables, metadata that is kept, and what the allocator rounds up."""

EMBEDDING_BYTES: Final = 5 << 20
"""For the strips of an embedding that is checked and converted."""

ARRAYS_RATIO: Final = 2.25
"""Most that `Preprocessor.process_image` may take beyond the image, over the bytes that it returns; those included."""

_STORED_BYTES: Final = {"1": 1, "L": 1, "P": 1, "I;16": 2}
_WEBP_BYTES: Final = 16
_STRIP_BYTES: Final = 6
_STRIP_BYTES_TRANSPARENT: Final = 20

# Fill bytes, stuffed zeros and markers without a segment are passed over.
_MARKER: Final = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL: Final = frozenset({0xC0, 0xC1, 0xC3, 0xC9, 0xCB})
_START_OF_SCAN: Final = 0xDA
_IMAGE_EDGES: Final = frozenset({0xD8, 0xD9})


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How the decoder keeps an image: what decides over its memory besides its size.

    Attributes:
        kind: `PNG`, `JPEG`, `WEBP`, `GIF` or `BMP`.
        mode: The mode that Pillow gives it.
        transparent: Whether it has to be composited.
        turned: Whether it has to be turned upright.
        encoded_bytes: Size of the file.
        coefficient_bytes: What libjpeg keeps of the whole image.
    """

    kind: str
    mode: str
    transparent: bool
    turned: bool
    encoded_bytes: int
    coefficient_bytes: int = 0


def decode_bytes(width: int, height: int, storage: Storage) -> int:
    """Return an upper bound of what `decode` takes, the encoded image included."""
    pixels = width * height
    pixel = _STORED_BYTES.get(storage.mode, 4)
    stored = pixels * pixel
    encoded = storage.encoded_bytes
    peak = stored + storage.coefficient_bytes
    if storage.kind == "WEBP":
        peak = max(pixels * _WEBP_BYTES + encoded, 3 * encoded)
    if storage.turned:
        peak = max(peak, 2 * stored)
    if storage.mode != "RGB" or storage.transparent:
        strip = min(pixels, max(STRIP_PIXELS, width))
        strip *= _STRIP_BYTES_TRANSPARENT if storage.transparent else pixel + _STRIP_BYTES
        peak = max(peak, stored + 4 * pixels + strip)
    return peak + encoded + OVERHEAD_BYTES


def preprocess_bytes(width: int, height: int, storage: Storage, plan: ImagePlan) -> int:
    """Return an upper bound of what decoding and processing an image takes, from header and plan.

    Its place in the arena is not part of it. `width` and `height` are those of the upright image.
    """
    made = sum(spec.nbytes for spec in plan.arrays)
    process = 4 * width * height + max(plan.work_bytes, math.ceil(made * ARRAYS_RATIO))
    return max(
        decode_bytes(width, height, storage), process + storage.encoded_bytes + OVERHEAD_BYTES
    )


def coefficient_bytes(encoded: bytes, width: int, height: int) -> int:
    """Return the bytes of coefficients that libjpeg keeps of the whole image; 0 when it goes row by row.

    Raises:
        ValueError: When there is no frame and scan of this size in the file.
    """
    frame = b""
    sequential = True
    position = 2
    while found := _MARKER.search(encoded, position):
        marker = found[1][0]
        start = found.end() + 2
        position = found.end() + int.from_bytes(encoded[found.end() : start], "big")
        if position < start or marker in _IMAGE_EDGES:
            break
        if marker in _FRAMES:
            frame = encoded[start:position]
            sequential = marker in _SEQUENTIAL
        elif marker == _START_OF_SCAN:
            scan = encoded[start:position]
            return _coefficients(frame, scan, (width, height), sequential=sequential)
    raise ValueError("no scan")


def _coefficients(frame: bytes, scan: bytes, size: tuple[int, int], *, sequential: bool) -> int:
    components = [(part >> 4, part & 15) for part in frame[7::3]]
    found = int.from_bytes(frame[3:5], "big"), int.from_bytes(frame[1:3], "big")
    if found != size or not scan or not all(min(part) > 0 for part in components):
        # libjpeg would allocate for another size than the one that was judged.
        raise ValueError("no frame of this size")
    if sequential and scan[0] == len(components):
        return 0
    across = max(part[0] for part in components)
    down = max(part[1] for part in components)
    blocks = math.ceil(size[0] / (8 * across)) * math.ceil(size[1] / (8 * down))
    return blocks * sum(part[0] * part[1] for part in components) * 64 * 2
