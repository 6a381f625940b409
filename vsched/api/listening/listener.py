"""The listening address of a server: bound before anything is loaded, by one process or by several."""

from __future__ import annotations

import errno
import os
import socket

from vsched.config import Config
from vsched.errors import ConfigError

_REMEDIES = {
    errno.EADDRINUSE: ("server.port", "choose a free port, or 0 to let the system choose"),
    errno.EACCES: ("server.port", "choose a port from 1024 on, or 0 to let the system choose"),
}
_OTHER_HOST = (
    "server.host",
    "give an address of this machine: 127.0.0.1 for local clients only, 0.0.0.0 or :: for all",
)


def listen(config: Config) -> socket.socket:
    """Bind the address before anything is loaded, so that a port in use is reported at once.

    With several processes, the returned socket accepts no connections: it reserves the address for the `another` call
    of each process.

    Raises:
        ConfigError: If the address cannot be bound.
    """
    host, port = config.server.host.removeprefix("[").removesuffix("]"), config.server.port
    try:
        made = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=2048,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        # The address was free. Sockets that share it must set SO_REUSEPORT before they are bound.
        return made if config.server.processes == 1 else _kept(made)
    except OSError as error:
        # `create_server` repeats the address in its message; errors of name resolution are negative.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else str(error.strerror).partition(" (while")[0]
        key, remedy = _REMEDIES.get(code, _OTHER_HOST)
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port} ({reason}). Remedy: {remedy}"
        ) from error


def _kept(made: socket.socket) -> socket.socket:
    with made:
        kept, address = _unbound(made), made.getsockname()
    kept.bind(address)
    return kept


def another(kept: socket.socket) -> socket.socket:
    """Create another socket on the reserved address; the system distributes connections among them."""
    made = _unbound(kept)
    made.bind(kept.getsockname())
    return made


def _unbound(like: socket.socket) -> socket.socket:
    made = socket.socket(like.family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if like.family == socket.AF_INET6:
        alone = like.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
    return made
