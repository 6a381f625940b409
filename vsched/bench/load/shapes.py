"""Cases of the load generator and their sizes; quick to import, for the command line."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Case(enum.StrEnum):
    """Contents of the requests; greedy, except `sampled`: `text` with the server's defaults.

    `video` needs PyAV to draw the files.
    """

    TEXT = "text"
    SAMPLED = "sampled"
    IMAGE = "image"
    SAME_IMAGE = "same-image"
    CONVERSATION = "conversation"
    VIDEO = "video"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Request sizes of a case; `turns` is 1 except for conversations. A video has half the side of an image."""

    words: int
    output_tokens: int
    image_pixels: int
    turns: int = 1


_DEFAULT_SIZES = {
    Case.TEXT: (120, 128),
    Case.SAMPLED: (120, 128),
    Case.IMAGE: (100, 64),
    Case.SAME_IMAGE: (100, 64),
    Case.CONVERSATION: (30, 32),
    Case.VIDEO: (100, 64),
}


def shape_of(
    case: Case, *, words: int | None, output_tokens: int | None, image_pixels: int, turns: int
) -> Shape:
    """Return the sizes of a case: its defaults with the given replacements."""
    default_words, default_output_tokens = _DEFAULT_SIZES[case]
    return Shape(
        words=default_words if words is None else words,
        output_tokens=default_output_tokens if output_tokens is None else output_tokens,
        image_pixels=image_pixels,
        turns=turns if case is Case.CONVERSATION else 1,
    )
