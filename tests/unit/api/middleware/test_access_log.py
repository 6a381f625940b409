"""The access log: one line for each request, without contents."""

from __future__ import annotations

import logging

import pytest

from tests.unit.api.fakes import Client, FakeEngine, chat
from vsched.api import ApiSettings, create_app
from vsched.logs import FIELDS


async def log_of(
    caplog: pytest.LogCaptureFixture, method: str, path: str, body: object = b"", *, on: bool = True
) -> list[logging.LogRecord]:
    app = create_app(FakeEngine(), ApiSettings(access_log=on))
    with caplog.at_level(logging.INFO, "vsched.access"):
        await Client(app).send(method, path, body, headers={"x-request-id": "mine"})
    return [one for one in caplog.records if one.name == "vsched.access"]


async def test_access_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = await log_of(caplog, "POST", "/v1/chat/completions", chat(stream=True))
    fields = getattr(line, FIELDS)
    assert fields.pop("duration_ms") >= 0
    assert fields.pop("client")
    assert fields == {
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "request_id": "mine",
    }
    assert "POST /v1/chat/completions 200 " in line.getMessage()


async def test_access_log_has_refused_requests(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = await log_of(caplog, "GET", "/v1/none\nforged?key=secret")
    message = line.getMessage()
    assert "/v1/none%0Aforged" in message
    assert " 404 " in message
    assert "\n" not in message


async def test_access_log_has_no_probes_and_is_off_by_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not await log_of(caplog, "GET", "/health")
    assert not await log_of(caplog, "GET", "/v1/models", on=False)
    assert await log_of(caplog, "GET", "/v1/models")
