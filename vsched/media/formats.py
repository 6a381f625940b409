"""Accepted image formats."""

from __future__ import annotations

from typing import Final

FORMATS: Final = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
"""Accepted image formats: media types and Pillow's names.

TIFF is not accepted: its header does not bound the memory of opening it, since Pillow copies the value of every tag
(65,535 tags may point to the same 20 MB) and follows chains of directories, and its codecs allocate tiles and
dictionaries of any size. It needs a parser of the first directory that bounds all of these.
"""
