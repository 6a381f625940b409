"""The largest legal request bodies, each large in a different respect, and some that are refused."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from vsched.api.bodies import VALUES_MAX, text_bytes_max
from vsched.api.contract import ApiSettings
from vsched.bench.load.generator import draw_text
from vsched.config import MediaConfig
from vsched.types import ModelInfo

OUTPUT_TOKENS = 4
_MARGIN_BYTES = 4096
_BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


class LagCase(NamedTuple):
    """A request: name of its large part, path, and body; a GET if the body is empty."""

    name: str
    path: str
    body: bytes = b""


class _Limits(NamedTuple):
    info: ModelInfo
    media: MediaConfig
    api: ApiSettings

    @property
    def body_bytes(self) -> int:
        """Space in a body for its largest value."""
        return self.api.body_bytes_max - _MARGIN_BYTES

    @property
    def text_bytes(self) -> int:
        """Space in a body for one text that is not an image."""
        return min(text_bytes_max(self.info.context_tokens) - _MARGIN_BYTES, self.body_bytes)

    @property
    def image_bytes(self) -> int:
        """Space for a base64 image in a body, also limited by the maximum image size."""
        return min(self.body_bytes * 3 // 4, self.media.image_bytes_max) - _MARGIN_BYTES


def lag_cases(info: ModelInfo, media: MediaConfig, api: ApiSettings) -> list[LagCase]:
    """Return all cases for a model and its limits."""
    limits = _Limits(info, media, api)
    make: list[Callable[[_Limits], list[LagCase]]] = [_texts, _values, _images, _embeddings]
    cases = [case for cases in make for case in cases(limits)]
    others = [LagCase("metrics", "/metrics"), LagCase("statistics", "/admin/statistics")]
    assert all(len(case.body) <= api.body_bytes_max for case in cases)
    return [*cases, *others]


def _texts(limits: _Limits) -> list[LagCase]:
    size = limits.text_bytes
    words = draw_text(random.Random(0), limits.info.context_tokens // 8)
    sentence = f"{words[:1000]}, "
    return [
        LagCase("a text that fills the context", _CHAT, _chat(words)),
        LagCase("the same, tokenized only", _TOKENIZE, _body(prompt=words)),
        LagCase("words, refused", _CHAT, _chat(_fill(sentence, size))),
        LagCase("the most words, refused", _CHAT, _chat(_fill(sentence, limits.body_bytes))),
        LagCase("words, tokenized only, refused", _TOKENIZE, _body(prompt=_fill(sentence, size))),
        LagCase("words far apart", _CHAT, _chat(_fill("a" + " " * 400, size))),
        LagCase("one long word, refused", _CHAT, _chat("a" * 1_000_000)),
        LagCase("punctuation, refused", _CHAT, _chat(_fill(",;", 1_000_000))),
        LagCase("escaped newlines, refused", _CHAT, _chat("\n" * (size // 2))),
        LagCase("metadata of one text", _CHAT, _chat("Hello", metadata={"note": "x" * size})),
    ]


def _values(limits: _Limits) -> list[LagCase]:
    info, api = limits.info, limits.api
    share = limits.text_bytes // api.messages_max - 64
    many = [_message("user", "a") for _ in range(100_000)]
    full = [_message(("user", "assistant")[i % 2], "a " * 8) for i in range(api.messages_max)]
    long = [_message("user", "b" * share) for _ in range(api.messages_max)]
    parts = [{"type": "text", "text": "a"} for _ in range(api.parts_max)]
    tokens = [100 + i % 100 for i in range(info.context_tokens - OUTPUT_TOKENS - 1)]
    lists = b",".join([b"[]"] * (limits.body_bytes // 3))
    refused: list[list[int]] = [[] for _ in range(100_000)]
    allowed = refused[
        : (VALUES_MAX + info.context_tokens) // 2 - 64
    ]  # each has a comma and a bracket
    stops = [f"{i} never".ljust(api.stop_characters_max, "x") for i in range(api.stop_max)]
    return [
        LagCase("100,000 messages, refused", _CHAT, _body(messages=many)),
        LagCase("the most messages", _CHAT, _body(messages=full)),
        LagCase("the most messages, long, refused", _CHAT, _body(messages=long)),
        LagCase("the most content parts", _CHAT, _body(messages=[_message("user", parts)])),
        LagCase("as many tokens as fit", "/v1/completions", _body(prompt=tokens)),
        LagCase("millions of values, refused", _CHAT, b'{"metadata":[%s],"messages":0}' % lists),
        LagCase("100,000 empty lists, refused", _CHAT, _chat("Hello", metadata={"lists": refused})),
        LagCase("as many values as fit", _CHAT, _chat("Hello", metadata={"lists": allowed})),
        LagCase(
            "a stream with stop strings and log-probabilities",
            _CHAT,
            _chat("Hello", max_tokens=64, stop=stops, stream=True, **_LOGPROBS),
        ),
    ]


def _images(limits: _Limits) -> list[LagCase]:
    media = limits.media
    side = int(media.image_pixels_max**0.5)
    webp = int(media.webp_pixels_max**0.5)
    edge = min(int((limits.image_bytes / 4) ** 0.5), side)  # noise takes three bytes per pixel
    noise = np.random.default_rng(0).integers(0, 255, (edge, edge, 3), np.uint8)
    cases = [
        LagCase(f"a JPEG of {side} x {side}", _CHAT, _picture(_encoded("JPEG", side), "jpeg")),
        LagCase(f"a PNG of {side} x {side}", _CHAT, _picture(_encoded("PNG", side))),
        LagCase(f"a WEBP of {webp} x {webp}", _CHAT, _picture(_encoded("WEBP", webp), "webp")),
    ]
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    largest = buffer.getvalue() + b"\0" * (limits.image_bytes - buffer.tell())
    many = [_image_part(_encoded("PNG", 224 + i)) for i in range(media.images_max)]
    many.append({"type": "text", "text": "What is it?"})
    return [
        *cases,
        LagCase("an image of the most bytes", _CHAT, _picture(largest)),
        LagCase(
            "the same, slashes escaped",
            _CHAT,
            _picture(largest[: limits.image_bytes * 63 // 64]).replace(b"/", rb"\/"),
        ),
        LagCase("the most images", _CHAT, _body(messages=[_message("user", many)])),
    ]


def _embeddings(limits: _Limits) -> list[LagCase]:
    info = limits.info
    tokens = info.item_tokens_max // 2 * 2
    width = info.hidden_size * info.embedding_levels
    rows = bytes(tokens * width * _BYTES_OF_DTYPE[info.dtype])
    grid = np.array([[1, 4, tokens]], np.int64).tobytes()
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[info.dtype]
    header = json.dumps(
        {
            "embeds": {"dtype": kind, "shape": [tokens, width], "data_offsets": [0, len(rows)]},
            "grid_thw": {
                "dtype": "I64",
                "shape": [1, 3],
                "data_offsets": [len(rows), len(rows) + len(grid)],
            },
        }
    ).encode()
    file = len(header).to_bytes(8, "little") + header + rows + grid
    data = base64.b64encode(file).decode()
    part = {"type": "image_embeds", "image_embeds": {"data": data}}
    return [LagCase("the largest embedding", _CHAT, _body(messages=[_message("user", [part])]))]


_CHAT = "/v1/chat/completions"
_TOKENIZE = "/tokenize"
_LOGPROBS = {"logprobs": True, "top_logprobs": 20}


def _body(**fields: Any) -> bytes:
    limit = {} if set(fields) == {"prompt"} and isinstance(fields["prompt"], str) else _SHORT
    return msgspec.json.encode({**limit, **fields})


_SHORT = {"max_tokens": OUTPUT_TOKENS}


def _chat(text: str, **fields: Any) -> bytes:
    return _body(messages=[_message("user", text)], **fields)


def _message(role: str, content: str | list[Any]) -> dict[str, Any]:
    return {"role": role, "content": content}


def _fill(text: str, size: int) -> str:
    return text * (size // len(text))


def _picture(data: bytes, kind: str = "png") -> bytes:
    return _body(messages=[_message("user", [_image_part(data, kind)])])


def _image_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _encoded(kind: str, side: int) -> bytes:
    gradient = Image.linear_gradient("L").resize((side, side))
    picture = Image.merge("RGB", [gradient, gradient.rotate(90), gradient])
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"compress_level": 1} if kind == "PNG" else {}))
    return buffer.getvalue()
