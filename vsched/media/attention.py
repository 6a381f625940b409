"""Attention spans of images: the tokens of an image that attend to each other, if a request says which."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.errors import RequestRefused, limit_message
from vsched.media.embeddings import ImageReference, SpannedImage, UnspannedReference
from vsched.media.measure import blame, is_video, noun_of
from vsched.types import ModelInfo, Spans


def split_attention(
    images: Sequence[ImageReference], info: ModelInfo
) -> tuple[list[UnspannedReference], list[Spans | None]]:
    """Return the references without their attention spans, and the spans of each.

    Raises:
        RequestRefused: If the model's attention takes no spans, or an item is a video.
    """
    references: list[UnspannedReference] = []
    attention: list[Spans | None] = []
    for index, image in enumerate(images):
        if not isinstance(image, SpannedImage):
            references.append(image)
            attention.append(None)
            continue
        if info.prompt_atomic:
            problem = "the model's attention is bidirectional within the whole prompt"
        elif not info.item_atomic:
            problem = "the model's attention is causal"
        elif is_video(image):
            problem = "the frames of videos take no spans"
        else:
            references.append(image.image)
            attention.append(image.attention)
            continue
        refusal = RequestRefused(
            f"attention_spans cannot be set: {problem}. Remedy: leave attention_spans out.",
            code="attention_spans_not_taken",
        )
        raise blame(refusal, index, noun_of(image.image))
    return references, attention


def place_attention(spans: Spans, runs: Spans, index: int) -> Spans:
    """Return the positions of an image's attention spans in the prompt; `runs` are those of its tokens.

    Raises:
        RequestRefused: If a span is empty, overlaps the one before, or is not within consecutive tokens.
    """
    placed: list[tuple[int, int]] = []
    least = 0
    for start, stop in spans:
        first = 0  # of the run's tokens
        for begin, end in runs:
            last = first + end - begin
            if max(first, least) <= start < stop <= last:
                placed.append((begin + start - first, begin + stop - first))
                break
            first = last
        else:
            lengths = [end - begin for begin, end in runs]
            message = limit_message(
                "an attention span is out of bounds",
                value=[start, stop],
                limit=f"ascending spans within the image's {sum(lengths)} tokens"
                + (f", in rows of {max(lengths)}" if len(lengths) > 1 else ""),
                remedy="send spans [start, stop) of the image's own tokens, numbered from 0",
            )
            raise blame(RequestRefused(message, code="attention_spans_invalid"), index)
        least = stop
    return tuple(placed)
