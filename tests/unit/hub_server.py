"""A server of the hub's API on loopback: repositories are folders, files are served with ETag, ranges and redirects."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
NO_HEADERS: Mapping[str, str] = {}


class HubServer(ThreadingHTTPServer):
    """Repositories by id, as folders.

    Attributes:
        token: Required access token; empty for none.
        gated: Ids of gated repositories: their terms are not accepted.
        cuts: Number of downloads that end in the middle of a file.
        requests: Method and path of each request so far.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.token = ""
        self.gated: set[str] = set()
        self.cuts = 0
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_server(repositories: dict[str, Path]) -> Iterator[HubServer]:
    """Serve repositories within the context."""
    server = HubServer(repositories)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer
    RENAMED: ClassVar[dict[str, str]] = {"org/old-name": "org/model"}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Write nothing to the test's output."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith("/cdn/"):
            self._send_file(Path(path.removeprefix("/cdn")))
        elif path.startswith("/api/models/"):
            self._answer_api(path.removeprefix("/api/models/"))
        else:
            repository, _, rest = path.lstrip("/").partition("/resolve/")
            _, _, name = rest.partition("/")
            repository = self.RENAMED.get(repository, repository)
            if self._may_read(repository, rest.partition("/")[0]):
                self._redirect_to_file(self.server.repositories[repository] / name)

    def _answer_api(self, path: str) -> None:
        parts = path.split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository in self.RENAMED:
            moved = "/".join((self.RENAMED[repository], *rest))
            self._send(307, headers={"Location": f"/api/models/{moved}"})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        if not self._may_read(repository, revision):
            return
        folder = self.server.repositories[repository]
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if rest[:1] == ["tree"]:
            content: Any = [
                {
                    "type": "file",
                    "path": str(file.relative_to(folder)),
                    "size": file.stat().st_size,
                    "oid": _etag(file),
                }
                for file in files
            ]
        else:
            content = {
                "id": repository,
                "sha": COMMIT,
                "siblings": [{"rfilename": file.name} for file in files],
            }
        self._send(200, json.dumps(content).encode())

    def _may_read(self, repository: str, revision: str) -> bool:
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._send(401, headers={"X-Error-Code": "RepoNotFound"})
        elif repository not in self.server.repositories:
            self._send(404, headers={"X-Error-Code": "RepoNotFound"})
        elif repository in self.server.gated:
            self._send(403, headers={"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", COMMIT):
            self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _redirect_to_file(self, file: Path) -> None:
        if not file.is_file():
            self._send(404, headers={"X-Error-Code": "EntryNotFound"})
            return
        self._send(
            302,
            headers={
                "Location": f"http://localhost:{self.server.server_address[1]}/cdn{file}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(file.stat().st_size),
                "X-Linked-Etag": f'"{_etag(file)}"',
            },
        )

    def _send_file(self, file: Path) -> None:
        content = file.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.command == "GET" and self.server.cuts and len(content) > 1000:
            self.server.cuts -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        part = content[start:]
        headers = {
            "ETag": f'"{_etag(file)}"',
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}",
        }
        self._send(206 if start else 200, part, headers=headers)

    def _send(
        self, status: int, body: bytes = b"", *, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
