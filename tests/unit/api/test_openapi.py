from __future__ import annotations

from html.parser import HTMLParser
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

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [name for inner in value.values() for name in references(inner)]
        return (
            [name for inner in value for name in references(inner)]
            if isinstance(value, list)
            else []
        )

    names = {name.removeprefix("#/components/schemas/") for name in references(found)}
    assert "ChatChunk" in names
    assert names <= set(schemas)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src"):
                self.targets.add(value or "")
            if name == "id":
                self.ids.add(value or "")


async def test_page_shows_the_document_and_needs_no_other_host() -> None:
    status, headers, body = await get("/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = body.decode()
    assert all(f"{method} {path}</code>" in text for method, path in served())
    assert "repetition_penalty" in text
    found = _Links()
    found.feed(text)
    assert {target.removeprefix("#") for target in found.targets} <= found.ids | {"openapi.json"}
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_document_and_page_need_no_key_and_reveal_nothing() -> None:
    for path in ("/openapi.json", "/docs"):
        status, _, body = await get(path, api_key="secret")
        assert status == 200
        assert b"demo" not in body
