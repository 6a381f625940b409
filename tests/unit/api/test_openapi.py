from __future__ import annotations

import re
from typing import Any

from tests.unit.api.fakes import Client, FakeEngine
from vsched.api import ApiSettings, create_app
from vsched.api.openapi import ApiRoute
from vsched.api.page import PAGE_PATHS
from vsched.api.request_schema import ChatRequest


async def get(path: str, **settings: str) -> tuple[int, dict[str, str], bytes]:
    app = create_app(FakeEngine(), ApiSettings(**settings))  # type: ignore[arg-type]
    reply = await Client(app).send("GET", path)
    return reply.status, reply.headers, reply.body


def served() -> set[tuple[str, str]]:
    routes = create_app(FakeEngine(), ApiSettings()).routes
    documented = [r for r in routes if isinstance(r, ApiRoute) and r.path not in PAGE_PATHS]
    return {(r.method, r.path_format) for r in documented}


def operations(document: Any) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, each in document["paths"].items() for method in each}


async def test_openapi_document_is_complete_and_resolves() -> None:
    app = create_app(FakeEngine(), ApiSettings())
    reply = await Client(app).send("GET", "/openapi.json")
    found = reply.json
    assert found["openapi"].startswith("3.")
    assert operations(found) == served()
    assert all(each["summary"] for path in found["paths"].values() for each in path.values())
    schemas = found["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.__struct_fields__)
    assert schemas["ChatRequest"]["required"] == ["messages"]

    names = set(re.findall(rb'"#/components/schemas/(\w+)"', reply.body))
    assert b"ChatChunk" in names
    assert names <= {name.encode() for name in schemas}


async def test_page_shows_the_document_and_needs_no_other_host() -> None:
    status, headers, body = await get("/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = body.decode()
    assert all(f"{method} {path}</code>" in text for method, path in served())
    assert "repetition_penalty" in text
    ids = {f"#{name}" for name in re.findall(r'\bid="?([^"> ]+)', text)}
    assert {*re.findall(r'\b(?:href|src)="?([^"> ]+)', text)} <= ids | {"openapi.json"}
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_document_and_page_need_no_key_and_reveal_nothing() -> None:
    for path in ("/openapi.json", "/docs"):
        status, _, body = await get(path, api_key="secret")
        assert status == 200
        assert b"demo" not in body
