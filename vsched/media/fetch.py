"""Fetch one image or video over HTTP, from configured hosts only.

The usual vulnerability in such code is that URL checks and the connection use different parsers or DNS lookups. Here
the URL is parsed once, the name is resolved once, every resulting address is checked, and the connection goes to the
checked address, to which the network backend of httpcore is pinned. Redirects are refused, not followed.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpcore

from vsched.errors import RequestRefused, limit_message
from vsched.media.formats import IMAGE, MediaKind

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig

_PORTS = {"http": 80, "https": 443}
_URL_CHARACTERS_MAX = 2048
_HEADERS = (
    ("User-Agent", "vsched"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)
# IPv6 ranges that embed an IPv4 address: their destination depends on the network, so none is trusted.
_TUNNELS = tuple(
    ipaddress.IPv6Network(network)
    for network in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)

_BROKEN = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol)
"""Exceptions of httpcore for a failed connection or an invalid response."""

Reserve = Callable[[int], None]
"""Reserves bytes before they are allocated; raises an error over the limit."""


def uncounted(_size: int) -> None:
    """Do not count."""


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL; it is parsed only once."""

    scheme: str
    host: str
    port: int
    request_target: str

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


def _refuse(
    kind: MediaKind, message: str, code: str = "url_refused", status: int = 400
) -> RequestRefused:
    return RequestRefused(message, code=f"{kind.noun}_{code}", status=status)


def parse(reference: str, settings: MediaConfig, kind: MediaKind = IMAGE) -> Target:
    """Parse a URL and check its host against the allow-list.

    Raises:
        RequestRefused: If it is malformed or its host and port are not configured.
    """
    if not settings.hosts:
        message = (
            f"remote {kind.noun}s are switched off: media.hosts is empty. "
            f"Remedy: send the {kind.noun} as a data: URL or add its host to media.hosts."
        )
        raise _refuse(kind, message)
    reference = reference.strip()  # like browsers
    malformed = _refuse(
        kind,
        f"the {kind.noun} URL is malformed. Remedy: send a plain http(s)://host/path URL of at most "
        f"{_URL_CHARACTERS_MAX} characters.",
    )
    if len(reference) > _URL_CHARACTERS_MAX or any(
        not "!" <= character <= "~" or character in '\\<>"{}|^`' for character in reference
    ):
        raise malformed
    try:
        parts = urlsplit(reference)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise malformed from None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not host or "@" in parts.netloc or "%" in parts.netloc:
        raise malformed
    target = Target(
        scheme,
        f"[{host}]" if ":" in host else host,
        _PORTS[scheme] if port is None else port,
        (parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
    )
    if not _is_listed(target, settings.hosts):
        raise _refuse(
            kind,
            f"the {kind.noun} URL's host and port are not allowed: an entry of media.hosts without a port "
            f"allows http on 80 and https on 443. Remedy: send the {kind.noun} as a data: URL or add host or "
            "host:port to media.hosts.",
        )
    return target


def _is_listed(target: Target, hosts: tuple[str, ...]) -> bool:
    names = {f"{target.host}:{target.port}"}
    if target.port == _PORTS[target.scheme]:
        names.add(target.host)
    return any(entry.lower() in names for entry in hosts)


def is_public(address: Address) -> bool:
    """True if an address is public; an embedded IPv4 address is checked instead of the IPv6 form."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _TUNNELS):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _is_permitted(address: Address, *, private: bool) -> bool:
    if is_public(address):
        return True
    plain = getattr(address, "ipv4_mapped", None) or address
    # Metadata services use link-local addresses: no configuration allows those.
    return private and (plain.is_loopback or plain.is_private) and not plain.is_link_local


async def resolve(target: Target, *, private: bool, kind: MediaKind = IMAGE) -> str:
    """Resolve a host once and return the address to connect to.

    Raises:
        RequestRefused: If it does not resolve, or any of its addresses is not permitted.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            target.host.strip("[]"), target.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError):
        raise _refuse(
            kind, f"the {kind.noun} URL's host does not resolve. Remedy: check the URL."
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(
        _is_permitted(ipaddress.ip_address(address), private=private) for address in addresses
    ):
        raise _refuse(
            kind,
            f"the {kind.noun} URL leads to an address that is not allowed. "
            f"Remedy: use a public host or send the {kind.noun} as a data: URL.",
        )
    return addresses[0]


class _PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to a fixed address regardless of the host name, which TLS still checks the certificate against."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        del host
        return await self._backend.connect_tcp(
            self._address, port, timeout, local_address, socket_options
        )


async def fetch(
    reference: str,
    settings: MediaConfig,
    reserve: Reserve = uncounted,
    kind: MediaKind = IMAGE,
) -> bytes:
    """Fetch the body of an http(s) URL; `reserve` counts its bytes as they arrive.

    Blocks: up to `settings.fetch_s`, including name resolution and TLS.

    Raises:
        RequestRefused: If the URL is not allowed, the fetch fails, the status is not 200, or the body is too large.
    """
    target = parse(reference, settings, kind)
    try:
        async with asyncio.timeout(settings.fetch_s):
            address = await resolve(
                target, private=_is_listed(target, settings.private_hosts), kind=kind
            )
            return await _get(target, address, settings, reserve, kind)
    except TimeoutError:
        message = limit_message(
            f"the {kind.noun} could not be fetched in time",
            value=f"over {settings.fetch_s:g} s",
            limit=f"{settings.fetch_s:g} s",
            remedy="use a faster host or raise media.fetch_s",
        )
        raise _refuse(kind, message, "fetch_failed") from None
    except (OSError, ValueError, *_BROKEN):
        message = f"the {kind.noun} could not be fetched. Remedy: check the URL and its host."
        raise _refuse(kind, message, "fetch_failed") from None


_trusted = functools.cache(ssl.create_default_context)
"""Certificates of authorities, read once: that blocks the event loop for tens of milliseconds."""


async def _get(
    target: Target, address: str, settings: MediaConfig, reserve: Reserve, kind: MediaKind
) -> bytes:
    url = httpcore.URL(
        scheme=target.scheme.encode(),
        host=target.host.strip("[]").encode(),
        port=target.port,
        target=target.request_target.encode(),
    )
    trusted = _trusted() if target.scheme == "https" else None
    pinned = _PinnedBackend(address)
    accepted = ("Accept", ", ".join(kind.formats))
    headers = [("Host", target.host_header), accepted, *_HEADERS]
    async with (
        httpcore.AsyncConnectionPool(ssl_context=trusted, network_backend=pinned) as pool,
        pool.stream("GET", url, headers=headers) as response,
    ):
        _check_status(response.status, kind)
        return await _read_body(response, kind.bytes_max(settings), reserve, kind)


async def _read_body(
    response: httpcore.Response, limit: int, reserve: Reserve, kind: MediaKind
) -> bytes:
    headers = {name.lower(): value for name, value in response.headers}
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        # Compression was not requested, and would bypass the size limit.
        raise ValueError
    if int(headers.get(b"content-length", b"0")[:18]) > limit:
        raise refuse_size(f"over {limit}", limit, kind)
    content = bytearray()
    async for piece in response.aiter_stream():
        if len(content) + len(piece) > limit:
            raise refuse_size(f"over {limit}", limit, kind)
        reserve(len(piece))
        content += piece
    return bytes(content)


def refuse_size(size: int | str, limit: int, kind: MediaKind = IMAGE) -> RequestRefused:
    """Error for a file with too many bytes."""
    message = limit_message(
        f"the encoded {kind.noun} is too large",
        value=f"{size} bytes",
        limit=f"{limit} bytes",
        remedy=f"send a smaller {kind.noun} or raise media.{kind.limit}",
    )
    return _refuse(kind, message, "too_large", 413)


def _check_status(status: int, kind: MediaKind) -> None:
    if status == 200:
        return
    remedy = "give the final URL" if 300 <= status < 400 else "check the URL"
    message = limit_message(
        f"the {kind.noun}'s host did not return the {kind.noun}",
        value=f"status {status}",
        limit="status 200, redirects are not followed",
        remedy=remedy,
    )
    raise _refuse(kind, message, "fetch_failed")
