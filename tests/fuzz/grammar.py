"""Requests of clients, with odd values in some places and broken bytes in others; all from one seed."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

from vsched.sim.workload.images import encoded
from vsched.sim.workload.requests import Image

POSTED = {
    "/v1/chat/completions": 40, "/v1/completions": 20, "/tokenize": 12, "/detokenize": 3, "/admin/replicas": 6,
    "/admin/clear": 1,
}  # fmt: skip
GOT = {
    "/v1/models": 2, "/v1/models/simulated": 2, "/health": 2, "/ping": 1, "/version": 1, "/load": 1, "/openapi.json": 1,
    "/metrics": 2, "/admin/statistics": 2, "/nowhere": 2,
}  # fmt: skip
"""Weights of the paths of both methods."""
TEXTS = ("5", "12 7 3", "1 2 3 4 5 6 7 8 9", "42", "9 9")
"""A simulated model's words are numbers."""
TOKENS: tuple[bytes, ...] = (
    b"\xff", b"\\ud800", b"\x00", b"null", b'"', b"{", b"}", b"[" * 300, b"1e999", b"-0", b",", b'"\xff":1,',
    b'"a":1,"a":2,', b"\xed\xa0\x80", b"9" * 400, b"0.1e-400", b"/**/", b"\xef\xbb\xbf",
)  # fmt: skip
ODD: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2.0, 0.5, -1e308, 1e308, 2**31, 2**63, 2**64)
ODD += (2**70, float("nan"), float("inf"), "", "x", "\x00", "\ud800", "\U0001f642", "A" * 3000)
ODD += ([], {}, [[]], [None], [0], [""], ["x"] * 40, {"": 0}, {"type": "text"}, {"x": {"y": [1]}})


IMAGE = Image("fuzz", 3)
"""The image of all requests; simulated encoders know its appearance."""


class FuzzRequest(NamedTuple):
    """A request; `headers` are added to those that every client sends."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


def draw_request(rng: random.Random) -> FuzzRequest:
    """Draw a request: a legal one, changed in up to three places, and often broken in up to four bytes."""
    weights = POSTED | GOT
    (path,) = rng.choices(list(weights), list(weights.values()))
    method = "POST" if path in POSTED else "GET"
    if rng.random() < 0.03:
        method = rng.choice(("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "BREW"))
    body = _DRAW.get(path, _nothing)(rng)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        bend(body, rng)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    if rng.random() < 0.4:
        raw = break_bytes(raw, rng)
    kind = (
        "application/json" if rng.random() < 0.97 else rng.choice(("text/plain", "", "\xff/json"))
    )
    headers = [("content-type", kind)]
    if rng.random() < 0.05:
        name = rng.choice(("origin", "host", "authorization", "expect", "content-length", "x-y"))
        headers.append(
            (name, rng.choice(("", "null", "evil.example", "[::", "-1", "\xe9", "1" * 30)))
        )
    return FuzzRequest(method, path, headers, raw)


def bend(value: Any, rng: random.Random) -> None:
    """Change one place of a document: another value there, none, or one more."""
    while isinstance(value, dict | list) and value:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
            value = inner
            continue
        draw = rng.random()
        if draw < 0.75:
            value[key] = _odd(rng)
        elif draw < 0.9:
            del value[key]
        elif isinstance(value, dict):
            value[rng.choice(("zz", "", "messages", "prompt", "tools", "\x00"))] = _odd(rng)
        else:
            value.append(deepcopy(inner))
        return


def break_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Change up to four places: a bit, a byte, a repeated or missing piece, or input that is hard to parse."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        match rng.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place:place] = bytes([rng.randrange(256)])
            case 2:
                data[place:place] = data[place : min(end, place + 50)]
            case 3:
                del data[place : min(end, place + 20)]
            case 4 if rng.random() < 0.3:
                del data[place:]
            case _:
                data[place:place] = rng.choice(TOKENS)
    return bytes(data)


def _odd(rng: random.Random) -> Any:
    return deepcopy(rng.choice(ODD))


def _nothing(rng: random.Random) -> dict[str, Any]:
    del rng
    return {}


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Return the fields that both endpoints share; every one occurs in one of a few requests."""
    fields: dict[str, Any] = {
        "model": "simulated", "stream": rng.random() < 0.5,
        "stream_options": {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5},
        "min_tokens": 1, "temperature": rng.random(), "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "seed": rng.randrange(2**32), "repetition_penalty": 1.1, "presence_penalty": -1,
        "frequency_penalty": 0.5, "stop": ["ab", "c"], "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "skip_special_tokens": True, "ignore_eos": True,
        "priority": 3, "ttft_target_ms": 500, "cache_salt": "salt", "n": 1, "logit_bias": {},
        "user": "somebody", "metadata": {"a": "b"},
    }  # fmt: skip
    kept = {name: value for name, value in fields.items() if rng.random() < 0.3}
    return {"max_tokens": rng.randint(1, 4), **kept}


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        content: Any = rng.choice(TEXTS)
        if rng.random() < 0.5:
            content = [{"type": "text", "text": content}]
            if rng.random() < 0.5:
                content.append(_image_part(rng))
            if rng.random() < 0.1:
                content.append({"type": "image_embeds", "image_embeds": {"data": "AAAA"}})
        role = rng.choice(("user", "user", "assistant", "system", "developer"))
        messages.append({"role": role, "content": content})
    return messages


def _image_part(rng: random.Random) -> dict[str, Any]:
    """Return an image, at times with a name, or only by a name, which may be unknown."""
    url = _image_url(rng)
    part: dict[str, Any] = {"type": "image_url", "image_url": rng.choice(({"url": url}, url))}
    if rng.random() < 0.3:
        part["uuid"] = rng.choice(("first", "second"))
        if rng.random() < 0.5:
            part["image_url"] = None
    return part


def _image_url(rng: random.Random) -> str:
    data = encoded(IMAGE)
    if rng.random() < 0.3:
        data = break_bytes(data, rng)
    schemes = ("data:image/png;base64,", "data:,", "ftp://a.b/", "file:///")
    (scheme,) = rng.choices(schemes, (12, 1, 1, 1))
    return scheme + base64.b64encode(data).decode()


def _chat(rng: random.Random) -> dict[str, Any]:
    extra: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.2 else {}
    if rng.random() < 0.1:
        extra["chat_template_kwargs"] = {"enable_thinking": False}
    if rng.random() < 0.1:
        extra["continue_final_message"] = True
    return {"messages": _messages(rng), **_sampling(rng), **extra}


def _completion(rng: random.Random) -> dict[str, Any]:
    prompt = rng.choice((*TEXTS, ["7"], [1, 2, 3], [[4, 5]], ""))
    return {"prompt": prompt, **_sampling(rng), **({"logprobs": 1} if rng.random() < 0.2 else {})}


def _tokenize(rng: random.Random) -> dict[str, Any]:
    body = {"prompt": rng.choice(TEXTS)} if rng.random() < 0.5 else {"messages": _messages(rng)}
    return {**body, "return_token_strs": rng.random() < 0.5}


def _detokenize(rng: random.Random) -> dict[str, Any]:
    return {"tokens": [rng.randrange(10) for _ in range(rng.randrange(5))]}


def _replicas(rng: random.Random) -> dict[str, Any]:
    action = rng.choice(("drain", "resume", "restart", "dance"))
    return {"group": rng.choice(("encode", "generate", "generate-7")), "action": action}


_DRAW: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
    "/admin/replicas": _replicas,
}
