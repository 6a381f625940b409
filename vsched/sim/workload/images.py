"""Images of a simulated workload: real PNG files, small, each of a colour of its own."""

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
"""The side of a square in pixels: an image of n tokens is a strip of n squares."""
HOST = "http://images.invalid/"
"""The URLs of images that are not sent along; fetching them is simulated, too."""


class Appearance(NamedTuple):
    """What an encoder must find in the pixels of an image."""

    colour: tuple[int, int, int]
    tokens: int


def appearance_of(image: Image) -> Appearance:
    """Return what an image looks like."""
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
    """Return the key that a server knows an image by."""
    return item_key(settings_digest=SETTINGS_DIGEST, cache_salt=tenant, encoded=encoded(image))


@lru_cache(maxsize=512)
def data_url(image: Image) -> str:
    """Return an image as a reference that brings it along."""
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def remote_url(image: Image) -> str:
    """Return a reference to an image somewhere else."""
    return f"{HOST}{image.key}/{image.tokens}.png"


def image_at(url: str) -> Image:
    """Return the image that `remote_url` names."""
    key, _, file = url.removeprefix(HOST).rpartition("/")
    return Image(key, int(file.removesuffix(".png")))
