"""Bodies with long base64 decode to the same values as with a plain decoder."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each_case import each_case
from vsched.api import bodies, parameters
from vsched.api.bodies import extract_base64, read_request
from vsched.api.errors import ParameterRefused
from vsched.api.request_schema import ChatRequest, ImageEmbedsPart, ImagePart, ImageUrl, TextPart
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media.base64_text import TextWithBase64, base64_of
from vsched.media.sources import read_local

REPEATABLE = settings(derandomize=True, database=None, deadline=None, max_examples=50)
LONG = 80
TOKENS = 1000
BASE64 = base64.b64encode(bytes(range(200)) * 2).decode()
OTHER = base64.b64encode(bytes(reversed(range(200)))).decode()
LINES = base64.encodebytes(bytes(range(200)) * 2).decode()
URL = f"data:image/png;base64,{BASE64}"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL_BYTES", 0)
    monkeypatch.setattr(bodies, "LONG_BYTES", LONG)


def body_of(*parts: object, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def embeds(data: str) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": {"data": data}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def read(body: dict[str, Any] | bytes) -> ChatRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request([raw], ChatRequest, TOKENS)


def sent_texts(request: ChatRequest) -> Iterator[str]:
    for message in request.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, ImageEmbedsPart):
                yield part.image_embeds.data
            elif isinstance(part, ImagePart):
                yield (
                    part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
                ) or ""
            elif isinstance(part, TextPart):
                yield part.text


def whole(sent: str) -> str:
    """The text as the client sent it."""
    if not isinstance(sent, TextWithBase64):
        return sent
    return sent[: sent.start] + base64_of(sent, sent.start).decode()


def test_long_base64_is_kept_next_to_its_text() -> None:
    plain = {"type": "image_url", "image_url": URL}
    request = read(body_of(image(URL), text("a"), plain, embeds(BASE64), image(URL[:60])))
    sent = list(sent_texts(request))
    assert [isinstance(one, TextWithBase64) for one in sent] == [True, False, True, True, False]
    assert [whole(one) for one in sent] == [URL, "a", URL, BASE64, URL[:60]]


def test_equal_images_stay_equal() -> None:
    """So that identical images are recognized without comparing megabytes."""
    one, same, other = sent_texts(read(body_of(image(URL), image(URL), image(URL[:-400] + OTHER))))
    assert one == same
    assert one != other
    assert len({one, same, other}) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 50, 10_000])
def test_escaped_slashes_are_slashes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PHP writes them, at any piece boundary."""
    monkeypatch.setattr(bodies, "_PIECE_BYTES", size)
    url = "data:image/png;base64," + "ab/+//cd" * 20
    body = json.dumps(body_of(image(url))).encode().replace(b"/", b"\\/")
    [sent] = sent_texts(read(body))
    assert isinstance(sent, TextWithBase64)
    assert whole(sent) == url


@pytest.mark.parametrize("size", [1, 5, 6, 7, 50, 10_000])
@pytest.mark.parametrize(
    ("url", "escapes"),
    [
        (f"data:image/png;base64,{LINES}", {}),
        (f"data:image/png;base64,{LINES}".replace("\n", "\r\n"), {}),
        (f"data:image/png;base64,{LINES}".replace("\n", " \t\f"), {}),
        (URL + "++==", {"+": "\\u002B", "=": "\\u003d", "/": "\\/"}),
        (URL + "++==", {"+": "\\u002b", "=": "\\u003D", "/": "\\u002F"}),
        (f"data:image/png;charset=utf-8;name={'é' * 500};base64,{BASE64}", {"é": "\\u00e9"}),
        (f"\n data:;BASE64,\n{LINES}", {}),
        (f"data:image/png;base64,{quote(LINES, safe='')}", {}),
        (f"data:image/png,{quote(bytes(200))}", {}),
    ],
)
def test_data_urls_of_other_forms_are_kept_beside(
    size: int, url: str, escapes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIME line breaks, and the escapes of .NET, Gson and PHP, at any position in a piece."""
    monkeypatch.setattr(bodies, "_PIECE_BYTES", size)
    body = json.dumps(body_of(image(url)), ensure_ascii=False)
    for character, escaped in escapes.items():
        body = body.replace(character, escaped)
    [sent] = sent_texts(read(body.encode()))
    assert isinstance(sent, TextWithBase64)
    assert whole(sent) == url


@each_case(
    "body",
    [
        body_of(text(URL)),
        body_of(text(f'"{URL}')),
        body_of(image(f'"{URL}')),
        body_of(image(URL), metadata={"note": BASE64}),
        body_of(image(URL), metadata={BASE64: "note"}),
        body_of(image("data:image/png;base64," + "A\b" * 100)),
        body_of(image("https://example.org/" + "a" * 200)),
    ],
)
def test_parts_other_than_images_are_returned_unchanged(body: dict[str, Any]) -> None:
    request, expected = read(body), parameters.decode_body(json.dumps(body).encode(), ChatRequest)
    assert [whole(one) for one in sent_texts(request)] == list(sent_texts(expected))
    notes = [msgspec.structs.asdict(one)["metadata"] for one in (request, expected)]
    assert notes[0] == notes[1]


PARTS = st.builds(
    lambda make, head, middle, tail: make(head + middle + tail),
    st.sampled_from([image, embeds, text]),
    st.sampled_from(
        ["", "data:image/png;base64,", " data:;a=é\\;base64,", 'a"', "\\", "data:x,", "data:"]
    ),
    st.sampled_from([BASE64, OTHER, BASE64[:70], "", "a b" * 60, "é" * 99, "/" * 200, LINES]),
    st.sampled_from(["", "=", "%3D", "\\n", "\b", "\r\n", '"', "\\", "\n", "/"]),
)


@REPEATABLE
@given(
    parts=st.lists(PARTS, max_size=5),
    escaped=st.sampled_from([{}, {b"/": b"\\/"}, {b"+": b"\\u002B", b"=": b"\\u003d"}]),
)
def test_reading_changes_nothing(parts: list[dict[str, Any]], escaped: dict[bytes, bytes]) -> None:
    body = json.dumps(body_of(*parts)).encode()
    for character, written in escaped.items():
        body = body.replace(character, written)
    expected = parameters.decode_body(body, ChatRequest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LONG_BYTES", LONG)
        reduced = extract_base64(body)
        assert len(reduced.body) <= len(body) + reduced.places * 64
        assert [whole(one) for one in sent_texts(read(body))] == list(sent_texts(expected))


@REPEATABLE
@given(
    at=st.integers(0, 900),
    piece=st.sampled_from([b'"', b"\\", b"[", b"", b"A", b'""', b",", b"\n"]),
)
def test_a_broken_body_stays_broken(at: int, piece: bytes) -> None:
    """Bodies are accepted if and only if a plain decoder accepts them."""
    body = json.dumps(body_of(image(URL), image(URL))).encode()
    at %= len(body)
    body = body[:at] + piece + body[at + 1 :]

    def outcome(*, whole_body: bool) -> list[str] | None:
        try:
            request = parameters.decode_body(body, ChatRequest) if whole_body else read(body)
            return [whole(one) for one in sent_texts(request)]
        except ParameterRefused:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SMALL_BYTES", 0)
        patch.setattr(bodies, "LONG_BYTES", LONG)
        assert outcome(whole_body=False) == outcome(whole_body=True)


def test_parameters_before_base64_are_parsed() -> None:
    """It is not part of the base64 text that is kept apart."""
    [sent] = sent_texts(read(body_of(image(f'data:image/png;base64,"{BASE64}'))))
    with pytest.raises(RequestRefused, match="base64 is not valid"):
        read_local(sent, MediaConfig())


def test_a_stand_in_cannot_be_sent() -> None:
    """It is random for each request."""
    first, second = (extract_base64(json.dumps(body_of(image(URL))).encode()) for _ in range(2))
    assert not first.base64.keys() & second.base64.keys()


@pytest.mark.parametrize("part", [text("x" * 50_000), text(URL * 100), embeds("x y" * 20_000)])
def test_long_texts_are_refused_before_they_are_decoded(
    part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not images, which have limits of their own."""
    monkeypatch.setattr(bodies, "TEXT_BYTES_MAX", 10_000)
    assert list(sent_texts(read(body_of(image(URL + BASE64 * 100)))))
    decoded: list[int] = []
    decode = parameters.decode_body

    def decode_body(body: bytes, kind: type[Any]) -> Any:
        decoded.append(len(body))
        return decode(body, kind)

    monkeypatch.setattr(parameters, "decode_body", decode_body)
    with pytest.raises(RequestRefused, match=r"besides images.*limit 26000 bytes") as caught:
        read(body_of(part))
    assert (caught.value.status, caught.value.code) == (413, "text_too_large")
    assert all(size < 26_000 for size in decoded)
