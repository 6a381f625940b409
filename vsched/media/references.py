"""Images and videos of a request, as a client gives them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vsched.errors import RequestRefused
from vsched.media.formats import IMAGE, IMAGE_EMBEDDING, VIDEO, VIDEO_EMBEDDING, MediaKind
from vsched.types import ModelInfo, Spans
from vsched.worker.contract import PixelBounds, VideoSampling

_URL_EDGES = "".join(map(chr, range(ord(" ") + 1)))
"""Control characters and spaces, which browsers strip from both ends of a URL."""


def scheme_of(url: str) -> str:
    """Scheme of a URL in lower case; empty if it has none."""
    head, colon, _ = url.lstrip(_URL_EDGES)[:16].partition(":")
    return head.lower() if colon else ""


@dataclass(frozen=True, slots=True)
class MediaReference:
    """An image or a video of a request; an image by its URL alone may be given as a text.

    Attributes:
        source: The URL of a file; the URLs of a video's frames; or, if it `is_embedded`, the base64 of a safetensors
            file or its URL. None for an image that was sent before with its `uuid`. Left out of the repr, because it is
            large and private.
        is_embedded: Whether the file has `embeds`, [tokens, levels * hidden size] in the served dtype or float32, and
            the model's companion tensor (`Preprocessor.companion`), such as `grid_thw`. A row has the main embedding,
            then each deepstack level. For a video, the rows of its frame groups follow each other, and another tensor
            has times (`Preprocessor.video_times`).
        uuid: A name of the image, to send only the name again; each cache salt has its own names.
        bounds: Pixel bounds for resizing an image, instead of the checkpoint's; `sampling` is for videos.
        attention: Spans of its tokens, [start, stop), that have bidirectional attention instead of all.
    """

    source: str | tuple[str, ...] | None = field(default=None, repr=False)
    is_video: bool = False
    is_embedded: bool = False
    uuid: str | None = None
    bounds: PixelBounds | None = None
    sampling: VideoSampling = field(default_factory=VideoSampling)
    attention: Spans | None = None

    @property
    def noun(self) -> str:
        """Its name in errors."""
        return "video" if self.is_video else "image"

    @property
    def kind(self) -> MediaKind:
        """The kind of its files."""
        if self.is_embedded:
            return VIDEO_EMBEDDING if self.is_video else IMAGE_EMBEDDING
        return VIDEO if self.is_video and isinstance(self.source, str) else IMAGE

    @property
    def sources(self) -> tuple[str, ...]:
        """All URLs, or the base64 of an embedding."""
        if self.source is None:
            return ()
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def held_bytes(self) -> int:
        """Bytes during preparation: the reference itself, and its decoded base64."""
        held = len(self.uuid or "")
        for source in self.sources:
            holds_file = scheme_of(source) == "data" or (self.is_embedded and not scheme_of(source))
            held += len(source) * 7 // 4 if holds_file else len(source)
        return held


ImageReference = str | MediaReference
"""An image or a video of a request; a text is the URL of an image."""


def as_reference(image: ImageReference) -> MediaReference:
    """Return an image or a video in full form."""
    return MediaReference(image) if isinstance(image, str) else image


def blame(error: RequestRefused, index: int, noun: str = "image") -> RequestRefused:
    """Add the index of the image or video, among all of the request, to an error."""
    return RequestRefused(
        f"{noun} {index}: {error.message}",
        code=error.code,
        status=error.status,
        retry_after_s=error.retry_after_s,
    )


def check_attention(reference: MediaReference, info: ModelInfo) -> None:
    """Check that a model takes the attention spans of an image, if it has any.

    Raises:
        RequestRefused: If the model's attention takes no spans, or it is a video.
    """
    if reference.attention is None:
        return
    if info.prompt_atomic:
        problem = "the model's attention is bidirectional within the whole prompt"
    elif not info.item_atomic:
        problem = "the model's attention is causal"
    elif reference.is_video:
        problem = "the frames of videos take no spans"
    else:
        return
    raise RequestRefused(
        f"attention_spans cannot be set: {problem}. Remedy: leave attention_spans out.",
        code="attention_spans_not_taken",
    )


def place_attention(spans: Spans, runs: Spans) -> Spans:
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
            raise RequestRefused.of_limit(
                "an attention span is out of bounds",
                value=[start, stop],
                limit=f"ascending spans within the image's {sum(lengths)} tokens"
                + (f", in rows of {max(lengths)}" if len(lengths) > 1 else ""),
                remedy="send spans [start, stop) of the image's own tokens, numbered from 0",
                code="attention_spans_invalid",
            )
        least = stop
    return tuple(placed)
