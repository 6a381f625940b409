"""Uvicorn within the configured limits, and process-wide tuning for server processes."""

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
