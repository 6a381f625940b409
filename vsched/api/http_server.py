"""Uvicorn within the configured limits, and process-wide tuning for server processes."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from vsched.api.connection import BoundedProtocol
from vsched.config import Config
from vsched.errors import ConfigError
from vsched.media.allocator import map_large_blocks, return_freed_memory
from vsched.worker.registry import load_worker

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that the server never closes one just as a request is sent."""
SWITCH_INTERVAL_S = 0.0005


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: vsched handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, config: Config) -> HttpServer:
    """Create the server of an application; await its `serve`."""
    server = config.server
    return HttpServer(
        uvicorn.Config(
            app,
            host=server.host,
            port=server.port,
            http=partial(BoundedProtocol, limits=server),  # type: ignore[arg-type] # only called
            ws="none",  # WebSocket upgrades are ignored, like all others
            lifespan="off",
            access_log=False,
            log_config=None,  # uvicorn uses the same log handlers as everything else
            log_level="warning",
            limit_concurrency=server.max_connections,
            proxy_headers=False,  # local clients are recognized by their connection
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )


def forgo_models(config: Config) -> None:
    """Disable library parts that only models need, for the life of this process, which only serves HTTP."""
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    plugin.forgo_models(config.model.path)


def favour_event_loop() -> None:
    """Reduce delays of the event loop, and so of heartbeats, in a server process.

    Call it after loading: later collections skip the objects that exist now, which live as long as the process;
    scanning them took up to 250 ms. Large memory blocks are returned to the system separately. A thread releases the
    GIL after half a millisecond instead of five: while threads prepare requests, the loop waits for its turn after each
    of them.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    return_freed_memory()
    map_large_blocks()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


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
