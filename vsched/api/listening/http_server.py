"""Uvicorn within the limits of the configuration, and what a process does that is a server's alone."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from vsched.api.connection import BoundedProtocol
from vsched.config import Config
from vsched.media.allocator import map_large_blocks, return_freed_memory
from vsched.worker.capabilities import LeanPreprocessing
from vsched.worker.registry import load_worker

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that it is never the server that closes under a request."""
SWITCH_INTERVAL_S = 0.0005


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, config: Config) -> HttpServer:
    """Return what serves an application once its `serve` is awaited."""
    server = config.server
    return HttpServer(
        uvicorn.Config(
            app,
            host=server.host,
            port=server.port,
            http=partial(BoundedProtocol, limits=server),  # type: ignore[arg-type]  # it is only called
            ws="none",  # requests to upgrade to WebSocket are ignored, like all others
            lifespan="off",
            access_log=False,
            log_config=None,  # its records go where all others go
            log_level="warning",
            limit_concurrency=server.max_connections,
            proxy_headers=False,  # who is on this machine is judged by the connection
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )


def forgo_models(config: Config) -> None:
    """Leave out what only models need, for the life of this process, which is to be the server's alone."""
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    if isinstance(plugin, LeanPreprocessing):
        plugin.forgo_models(config.model.path)


def favour_event_loop() -> None:
    """Shorten what the event loop, and so every heartbeat, waits for in this process, which is the server's alone.

    Call it when all is loaded: collections pass over that from now on, for it lives as long as the process. Looking at
    it took up to 250 ms. Large blocks go back to the system a part at a time. A thread that has the interpreter's lock
    hands it on after half a millisecond instead of five: while threads prepare requests, the loop waits for its turn
    after each of theirs.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    return_freed_memory()
    map_large_blocks()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
