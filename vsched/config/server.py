"""Check the syntax of host names, origins and URLs; a malformed one would silently match nothing."""

from __future__ import annotations

import re

from vsched.config.sections import ServerConfig
from vsched.errors import ConfigProblems, limit_message

_NAME = re.compile(r"\*|(\*\.)?[^*/:\s]+")
_HEADER = re.compile(r"[A-Za-z0-9-]+")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_URL = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/*\s]+")


def check_names(server: ServerConfig) -> None:
    """Reject names and origins that cannot occur in `Host` and `Origin` headers, and malformed URLs.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    problems = ConfigProblems()
    for key, values, form, limit in (
        (
            "allowed_hosts",
            server.allowed_hosts,
            _NAME,
            "a name such as api.example.com, without a port",
        ),
        (
            "cors_origins",
            server.cors_origins,
            _ORIGIN,
            "scheme, name and port such as https://app.example.com, without a path",
        ),
    ):
        for value in values:
            if form.fullmatch(value) is None:
                what = f"server.{key}: no browser sends this"
                remedy = "write it in that form, or * for any"
                problems.add(limit_message(what, value=repr(value), limit=limit, remedy=remedy))
    if _PATH.fullmatch(server.root_path) is None:
        what, limit = (
            "server.root_path: not a path prefix",
            "a path such as /llm, without a / at its end",
        )
        remedy = "write it in that form"
        problems.add(limit_message(what, value=repr(server.root_path), limit=limit, remedy=remedy))
    endpoint = server.otlp_endpoint
    if endpoint and _URL.fullmatch(endpoint) is None:
        what, limit = (
            "server.otlp_endpoint: not a URL of a collector",
            "http:// or https://, for OTLP over HTTP; gRPC is not supported",
        )
        remedy = "write a URL such as http://127.0.0.1:4318; collectors have another port for gRPC, often 4317"
        problems.add(limit_message(what, value=repr(endpoint), limit=limit, remedy=remedy))
    header = server.tenant_header
    if header and _HEADER.fullmatch(header) is None:
        what, limit = "server.tenant_header: no name of a header", "letters, digits and hyphens"
        remedy = "write a name such as x-tenant"
        problems.add(limit_message(what, value=repr(header), limit=limit, remedy=remedy))
    if header and server.tenant_keys_variable:
        problems.add(
            "server.tenant_header: keys identify tenants already (server.tenant_keys_variable), and a client could "
            "claim to be another. Remedy: set one of the two"
        )
    problems.tell()
