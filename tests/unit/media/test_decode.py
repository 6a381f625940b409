from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.each_case import each_case
from tests.programs import printed_by
from tests.unit.media.fakes import image_bytes
from vsched.errors import RequestRefused
from vsched.media.decode import decode, inspect
from vsched.media.formats import FORMATS

LIMITS = 1_000_000


def size_of(encoded: bytes) -> tuple[int, int]:
    header = inspect(encoded, LIMITS)
    return header.width, header.height


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 64)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@each_case("kind", FORMATS.values())
def test_decode_reads_the_formats_and_refuses_a_truncated_file(kind: str) -> None:
    """A 400 without paths, addresses or reprs."""
    encoded = image_bytes(24, 16, value=200, kind=kind)
    assert size_of(encoded) == (24, 16)
    image = decode(encoded, LIMITS)
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert abs(int(np.asarray(image)[0, 0, 0]) - 200) < 4
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    encoded = saved(Image.fromarray(noise), kind)
    with pytest.raises(RequestRefused) as caught:
        decode(encoded[: len(encoded) // 2], LIMITS)
    assert caught.value.status == 400
    assert "0x" not in caught.value.message


@each_case("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_decode_turns_odd_modes_into_rgb(mode: str) -> None:
    image = decode(saved(Image.new(mode, (9, 5)), "PNG"), LIMITS)
    assert (image.mode, image.size) == ("RGB", (9, 5))


def test_decode_composites_transparency_on_white() -> None:
    """Of an alpha channel, and of a colour of a palette."""
    picture = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (9, 9, 9, 255))
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.putpixel((1, 0), 1)
    files = [saved(palette, kind, transparency=0) for kind in ("PNG", "GIF")]
    for encoded in (saved(picture, "PNG"), *files):
        pixels = np.asarray(decode(encoded, LIMITS))
        assert pixels.tolist() == [[[255, 255, 255], [9, 9, 9]]]


@each_case("kind", ["JPEG", "PNG", "WEBP"])
def test_decode_turns_the_image_upright(kind: str) -> None:
    picture = Image.new("RGB", (32, 16), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp)
    only_xmp = {"pnginfo": text} if kind == "PNG" else {"xmp": xmp.encode()}
    for metadata in ({"exif": exif}, only_xmp):
        encoded = saved(picture, kind, **metadata)
        assert size_of(encoded) == (16, 32)
        image = np.asarray(decode(encoded, LIMITS))
        assert image.shape == (32, 16, 3)
        assert image[:12].mean() > 240
        assert image[20:].mean() < 15


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_decode_ignores_damaged_metadata() -> None:
    encoded = saved(Image.new("RGB", (8, 8)), "JPEG", exif=b"Exif\0\0MM\0*garbage")
    assert decode(encoded, LIMITS).size == (8, 8)


def gif_with_frame(width: int, height: int) -> bytes:
    """A GIF of 8 x 6 pixels whose frame claims another size."""
    encoded = bytearray(image_bytes(8, 6, kind="GIF"))
    at = encoded.index(b"\x2c\x00\x00\x00\x00") + 5
    encoded[at : at + 4] = struct.pack("<HH", width, height)
    return bytes(encoded)


def bmp_with(at: int, content: bytes, *, mode: str = "RGB") -> bytes:
    encoded = bytearray(image_bytes(8, 8, kind="BMP", mode=mode))
    encoded[at : at + len(content)] = content
    return bytes(encoded)


NO_IMAGES = [
    *(b"", b"x", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8 ", bytes(999)),
    *(png_with_size(*size) for size in ((0, 5), (5, 0), (0, 0))),
    # Pillow decodes runs in Python, row by row, for as long as the header says.
    bmp_with(30, struct.pack("<I", 1), mode="L"),
    # The image that was checked must be the one that libjpeg decodes: here it has no scan.
    image_bytes(16, 8, kind="JPEG").partition(b"\xff\xda")[0],
]
BOMBS = [
    *(png_with_size(*size) for size in ((1000, 1001), (20_000, 10_000), (60_000, 60_000))),
    *(bmp_with(18, struct.pack("<ii", 20_000, y)) for y in (20_000, -20_000, 2**31 - 1)),
    gif_with_frame(60_000, 60_000),
]


@each_case(
    ("encoded", "status", "text"),
    [
        *((encoded, 400, "cannot be decoded") for encoded in NO_IMAGES),
        # The memory that other formats need was not measured.
        *(
            (image_bytes(16, 16, kind=kind), 400, "not a PNG, JPEG, WEBP, GIF or BMP")
            for kind in ("TIFF", "ICO", "PPM", "DIB")
        ),
        *((encoded, 413, r"limit 1000000 pixels.*image_pixels_max") for encoded in BOMBS),
    ],
)
def test_inspect_refuses_bombs_and_others_by_header(encoded: bytes, status: int, text: str) -> None:
    """The size is checked before any pixel is decoded; exactly the limit is accepted."""
    with pytest.raises(RequestRefused, match=text) as caught:
        inspect(encoded, LIMITS)
    assert caught.value.status == status
    assert size_of(png_with_size(1000, 1000)) == (1000, 1000)


@each_case(
    ("kind", "mode"),
    [("PNG", "RGB"), ("PNG", "P"), ("WEBP", "RGBA"), ("GIF", "L"), ("GIF", "RGBA")],
)
def test_the_first_frame_of_an_animation_is_the_image(kind: str, mode: str) -> None:
    """Even if later ones are damaged."""
    frames = [Image.new("RGB", (8, 6), (value,) * 3).convert(mode) for value in (204, 102, 0)]
    options = {"lossless": True} if kind == "WEBP" else {}
    encoded = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(encoded)) as opened:
        assert getattr(opened, "n_frames", 1) == 3
    assert inspect(encoded, LIMITS).width == 8
    for file in (encoded, encoded[:-20] if kind != "WEBP" else encoded):
        pixels = np.asarray(decode(file, LIMITS))
        assert pixels.shape == (6, 8, 3)
        assert set(pixels.ravel()) == {204}


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
    expected = "413 the image has too many pixels: value over the decoder's own bound"
    assert printed_by(WARNED_OF).startswith(expected)


def test_inspect_holds_webp_to_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.media.decode.WEBP_PIXELS_MAX", 10_000)
    assert size_of(image_bytes(100, 100, kind="WEBP")) == (100, 100)
    with pytest.raises(RequestRefused, match=r"value 101x100, limit .*10000 of a WEBP"):
        inspect(image_bytes(101, 100, kind="WEBP"), LIMITS)


def test_decode_in_strips_equals_decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (37, 13, 4), dtype=np.uint8)
    encoded = saved(Image.fromarray(noise), "PNG")
    whole = np.asarray(decode(encoded, LIMITS))
    monkeypatch.setattr("vsched.media.decode.STRIP_PIXELS", 40)
    assert np.array_equal(np.asarray(decode(encoded, LIMITS)), whole)
    background = Image.new("RGBA", (13, 37), (255, 255, 255, 255))
    expected = Image.alpha_composite(background, Image.fromarray(noise)).convert("RGB")
    assert np.array_equal(whole, np.asarray(expected))


def test_decoded_image_is_that_of_its_header() -> None:
    """Transparency that is found after the pixels would cost memory outside of the estimate."""
    plain = image_bytes(8, 8, value=0)
    late = plain.replace(chunk(b"IEND", b""), chunk(b"tRNS", bytes(6)) + chunk(b"IEND", b""))
    assert late != plain
    assert not inspect(late, LIMITS).storage.transparent
    assert not np.asarray(decode(late, LIMITS)).any()
