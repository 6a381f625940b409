"""Upper bounds, from an image's header, of the host memory for decoding and processing it.

The allocations of Pillow, libjpeg and libwebp were measured (`tests/unit/media/test_estimate.py` measures them again):

- Pillow stores a pixel in 1, 2 or 4 bytes. Turning an image upright takes that twice; converting it takes the RGB
  copy, compositing it a strip of intermediates as well.
- A JPEG that is progressive, or has separate scans for its components, is decoded from the coefficients of the whole
  image: 2 bytes per sample. Pillow does not report the latter case, so the markers are parsed here as in libjpeg.
- A WEBP is held in two canvases, a copy and Pillow's own storage, 4 bytes per pixel each; its encoded bytes are copied
  as well.
- The processor's additional memory is proportional to its output, or given by its plan if resizing takes more;
  `ARRAYS_RATIO` is the allowance, and the checkpoints' processors are tested against it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from vsched.worker.contract import ImagePlan

STRIP_PIXELS: Final = 1_000_000
"""Pixels composited at a time."""

OVERHEAD_BYTES: Final = 2 << 20
"""Allowance for rows, code tables, metadata, and rounding by the allocator."""

EMBEDDING_BYTES: Final = 5 << 20
"""Allowance for the strips of an embedding that is checked and converted."""

ARRAYS_RATIO: Final = 2.25
"""Maximum memory of `Preprocessor.process_image` beyond the image, as a multiple of its output and including it."""

_STORED_BYTES: Final = {"1": 1, "L": 1, "P": 1, "I;16": 2}
_WEBP_BYTES: Final = 16
_STRIP_BYTES: Final = 20
"""Of a pixel, to composite it."""

# Fill bytes, stuffed zeros and markers without a segment are skipped.
_MARKER: Final = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL: Final = frozenset({0xC0, 0xC1, 0xC3, 0xC9, 0xCB})
_START_OF_SCAN: Final = 0xDA
_IMAGE_EDGES: Final = frozenset({0xD8, 0xD9})


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The decoder's storage of an image: the factors of its memory besides the size.

    Attributes:
        kind: `PNG`, `JPEG`, `WEBP`, `GIF` or `BMP`.
        mode: Pillow's image mode.
        transparent: True if it has to be composited.
        turned: True if it has to be turned upright.
        encoded_bytes: Size of the file.
        coefficient_bytes: Memory for the coefficients of the whole image in libjpeg.
    """

    kind: str
    mode: str
    transparent: bool
    turned: bool
    encoded_bytes: int
    coefficient_bytes: int = 0


def decode_bytes(width: int, height: int, storage: Storage) -> int:
    """Upper bound of the memory for `decode`, including the encoded image."""
    pixels = width * height
    pixel = _STORED_BYTES.get(storage.mode, 4)
    stored = pixels * pixel
    encoded = storage.encoded_bytes
    peak = stored + storage.coefficient_bytes
    if storage.kind == "WEBP":
        peak = max(pixels * _WEBP_BYTES + encoded, 3 * encoded)
    if storage.turned:
        peak = max(peak, 2 * stored)
    if storage.transparent:
        strip = min(pixels, max(STRIP_PIXELS, width)) * _STRIP_BYTES
        peak = max(peak, stored + 4 * pixels + strip)
    elif storage.mode != "RGB":
        peak = max(peak, stored + 4 * pixels)
    return peak + encoded + OVERHEAD_BYTES


def preprocess_bytes(width: int, height: int, storage: Storage, plan: ImagePlan) -> int:
    """Upper bound of the memory for decoding and processing an image, from its header and plan.

    Its arena space is not included. `width` and `height` are those of the upright image.
    """
    made = sum(spec.nbytes for spec in plan.arrays)
    process = 4 * width * height + max(plan.work_bytes, math.ceil(made * ARRAYS_RATIO))
    return max(
        decode_bytes(width, height, storage), process + storage.encoded_bytes + OVERHEAD_BYTES
    )


def coefficient_bytes(encoded: bytes, width: int, height: int) -> int:
    """Bytes of coefficients that libjpeg keeps for the whole image; 0 if it decodes row by row.

    Raises:
        ValueError: If the file has no frame and scan of this size.
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
        # libjpeg would allocate memory for a size other than the checked one.
        raise ValueError("no frame of this size")
    if sequential and scan[0] == len(components):
        return 0
    across = max(part[0] for part in components)
    down = max(part[1] for part in components)
    blocks = math.ceil(size[0] / (8 * across)) * math.ceil(size[1] / (8 * down))
    return blocks * sum(part[0] * part[1] for part in components) * 64 * 2
