"""The API key, as the middleware compares it."""

from __future__ import annotations

import hashlib
import itertools

from starlette.types import Message, Receive, Scope, Send

from tests.each_case import each_case
from vsched.api import ApiSettings
from vsched.api.middleware import RequireKey

KEY = "the right key"


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def alike(part: slice) -> str:
    """Return a wrong key whose digest shares this part with that of the right one."""
    keys = (f"wrong {number}" for number in itertools.count())
    return next(key for key in keys if digest(key)[part] == digest(KEY)[part])


async def status_of(authorization: str | None) -> int:
    """Status of a request with this header; None for a request without it."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    await RequireKey(app, settings=ApiSettings(api_key=KEY))(scope, receive, send)
    return int(sent[0]["status"])


@each_case(
    "wrong",
    [
        "",
        KEY[:1],
        KEY[:-1],
        KEY + "x",
        KEY[:-1] + "x",
        "x" + KEY[1:],
        KEY.upper(),
        alike(slice(0, 1)),
        alike(slice(0, 2)),
        alike(slice(-1, None)),
    ],
)
async def test_key_that_is_right_in_part_is_wrong(wrong: str) -> None:
    """If a comparison left out any bytes of key or digest, one of these would pass."""
    assert await status_of(f"Bearer {wrong}") == 401
