"""The OpenAPI document as a page: plain HTML, without scripts or external resources."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vsched.api.description.openapi import JSON, document

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-size:.9em}table{border-collapse:collapse}td{padding:.1rem 1rem .1rem 0;"
    "vertical-align:top}summary{cursor:pointer}details{margin:.3rem 0}"
)


async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    del request
    return Response(_encoded(), media_type=JSON)


async def page(request: Request) -> Response:
    """Return the page."""
    del request
    headers = {"content-security-policy": _POLICY}
    return Response(rendered(document()), media_type="text/html", headers=headers)


@functools.cache
def _encoded() -> bytes:
    return json.dumps(document()).encode()


def rendered(found: dict[str, Any]) -> str:
    """Format an OpenAPI document as HTML: the paths, then the fields of every struct."""
    info = found["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    lines = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        '<p>The same as a document: <a href="openapi.json">openapi.json</a>.</p><table>',
    ]
    for path, methods in found["paths"].items():
        lines += [_operation(method, path, each) for method, each in methods.items()]
    lines.append("</table><h2>Bodies</h2>")
    for name, schema in found["components"]["schemas"].items():
        lines += _struct(name, schema)
    return "\n".join(lines)


def _operation(method: str, path: str, each: dict[str, Any]) -> str:
    body = each.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
    takes = f" Takes {_kind(body)}." if body else ""
    name = f"<code>{method.upper()} {escape(path)}</code>"
    return f"<tr><td>{name}<td>{escape(each['summary'])}{takes}"


def _struct(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
    yield f"{escape(schema.get('description', ''))}</summary><table>"
    required = schema.get("required", ())
    for field, kind in schema.get("properties", {}).items():
        note = "required" if field in required else escape(json.dumps(kind.get("default")))
        yield f"<tr><td><code>{escape(field)}</code><td>{_kind(kind)}<td>{note}"
    yield "</table></details>"


def _kind(schema: dict[str, Any]) -> str:
    """Describe a schema in words."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(map(_kind, choices))
    if "enum" in schema:
        return " or ".join(escape(json.dumps(value)) for value in schema["enum"])
    kind = escape(str(schema.get("type", "anything")))
    if isinstance(items := schema.get("items"), dict):
        return f"{kind} of {_kind(items)}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", "&gt;"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "&lt;"),
        )
        if key in schema
    ]
    return f"{kind} {' '.join(bounds)}".rstrip()
