"""Decode one image from untrusted bytes.

The size is read from the header and checked before pixels are decoded. Only the formats of `FORMATS` are opened, and
only the first frame of an animation is read.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Final

from PIL import ExifTags, Image

from vsched.errors import RequestRefused, limit_message, one_of
from vsched.media.estimate import STRIP_PIXELS, Storage, coefficient_bytes
from vsched.media.formats import FORMATS

WEBP_PIXELS_MAX: Final = 16_000_000
"""Maximum pixels of a WEBP, whose decoder takes four times the memory of others."""
_ORIENTATIONS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})

# Pillow warns about a decompression bomb at one size and raises at twice that. Here the warning is an error as well;
# the filter is set once because `warnings.catch_warnings` is not thread-safe. Pillow's other warnings are about
# metadata, and would let clients write to the log.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\..*")
warnings.simplefilter("error", Image.DecompressionBombWarning)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Facts from an image's header: its upright size, and its storage in the decoder."""

    width: int
    height: int
    storage: Storage


def _invalid() -> RequestRefused:
    # The decoder's message may contain addresses and reprs, so it is not sent to the client.
    return RequestRefused(
        f"the image cannot be decoded: it is truncated, damaged, or not a {one_of(FORMATS.values())}. "
        "Remedy: send a complete image in one of these formats.",
        code="image_invalid",
    )


def _too_many_pixels(value: str, pixels_max: int) -> RequestRefused:
    message = limit_message(
        "the image has too many pixels",
        value=value,
        limit=f"{pixels_max} pixels ({WEBP_PIXELS_MAX} of a WEBP)",
        remedy="send a smaller image or raise media.image_pixels_max",
    )
    return RequestRefused(message, code="image_too_large", status=413)


def _open(encoded: bytes, pixels_max: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(encoded), formats=tuple(FORMATS.values()))
        in_python = any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ()))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels("over the decoder's own bound", pixels_max) from None
    except Exception:  # noqa: BLE001 - a decoder may raise anything on hostile bytes
        raise _invalid() from None
    if in_python:
        # Pillow expands these runs in Python, row by row: a small file would keep a thread busy for minutes.
        raise _invalid()
    width, height = image.size
    if width < 1 or height < 1:
        message = limit_message(
            "the image has no pixels",
            value=f"{width}x{height}",
            limit="at least 1x1",
            remedy="send an image with pixels",
        )
        raise RequestRefused(message, code="image_invalid")
    limit = min(pixels_max, WEBP_PIXELS_MAX) if image.format == "WEBP" else pixels_max
    if width * height > limit:
        raise _too_many_pixels(f"{width}x{height}", pixels_max)
    return image


def _orientation(image: Image.Image) -> int:
    # EXIF or else XMP, as in transformers. The base class reads the header only: `getexif` of a PNG decodes its pixels.
    try:
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - hostile metadata; the image itself may be fine
        return 1
    return value if isinstance(value, int) and value in _ORIENTATIONS else 1


def _is_transparent(image: Image.Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _storage(image: Image.Image, encoded: bytes, orientation: int) -> Storage:
    kind = "JPEG" if image.format == "MPO" else str(image.format)
    try:
        coefficients = coefficient_bytes(encoded, *image.size) if kind == "JPEG" else 0
    except ValueError:
        raise _invalid() from None
    return Storage(
        kind=kind,
        mode=image.mode,
        transparent=_is_transparent(image),
        turned=orientation > 1,
        encoded_bytes=len(encoded),
        coefficient_bytes=coefficients,
    )


def has_native_header(encoded: bytes) -> bool:
    """Return True for WEBP, whose header native code (libwebp) parses; Pillow parses the others in Python."""
    return encoded.startswith(b"RIFF")


def inspect(encoded: bytes, pixels_max: int) -> ImageHeader:
    """Read an image's header without decoding pixels.

    Raises:
        RequestRefused: If it is not an image, or has another format, no pixels or too many pixels.
    """
    image = _open(encoded, pixels_max)
    orientation = _orientation(image)
    width, height = image.size
    if orientation in _SIDEWAYS:
        width, height = height, width
    return ImageHeader(width, height, _storage(image, encoded, orientation))


def decode(encoded: bytes, pixels_max: int) -> Image.Image:
    """Decode to an upright RGB image, with transparency composited on white like transformers' processors.

    Blocks: until the image is decoded; call it off the event loop.

    Raises:
        RequestRefused: As in `inspect`, and if the pixels are truncated or damaged.
    """
    image = _open(encoded, pixels_max)
    # Taken from the header, like the estimate: data after the pixels must not change it.
    orientation = _orientation(image)
    is_transparent = _is_transparent(image)
    try:
        image.load()
        # A WEBP keeps its decoder's canvases, twice the pixels, while it is alive.
        vars(image).pop("_decoder", None)
        if orientation > 1:
            image = image.transpose(_ORIENTATIONS[orientation])
        if is_transparent:
            return _composited(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception:  # noqa: BLE001 - a decoder may raise anything on hostile bytes
        raise _invalid() from None


def _composited(image: Image.Image) -> Image.Image:
    """Return an image on white; in strips, whose intermediates take less memory."""
    result = Image.new("RGB", image.size, None)
    rows = max(STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        background = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        result.paste(Image.alpha_composite(background, strip).convert("RGB"), (0, top))
    return result
