"""Request ids, the access log, and access checks: hosts, keys, local operators, and types that other pages cannot send.

A browser on this machine can reach a server that only this machine reaches, and lets any web page in it try. A page can
make its own name resolve to a loopback address (DNS rebinding), so `Host` is checked. It can send a form or plain text
to any server without permission, so a body must be declared as JSON, for which browsers ask first (CORS preflight).

Rejected: a second listener for `/admin/` on a loopback port, which a web page reaches as easily as the first; refusing
unknown `Host` names on every address, since a container would answer no request until it is configured; the API key
for operators, since every user could end all requests; refusing every `Origin`, since pages that a proxy serves under
the server's own name send one.

Known gap: a proxy on the same machine that adds no `Forwarded`, `X-Forwarded-*` or `Via` header counts as a local
program. If that is common, `/admin/` should need a key in all cases.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vsched.api.contract import ApiSettings
from vsched.api.http_exchange import HttpExchange, is_anthropic_client
from vsched.api.page import PAGE_PATHS
from vsched.errors import ConfigError, RequestRefused, limit_message
from vsched.logs import FIELDS

HEADER = b"x-request-id"
_CLEAN = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)
"""Ids that are safe to send back in a header and to log; any other id is ignored."""


def sent_id(scope: Scope) -> str:
    """Id that the client gave its request; empty if it sent none, or an unsafe one."""
    for name, value in scope["headers"]:
        if name == HEADER and _CLEAN.fullmatch(value):
            return bytes(value).decode("ascii")
    return ""


def new_id(prefix: str, scope: Scope) -> str:
    """Create a unique id, which includes the client's own."""
    given = sent_id(scope)
    return (
        f"{prefix}-{given}-{secrets.token_hex(4)}" if given else f"{prefix}-{secrets.token_hex(12)}"
    )


def response_id(scope: Scope) -> bytes:
    """Id for a response that has none of its own."""
    return sent_id(scope).encode() or secrets.token_hex(16).encode()


def _with_id(scope: Scope, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    own = next((value for name, value in headers if name == HEADER), b"")
    chosen = sent_id(scope).encode() or own or response_id(scope)
    kept = [(name, value) for name, value in headers if name != HEADER]
    kept += [(b"request-id", chosen)] if is_anthropic_client(scope["headers"]) else []
    return [*kept, (HEADER, chosen)]


logger = logging.getLogger("vsched.access")
_PROBES = frozenset({"/health", "/ready", "/ping"})
_PATH_CHARACTERS_MAX = 200
_REFUSAL = "vsched.refusal"
_DISCONNECTED = 499
"""Status in the log of a request without a response, as in nginx."""
_LOG_FIELDS = "vsched.log_fields"
"""Key of further fields of the access log in the ASGI scope."""


class ServeRequest:
    """ASGI middleware around all others: normal paths, ids of responses, allowed hosts, and the access log.

    Trailing slashes and the proxy's prefix (`root_path`) are removed from paths. Every response has an id; the client's
    own takes precedence. The log has method, path, status, duration and id of each request, but not its query or
    content. Probes that succeed are left out. A status of 499 means that the client disconnected before the response.
    """

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self._app = app
        self._prefix = settings.root_path
        self._allowed = settings.allowed_hosts
        self._logs = settings.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests for known names; answer 421 to others, and close WebSockets, which are not supported."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, sent_path = time.monotonic(), scope["path"]
        status, request_id = 0, ""
        further: dict[str, str] = {}
        scope[_LOG_FIELDS] = further
        scope["path"] = self._normal(sent_path)

        def tagged(message: Message) -> Awaitable[None]:
            # Not a coroutine, because it is called for every event of a stream.
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                headers = _with_id(scope, message.get("headers", ()))
                message = {**message, "headers": headers}
                status, request_id = message["status"], headers[-1][1].decode("ascii")
            return send(message)

        try:
            exchange = HttpExchange(scope, receive, tagged)
            refusal = _refused_host(_host_of(exchange), self._allowed)
            if refusal is None:
                await self._app(scope, receive, tagged)
            else:
                await exchange.send_error(refusal)
        finally:
            if self._logs:
                if not status:
                    status, request_id = refusal_of(scope)
                    status = status or _DISCONNECTED
                if sent_path not in _PROBES or status != 200:
                    duration_ms = (time.monotonic() - started_s) * 1e3
                    logged = {**scope, "path": sent_path}
                    log_access(logged, status, request_id, duration_ms, further)

    def _normal(self, path: str) -> str:
        if self._prefix and path.startswith(f"{self._prefix}/"):
            path = path.removeprefix(self._prefix)
        return path.rstrip("/") or "/"


def note_refusal(scope: Any, status: int, request_id: str) -> None:
    """Note that the connection answered a request in place of the application."""
    scope[_REFUSAL] = status, request_id


def refusal_of(scope: Scope) -> tuple[int, str]:
    """Return status and id of the connection's own answer; 0 if there is none."""
    refusal: tuple[int, str] = scope.get(_REFUSAL, (0, ""))
    return refusal


def log_field(scope: Scope, name: str, value: str) -> None:
    """Add a field to the access log line of a request."""
    scope.get(_LOG_FIELDS, {})[name] = value


def log_access(
    scope: Scope,
    status: int,
    request_id: str,
    duration_ms: float,
    further: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Log a request; method and path are missing in the scope of one that could not be parsed."""
    client = scope.get("client")
    address = client[0] if client else "-"
    # No line breaks of a client in the log.
    path = quote(scope.get("path", "-")[:_PATH_CHARACTERS_MAX])
    fields = {
        "client": address,
        "method": scope.get("method", "-"),
        "path": path,
        "status": status,
        "duration_ms": round(duration_ms, 1),
        "request_id": request_id,
        **further,
    }
    logger.info(
        "%s %s %s %d %.1f ms %s" + " %s" * len(further),
        *fields.values(),
        extra={FIELDS: fields},
    )


_PUBLIC_PATHS = frozenset({"/health", "/ready", "/ping", "/openapi.json"})
"""Paths that need no key: probes, and content that is the same on every server."""
_ADMIN = "/admin/"
_ADMIN_ALIASES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Operator functions under other servers' paths."""
_FORWARDED = re.compile(rb"forwarded|via|x-forwarded-.*|x-real-ip")
_VALUE_CHARACTERS_MAX = 100


def request_middleware(settings: ApiSettings) -> list[Middleware]:
    """Return the middleware of the application, outermost first; each route adds `CheckAccess`."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("x-request-id", "request-id", "retry-after", "traceparent"),
    )
    serve = Middleware(ServeRequest, settings=settings)
    # Outside the key check: a preflight has no key, and pages must be able to read the reason of a refusal.
    return [serve, cors] if settings.cors_origins else [serve]


def _refused_host(host: str | None, allowed: tuple[str, ...]) -> RequestRefused | None:
    """Error for a host name that is not allowed."""
    if host is None or _is_allowed(host, allowed):
        return None
    return RequestRefused.of_limit(
        "the Host header does not name this server",
        value=host[:_VALUE_CHARACTERS_MAX],
        limit=", ".join(("localhost", "addresses", *allowed)),
        remedy="call it by one of these, or add the name to server.allowed_hosts",
        code="host_not_allowed",
        status=421,
    )


class CheckAccess:
    """ASGI middleware of one route: key, tenant, and the type of a body; it sees only requests that match a route.

    A key is required, if configured, on all paths except open ones. Operator paths have their own key. Without one,
    they are open to local programs only: not to other machines, web pages or forwarded requests.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._api_key, self._admin_key = settings.api_key, settings.admin_key
        self._tenant_keys = settings.tenant_keys
        self._tenant_header = settings.tenant_header
        # The live page is the same on every server; what it shows is under /admin/.
        self._open = (
            _PUBLIC_PATHS | PAGE_PATHS | ({"/metrics"} if settings.metrics_without_key else set())
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on authorized requests with a valid tenant and JSON; answer 401, 403, 400 or 415 to others."""
        exchange = HttpExchange(scope, receive, send)
        try:
            if scope["path"] not in self._open:
                scope[TENANT] = self._checked_tenant(exchange)
            if self._tenant_header:
                scope[TENANT] = _sent_tenant(exchange, self._tenant_header)
            if scope["method"] == "POST" and (message := _not_json(exchange)):
                raise RequestRefused(message, code="unsupported_media_type", status=415)
        except RequestRefused as refusal:
            await exchange.send_error(refusal)
        else:
            await self._app(scope, receive, send)

    def _checked_tenant(self, exchange: HttpExchange) -> str:
        """Check the key of a request; return the tenant whose key it is, empty for another key.

        Raises:
            RequestRefused: If the key is wrong, or an operator path without a key is not called locally.
        """
        path = exchange.scope["path"]
        is_admin = path.startswith(_ADMIN) or path in _ADMIN_ALIASES
        tenant = _tenant(exchange, self._tenant_keys)
        key = (is_admin and self._admin_key) or self._api_key
        needs_key = key or self._tenant_keys
        opened = tenant and not (is_admin and self._admin_key)
        if needs_key and not opened and not (key and _has_key(exchange, key)):
            name = "admin key" if is_admin and self._admin_key else "API key"
            message = f"the {name} is missing or wrong. Remedy: send Authorization: Bearer <key>."
            raise RequestRefused(message, code="invalid_api_key", status=401)
        if is_admin and not self._admin_key and not _is_local(exchange):
            message = (
                f"{_ADMIN} and changes of adapters are only open to programs on the server's own machine, which "
                "call it by its address or as localhost. Remedy: call it there, or give it a key "
                "(server.admin_key_variable)."
            )
            raise RequestRefused(message, code="not_local", status=403)
        return tenant


def _not_json(exchange: HttpExchange) -> str:
    """Error message for a body that its headers do not declare as plain JSON; empty if they do."""
    sent = exchange.header(b"content-type")
    media_type = (sent or b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json" and (sent is not None or _has_body(exchange)):
        return limit_message(
            "the body is not declared as JSON",
            value=f"Content-Type {(sent or b'(none)').decode('latin-1')[:_VALUE_CHARACTERS_MAX]}",
            limit="application/json",
            remedy="send the header Content-Type: application/json",
        )
    sent_codings = [
        value for name, value in exchange.scope["headers"] if name == b"content-encoding"
    ]
    coding = b", ".join(sent_codings).strip()
    if coding.lower() not in {b"", b"identity"}:
        return limit_message(
            "the body is compressed",
            value=f"Content-Encoding {coding.decode('latin-1')[:_VALUE_CHARACTERS_MAX]}",
            limit="identity",
            remedy="send it uncompressed, without the header Content-Encoding",
        )
    return ""


def _digest(secret: bytes) -> bytes:
    # Digests have a fixed length, so that the comparison time does not reveal the key's length.
    return hashlib.sha256(secret).digest()


def _has_key(exchange: HttpExchange, expected: str) -> bool:
    scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
    bearer = key.strip() if scheme.lower() == b"bearer" else b""
    own = exchange.header(b"x-api-key") or b""  # Anthropic's clients use this header
    wanted = _digest(expected.encode())
    matches = [hmac.compare_digest(_digest(one), wanted) for one in (bearer, own)]
    return any(matches)


def _tenant(exchange: HttpExchange, keys: dict[str, str]) -> str:
    """Tenant whose key the request has; empty if none. All keys are compared in any case."""
    found = ""
    for name, key in keys.items():
        if _has_key(exchange, key):
            found = name
    return found


def _has_body(exchange: HttpExchange) -> bool:
    length = exchange.header(b"content-length")
    return exchange.header(b"transfer-encoding") is not None or length not in {None, b"0"}


def _host_of(exchange: HttpExchange) -> str | None:
    """Name or address in `Host`, without a port; None if there is no header, which browsers always send."""
    sent = exchange.header(b"host")
    if sent is None:
        return None
    host = sent.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_allowed(host: str, names: tuple[str, ...]) -> bool:
    return _cannot_be_rebound(host) or any(
        name == "*" or host == name or (name.startswith("*.") and host.endswith(name[1:]))
        for name in map(str.lower, names)
    )


def _cannot_be_rebound(host: str) -> bool:
    """True if no page can control the resolution of this host: an address, or a name that browsers never look up."""
    return host == "localhost" or host.endswith(".localhost") or _address(host) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    # A socket for both families shows IPv4 addresses as mapped IPv6 addresses.
    return getattr(address, "ipv4_mapped", None) or address


def _is_local(exchange: HttpExchange) -> bool:
    """True for a direct request from a local program; on a Unix socket there is no address to check."""
    client, server = exchange.scope.get("client"), exchange.scope.get("server")
    if client is not None:
        address = _address(client[0])
        own = server is not None and address == _address(server[0])
        if address is None or not (address.is_loopback or own):
            return False
    host = _host_of(exchange)
    is_named = host is None or _cannot_be_rebound(host)
    return (
        is_named
        and not _is_foreign(exchange)
        and not any(_FORWARDED.fullmatch(name) for name, _ in exchange.scope["headers"])
    )


def _is_foreign(exchange: HttpExchange) -> bool:
    """True if a web page of another server sends the request."""
    origin, host = exchange.header(b"origin"), exchange.header(b"host")
    return origin is not None and (host is None or origin != b"http://" + host)


TENANT = "vsched.tenant"
"""Key of the tenant in the ASGI scope."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_FORM = "1 to 64 letters, digits, dots, hyphens and underscores"


def tenant_of(scope: Scope) -> str:
    """Tenant of a request; empty if unknown."""
    return str(scope.get(TENANT, ""))


def read_tenant_keys(text: str, *, path: str) -> dict[str, str]:
    """Parse keys by tenant from `tenant=key` entries, separated by newlines or commas.

    Raises:
        ConfigError: If a name or key is invalid or repeated; the message does not show keys.
    """
    keys: dict[str, str] = {}
    for number, pair in enumerate(re.split(r"[,\n]", text.strip()), 1):
        name, _, key = (one.strip() for one in pair.partition("="))
        if NAME.fullmatch(name) is None or not key or name in keys or key in keys.values():
            raise ConfigError.of_limit(
                f"{path}: entry {number} is not valid",
                value=repr(name[:_VALUE_CHARACTERS_MAX]),
                limit=f"tenant=key, each once; a tenant is {NAME_FORM}",
                remedy="write one tenant=key per line",
            )
        keys[name] = key
    return keys


def _sent_tenant(exchange: HttpExchange, header: str) -> str:
    """Tenant in a header, empty for none; the name is checked."""
    name = (exchange.header(header.lower().encode("latin-1")) or b"").decode("latin-1").strip()
    if name and NAME.fullmatch(name) is None:
        raise RequestRefused.of_limit(
            f"the header {header} has no valid tenant name",
            value=repr(name[:_VALUE_CHARACTERS_MAX]),
            limit=NAME_FORM,
            remedy="send a name of that form, or leave the header out",
            code="invalid_tenant",
        )
    return name
