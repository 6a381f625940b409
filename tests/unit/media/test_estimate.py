"""Estimates of an image's memory before decoding are close upper bounds."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.each_case import each_case
from tests.programs import ended
from tests.workers.properties import thorough
from vsched.config import Config
from vsched.config.checks import decode_bytes_needed
from vsched.config.loading import load_config
from vsched.errors import ConfigError
from vsched.media.decode import WEBP_PIXELS_MAX, inspect
from vsched.media.estimate import Storage, coefficient_bytes, decode_bytes, preprocess_bytes
from vsched.types import ArraySpec
from vsched.worker.contract import ImagePlan

LIMITS = 10**6
MEBIBYTE = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "every"), [(1100, 800, 5), *thorough((1100, 800, 1), (300, 2000, 1))]
)
def test_estimate_bounds_the_measured_memory(width: int, height: int, every: int) -> None:
    """Formats and modes, decoded alone and processed; memory is measured in a process of its own."""
    # Freed memory returns to the system at once, or the next case would grow into it unseen.
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = ("-m", "tests.unit.media.memory_probe", width, height, every)
    run = ended(*command, variables=returned)
    assert run.returncode == 0, run.stderr
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(cases) == {1: 53, 5: 13}[every]
    for case in cases:
        assert case["measured"] <= case["estimate"] + MEBIBYTE, case
        assert case["estimate"] <= 2 * case["measured"] + 4 * MEBIBYTE, case


@each_case(
    ("progressive", "subsampling", "found"),
    [(False, 2, 0), (True, 0, 104 * 64 * 3 * 2), (True, 2, 112 * 64 * 2 * 3 // 2)],
)
def test_inspect_reports_coefficients(progressive: bool, subsampling: int, found: int) -> None:
    """A progressive JPEG is decoded from 2 bytes a sample of the whole image."""
    buffer = io.BytesIO()
    image = Image.new("RGB", (100, 60))
    image.save(buffer, "JPEG", progressive=progressive, subsampling=subsampling)
    assert inspect(buffer.getvalue(), LIMITS).storage.coefficient_bytes == found


def frame_and_scan(
    *, marker: int = 0xC0, scanned: int = 3, size: tuple[int, int] = (16, 8)
) -> bytes:
    components = bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    height, width = size[1].to_bytes(2, "big"), size[0].to_bytes(2, "big")
    frame = b"\x08" + height + width + b"\x03" + components
    scan = bytes([scanned]) + bytes(2 * scanned + 3)
    segments = ((marker, frame), (0xDA, scan))
    return b"".join(
        bytes([0xFF, kind]) + (len(data) + 2).to_bytes(2, "big") + data for kind, data in segments
    )


COMMENT = b"\xff\xfe\x00\x10\xff\xda\x00\x0c\x03aaaaaaaaa"
"""A comment that looks like a scan of all components."""


@each_case(
    ("rest", "coefficients"),
    [
        (frame_and_scan(), 0),
        (frame_and_scan(scanned=1), 16 * 8 * 3 * 2),
        (frame_and_scan(marker=0xC2), 16 * 8 * 3 * 2),
        (frame_and_scan(marker=0xCA), 16 * 8 * 3 * 2),
        (COMMENT + b"junk\xff\x00\xff\xd0\xff\xff" + frame_and_scan(scanned=1), 768),
        (frame_and_scan(marker=0xC2)[:19] + COMMENT + frame_and_scan(marker=0xC2)[19:], 768),
        *(
            (rest, None)
            for rest in (
                *(b"", b"\xff\xd9" + frame_and_scan(), b"\xff\xe0\x00\x01" + frame_and_scan()),
                *(frame_and_scan()[19:], frame_and_scan()[:21]),
                *(frame_and_scan(size=size) for size in ((16, 9), (60000, 60000))),
            )
        ),
    ],
)
def test_coefficients_follow_the_markers(rest: bytes, coefficients: int | None) -> None:
    """As libjpeg reads them: the first scan decides, fill and stuffing are passed over, segments are skipped.

    Another size or none is refused: the decoder must allocate for the size that was checked.
    """
    refused = pytest.raises(ValueError, match="no ")
    with nullcontext() if coefficients is not None else refused:
        assert coefficient_bytes(b"\xff\xd8" + rest, 16, 8) == coefficients


def test_processing_memory_grows_with_the_result() -> None:
    plain = Storage(kind="PNG", mode="RGB", transparent=False, turned=False, encoded_bytes=0)
    specs = [ArraySpec("pixels", "float32", (count, 1176)) for count in (4, 200 * 200)]
    small, large = (preprocess_bytes(100, 100, plain, ImagePlan((spec,), 1)) for spec in specs)
    assert small >= 4 * 100 * 100
    assert large - small >= 2 * (200 * 200 - 4) * 1176 * 4
    reported = preprocess_bytes(100, 100, plain, ImagePlan((specs[0],), 1, work_bytes=10**9))
    assert reported >= 10**9 + 4 * 100 * 100, "the plan's bytes, if they are more"


LEGAL = Config().media


@given(
    st.integers(1, 65535),
    st.integers(1, 65535),
    st.builds(
        Storage,
        kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
        mode=st.sampled_from(["1", "L", "P", "LA", "I;16", "RGB", "RGBA", "CMYK"]),
        transparent=st.booleans(),
        turned=st.booleans(),
        encoded_bytes=st.just(LEGAL.image_bytes_max),
    ),
    st.sampled_from([100, 10**6, LEGAL.image_pixels_max]),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=300)
def test_budget_fits_all_images(width: int, height: int, storage: Storage, pixels_max: int) -> None:
    """The smallest budget that the configuration accepts can decode any image within the limits."""
    media = msgspec.structs.replace(LEGAL, image_pixels_max=pixels_max)
    limit = min(WEBP_PIXELS_MAX, pixels_max) if storage.kind == "WEBP" else pixels_max
    width = min(width, limit)
    height = min(height, limit // width)
    if storage.kind == "JPEG":
        padded = -(-width // 32) * 32 * -(-height // 32) * 32
        coefficients = padded * 2 * {"L": 1, "CMYK": 4}.get(storage.mode, 3)
        storage = replace(storage, coefficient_bytes=coefficients)
    assert decode_bytes(width, height, storage) <= decode_bytes_needed(media)


def test_configuration_refuses_a_budget_for_smaller_images_only() -> None:
    assert decode_bytes_needed(LEGAL) <= LEGAL.decode_bytes, "the default admits all"
    remedy = "Remedy: raise media.decode_bytes, or lower media.image_pixels_max"
    words = f"^media.decode_bytes: too small.*value 536870912, limit at least 87.*{remedy}"
    with pytest.raises(ConfigError, match=words):
        load_config(None, sets=["media.decode_bytes=536870912"], environ={})
    sets = ["media.decode_bytes=536870912", "media.image_pixels_max=32000000"]
    assert load_config(None, sets=sets, environ={}).config.media.decode_bytes == 536870912
