"""The live page: static files, the same on every server; its content comes from `/admin/live`."""

from __future__ import annotations

from pathlib import Path

from vsched.api.http_exchange import HttpExchange
from vsched.api.openapi import ApiRoute, get

_MEDIA_TYPES = {".html": b"text/html", ".js": b"text/javascript", ".css": b"text/css"}
_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/" if file.name == "index.html" else f"/page/{file.relative_to(_STATIC)}": file
    for file in _STATIC.rglob("*.*")
    if file.suffix in _MEDIA_TYPES
}
PAGE_PATHS = frozenset(_FILES)
"""Paths of the page; they need no key."""
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data: blob:; media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class _PageFile:
    """One file, read when it is first sent."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._body: bytes | None = None

    async def send(self, exchange: HttpExchange) -> None:
        """Live page."""
        if self._body is None:
            self._body = self._file.read_bytes()
        media_type = _MEDIA_TYPES[self._file.suffix] + b"; charset=utf-8"
        await exchange.send_bytes(self._body, content_type=media_type, headers=_HEADERS)


def page_routes() -> list[ApiRoute]:
    """Return the routes of the page."""
    return [get(path, _PageFile(file).send) for path, file in _FILES.items()]
