from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.unit.media.fakes import image_bytes
from vsched.errors import RequestRefused
from vsched.media.decode import decode, inspect
from vsched.media.formats import FORMATS

LIMITS = 1_000_000


def size_of(encoded: bytes) -> tuple[int, int]:
    header = inspect(encoded, LIMITS)
    return header.width, header.height


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 64)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", FORMATS.values())
def test_decode_reads_the_formats(kind: str) -> None:
    encoded = image_bytes(24, 16, value=200, kind=kind)
    assert size_of(encoded) == (24, 16)
    image = decode(encoded, LIMITS)
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert abs(int(np.asarray(image)[0, 0, 0]) - 200) < 4


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "DIB"])
def test_decode_refuses_other_formats(kind: str) -> None:
    """Their memory needs were not measured."""
    with pytest.raises(RequestRefused, match="not a PNG, JPEG, WEBP, GIF or BMP"):
        inspect(image_bytes(16, 16, kind=kind), LIMITS)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_decode_turns_odd_modes_into_rgb(mode: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (9, 5)).save(buffer, "PNG")
    image = decode(buffer.getvalue(), LIMITS)
    assert (image.mode, image.size) == ("RGB", (9, 5))


def test_decode_composites_transparency_on_white() -> None:
    buffer = io.BytesIO()
    picture = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (10, 20, 30, 255))
    picture.save(buffer, "PNG")
    pixels = np.asarray(decode(buffer.getvalue(), LIMITS))
    assert pixels.tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_decode_composites_palette_transparency_on_white(kind: str) -> None:
    buffer = io.BytesIO()
    picture = Image.new("P", (2, 1))
    picture.putpalette([0, 0, 0, 9, 9, 9])
    picture.putpixel((1, 0), 1)
    picture.save(buffer, kind, transparency=0)
    pixels = np.asarray(decode(buffer.getvalue(), LIMITS))
    assert pixels.tolist() == [[[255, 255, 255], [9, 9, 9]]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_decode_turns_the_image_upright(kind: str) -> None:
    picture = Image.new("RGB", (32, 16), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    picture.save(buffer, kind, exif=exif)
    assert size_of(buffer.getvalue()) == (16, 32)
    image = np.asarray(decode(buffer.getvalue(), LIMITS))
    assert image.shape == (32, 16, 3)
    assert image[:12].mean() > 240
    assert image[20:].mean() < 15


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_decode_ignores_damaged_metadata() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG", exif=b"Exif\0\0MM\0*garbage")
    assert decode(buffer.getvalue(), LIMITS).size == (8, 8)


@pytest.mark.parametrize("kind", FORMATS.values())
def test_decode_refuses_truncated_images(kind: str) -> None:
    """A 400 without paths, addresses or reprs."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind)
    encoded = buffer.getvalue()
    with pytest.raises(RequestRefused) as caught:
        decode(encoded[: len(encoded) // 2], LIMITS)
    assert caught.value.status == 400
    assert "0x" not in caught.value.message


@pytest.mark.parametrize(
    "encoded", [b"", b"x", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8 ", bytes(999)]
)
def test_inspect_refuses_input_other_than_images(encoded: bytes) -> None:
    with pytest.raises(RequestRefused, match="cannot be decoded") as caught:
        inspect(encoded, LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
def test_inspect_refuses_empty_images(width: int, height: int) -> None:
    """0xN is a 400."""
    with pytest.raises(RequestRefused) as caught:
        inspect(png_with_size(width, height), LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
def test_the_first_frame_of_an_animation_is_the_image(kind: str, mode: str) -> None:
    frames = [Image.new("RGB", (8, 6), (value,) * 3).convert(mode) for value in (204, 102, 0)]
    buffer = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(buffer.getvalue())) as opened:
        assert getattr(opened, "n_frames", 1) == 3
    assert inspect(buffer.getvalue(), LIMITS).width == 8
    pixels = np.asarray(decode(buffer.getvalue(), LIMITS))
    assert pixels.shape == (6, 8, 3)
    assert set(pixels.ravel()) == {204}


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_an_animation_whose_later_frames_are_damaged_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), (value,) * 3) for value in (200, 90)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    pixels = np.asarray(decode(buffer.getvalue()[:-20], LIMITS))
    assert set(pixels.ravel()) == {200}


@pytest.mark.parametrize(("width", "height"), [(1000, 1001), (20_000, 10_000), (60_000, 60_000)])
def test_inspect_refuses_bombs_by_their_header(width: int, height: int) -> None:
    """The size is checked before any pixel is decoded; the decoder's own warning is an error too."""
    with pytest.raises(RequestRefused, match=r"limit 1000000 pixels.*image_pixels_max") as caught:
        inspect(png_with_size(width, height), LIMITS)
    assert caught.value.status == 413


WARNED_OF = """
import io
from PIL import Image
from vsched.errors import RequestRefused
from vsched.media.decode import inspect
buffer = io.BytesIO()
Image.new("1", (1500, 1000)).save(buffer, "PNG")
Image.MAX_IMAGE_PIXELS = 1_000_000
try:
    inspect(buffer.getvalue(), 10**9)
except RequestRefused as error:
    print(error.status, error.message)
"""


def test_the_decoders_own_warning_is_a_refusal() -> None:
    """In a process of its own: in this one, pytest makes errors of all warnings."""
    run = subprocess.run(
        [sys.executable, "-c", WARNED_OF], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith(
        "413 the image has too many pixels: value over the decoder's own bound"
    )


def test_inspect_accepts_exactly_the_limit() -> None:
    assert size_of(png_with_size(1000, 1000)) == (1000, 1000)
    assert decode(image_bytes(1, 1), LIMITS).size == (1, 1)


def test_inspect_holds_webp_to_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.media.decode.WEBP_PIXELS_MAX", 10_000)
    assert size_of(image_bytes(100, 100, kind="WEBP")) == (100, 100)
    with pytest.raises(RequestRefused, match=r"value 101x100, limit .*10000 of a WEBP"):
        inspect(image_bytes(101, 100, kind="WEBP"), LIMITS)


def test_decode_in_strips_equals_decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (37, 13, 4), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    whole = np.asarray(decode(buffer.getvalue(), LIMITS))
    monkeypatch.setattr("vsched.media.decode.STRIP_PIXELS", 40)
    assert np.array_equal(np.asarray(decode(buffer.getvalue(), LIMITS)), whole)
    background = Image.new("RGBA", (13, 37), (255, 255, 255, 255))
    expected = Image.alpha_composite(background, Image.fromarray(noise)).convert("RGB")
    assert np.array_equal(whole, np.asarray(expected))


def test_decode_does_what_the_header_said() -> None:
    """Transparency that is found after the pixels would cost memory outside of the estimate."""
    plain = image_bytes(8, 8, value=0)
    late = plain.replace(chunk(b"IEND", b""), chunk(b"tRNS", bytes(6)) + chunk(b"IEND", b""))
    assert late != plain
    assert not inspect(late, LIMITS).storage.transparent
    assert not np.asarray(decode(late, LIMITS)).any()


def test_inspect_refuses_a_jpeg_without_a_scan() -> None:
    """The image that was checked must be the one that libjpeg decodes."""
    encoded = image_bytes(16, 8, kind="JPEG")
    assert inspect(encoded, LIMITS).storage.kind == "JPEG"
    with pytest.raises(RequestRefused, match="cannot be decoded"):
        inspect(encoded[: encoded.index(b"\xff\xda")], LIMITS)


def gif_of(*colours: int, size: tuple[int, int] = (8, 6)) -> bytes:
    frames = [Image.new("RGB", size, (value, 0, 0)) for value in colours]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def test_a_gif_whose_frame_is_larger_than_its_screen_is_judged_by_the_frame() -> None:
    """The header claims 8 x 6 pixels, the frame 60,000 x 60,000."""
    encoded = bytearray(gif_of(200))
    at = encoded.index(b"\x2c\x00\x00\x00\x00") + 5
    encoded[at : at + 4] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(RequestRefused) as caught:
        inspect(bytes(encoded), LIMITS)
    assert caught.value.status == 413


@pytest.mark.parametrize("side", [20_000, -20_000, 2**31 - 1])
def test_a_bmp_is_judged_by_its_header(side: int) -> None:
    encoded = bytearray(image_bytes(8, 8, kind="BMP"))
    encoded[18:26] = struct.pack("<ii", 20_000, side)
    with pytest.raises(RequestRefused) as caught:
        inspect(bytes(encoded), LIMITS)
    assert caught.value.status == 413


def test_a_bmp_of_runs_is_refused() -> None:
    """Pillow decodes those in Python, row by row, for as long as the header says."""
    palette = io.BytesIO()
    Image.new("L", (8, 8)).save(palette, "BMP")
    encoded = bytearray(palette.getvalue())
    encoded[30:34] = struct.pack("<I", 1)
    with pytest.raises(RequestRefused, match="cannot be decoded") as caught:
        inspect(bytes(encoded), LIMITS)
    assert caught.value.status == 400
