from __future__ import annotations

from html.parser import HTMLParser

from starlette.routing import Route

from tests.unit.api.fakes import Client, FakeEngine
from vsched.api import ApiSettings, create_app
from vsched.api.openapi import OPERATIONS, document
from vsched.api.request_schema import ChatRequest


async def get(path: str, **settings: str) -> tuple[int, dict[str, str], bytes]:
    app = create_app(FakeEngine(), ApiSettings(**settings))  # type: ignore[arg-type]
    reply = await Client(app).send("GET", path)
    return reply.status, reply.headers, reply.body


def test_openapi_has_every_route_and_no_other() -> None:
    routes = create_app(FakeEngine(), ApiSettings()).routes
    served = {
        (method, route.path.replace(":path", ""))
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(each.method, each.path) for each in OPERATIONS} == served


async def test_openapi_document_is_complete_and_resolves() -> None:
    app = create_app(FakeEngine(), ApiSettings())
    reply = await Client(app).send("GET", "/openapi.json")
    found = reply.json
    assert found == document()
    assert found["openapi"].startswith("3.")
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
    assert all(f"{each.method} {each.path}</code>" in text for each in OPERATIONS)
    assert "repetition_penalty" in text
    found = _Links()
    found.feed(text)
    assert {target.removeprefix("#") for target in found.targets} <= found.ids | {"openapi.json"}
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_document_and_page_are_open_for_they_tell_nothing_of_what_is_served() -> None:
    for path in ("/openapi.json", "/docs"):
        status, _, body = await get(path, api_key="secret")
        assert status == 200
        assert b"demo" not in body
