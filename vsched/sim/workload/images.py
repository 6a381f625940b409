"""Images of a simulated workload: small real PNG files, each in its own colour."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from PIL import Image as PillowImage

from vsched.media.keys import item_key
from vsched.sim.workload.requests import Image

SETTINGS_DIGEST = b"simulated"
SIDE = 4
"""Side of a square in pixels: an image of n tokens is a strip of n squares."""
HOST = "http://images.invalid/"
"""Base URL of remote images; fetching them is simulated as well."""


class Appearance(NamedTuple):
    """Expected pixels of an image."""

    colour: tuple[int, int, int]
    tokens: int


def appearance_of(image: Image) -> Appearance:
    """Return the expected pixels of an image."""
    red, green, blue = blake2b(f"{image.key} {image.tokens}".encode(), digest_size=3).digest()
    return Appearance((red, green, blue), image.tokens)


@lru_cache(maxsize=512)
def encoded(image: Image) -> bytes:
    """Return the PNG file of an image."""
    file = io.BytesIO()
    size = (SIDE * image.tokens, SIDE)
    PillowImage.new("RGB", size, appearance_of(image).colour).save(file, "PNG", compress_level=1)
    return file.getvalue()


@lru_cache(maxsize=512)
def key_of(image: Image, tenant: str) -> bytes:
    """Return a server's cache key of an image."""
    return item_key(settings_digest=SETTINGS_DIGEST, cache_salt=tenant, encoded=encoded(image))


@lru_cache(maxsize=512)
def data_url(image: Image) -> str:
    """Return an image as a data URL."""
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def remote_url(image: Image) -> str:
    """Return the URL of a remote image."""
    return f"{HOST}{image.key}/{image.tokens}.png"


def image_at(url: str) -> Image:
    """Return the image at a `remote_url`."""
    key, _, file = url.removeprefix(HOST).rpartition("/")
    return Image(key, int(file.removesuffix(".png")))
