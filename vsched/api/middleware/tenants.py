"""The tenant of a request: identified by its API key, or by a header that a gateway sets."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from vsched.api.http_exchange import HttpExchange
from vsched.errors import ConfigError, RequestRefused, limit_message

TENANT = "vsched.tenant"
"""Key of the tenant in the ASGI scope."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_FORM = "1 to 64 letters, digits, dots, hyphens and underscores"
_SHOWN_MAX = 100


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
            raise ConfigError(
                limit_message(
                    f"{path}: entry {number} is not valid",
                    value=repr(name[:_SHOWN_MAX]),
                    limit=f"tenant=key, each once; a tenant is {NAME_FORM}",
                    remedy="write one tenant=key per line",
                )
            )
        keys[name] = key
    return keys


class ReadTenant:
    """ASGI middleware: read the tenant from a header."""

    def __init__(self, app: ASGIApp, *, header: str) -> None:
        self._app = app
        self._name = header
        self._header = header.lower().encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests with a valid tenant or none; answer 400 to others."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = HttpExchange(scope, receive, send)
        name = (exchange.header(self._header) or b"").decode("latin-1").strip()
        if name and NAME.fullmatch(name) is None:
            message = limit_message(
                f"the header {self._name} has no valid tenant name",
                value=repr(name[:_SHOWN_MAX]),
                limit=NAME_FORM,
                remedy="send a name of that form, or leave the header out",
            )
            refusal = RequestRefused(message, code="invalid_tenant", status=400)
            await exchange.send_error(refusal)
            return
        await self._app({**scope, TENANT: name}, receive, send)
