"""Messages survive encoding and decoding."""

from __future__ import annotations

import msgspec
import pytest

from vsched.api.processes.messages import ProcessMessage, Refusal, SentImage, Submit
from vsched.errors import RequestFailed, RequestRefused
from vsched.media import (
    BoundedImage,
    EmbeddedImage,
    EmbeddedVideo,
    ImageReference,
    NamedImage,
    SpannedImage,
    VideoReference,
)
from vsched.media.base64_text import TextWithBase64, base64_of
from vsched.worker.contract import PixelBounds, VideoSampling

LONG = TextWithBase64.of("data:image/png;base64,stand-in", 22, b"iVBORw0KGgo=")
BOUNDS = PixelBounds(28, 784)


def sent(reference: ImageReference) -> ImageReference:
    frame = msgspec.msgpack.encode([Submit(1, [2, 3], [SentImage.of(reference)])])
    (submit,) = msgspec.msgpack.decode(frame, type=list[ProcessMessage])
    assert isinstance(submit, Submit)
    return submit.images[0].reference


@pytest.mark.parametrize(
    "reference",
    [
        "https://example.com/a.png",
        EmbeddedImage("c2FmZQ=="),
        EmbeddedVideo("file:///a.safetensors"),
        NamedImage("a name", None),
        VideoReference("data:video/mp4;base64,AA==", VideoSampling(2.0, bounds=BOUNDS)),
        VideoReference(("data:one", LONG), VideoSampling(num_frames=4)),
        NamedImage("a name", "https://example.com/a.png"),
        BoundedImage("https://example.com/a.png", BOUNDS),
        SpannedImage(EmbeddedImage("c2FmZQ=="), ((0, 3), (5, 8))),
        BoundedImage(NamedImage("a name", "https://example.com/a.png"), BOUNDS),
    ],
    ids=[
        "url",
        "embedding",
        "embedded video",
        "name",
        "video",
        "frames",
        "named",
        "bounded",
        "spanned",
        "bounded and named",
    ],
)
def test_messages_bring_every_form_of_an_image(reference: ImageReference) -> None:
    assert sent(reference) == reference


@pytest.mark.parametrize(
    "wrap", [str, EmbeddedImage, EmbeddedVideo, lambda url: NamedImage("name", url)]
)
def test_messages_bring_long_base64_as_bytes(wrap: object) -> None:
    """It is kept apart from its text: as a text it would be copied under the GIL."""
    reference = LONG if wrap is str else wrap(LONG)  # type: ignore[operator]
    found = sent(reference)
    text = found if isinstance(found, str) else getattr(found, "source", None) or found.reference  # type: ignore[union-attr]
    assert isinstance(text, TextWithBase64)
    assert (text, base64_of(text, 22)) == (LONG, LONG.base64)


@pytest.mark.parametrize(
    "error",
    [
        RequestRefused("full. Remedy: wait.", code="queue_full", status=429, retry_after_s=1),
        RequestRefused("elsewhere", code="redirected", status=307, location="http://other"),
        RequestFailed("stopping", code="stopping", status=503, retry_after_s=5),
    ],
)
def test_messages_carry_errors_with_all_fields_for_clients(
    error: RequestRefused | RequestFailed,
) -> None:
    frame = msgspec.msgpack.encode(Refusal.of(7, error))
    refusal = msgspec.msgpack.decode(frame, type=Refusal)
    assert refusal.number == 7
    assert type(refusal.error) is type(error)
    assert vars(refusal.error) == vars(error)


def test_messages_report_nothing_of_a_mistake() -> None:
    error = Refusal.of(7, KeyError("/secret/path")).error
    assert isinstance(error, RequestFailed)
    assert error.message == "the server made a mistake"
