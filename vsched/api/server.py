"""The HTTP server around an engine: start, progress, drain on the first signal, stop on the second."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial

import uvicorn

from vsched.aio.environment import Environment
from vsched.aio.replicas.worker_group import STOP_GRACE_S
from vsched.api.app import create_app
from vsched.api.connection import BoundedProtocol
from vsched.api.contract import ApiSettings, EngineContract
from vsched.api.middleware.tenants import read_tenant_keys
from vsched.config import Config
from vsched.engine import Engine, Progress
from vsched.errors import ConfigError
from vsched.media.allocator import map_large_blocks
from vsched.worker.capabilities import LeanPreprocessing
from vsched.worker.registry import load_worker

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that it is never the server that closes under a request."""
SWITCH_INTERVAL_S = 0.0005

LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only compared with
"""The addresses that stand for every address of a machine, and where it reaches itself."""


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RunningServer:
    """A server that answers, and its engine."""

    def __init__(self, listener: socket.socket, engine: Engine) -> None:
        self._listener = listener
        self.engine = engine
        self.stop_requested = asyncio.Event()

    @property
    def on_every_address(self) -> bool:
        """Whether it listens on all addresses of this machine."""
        return self._listener.getsockname()[0] in LOOPBACKS

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host, port = self._listener.getsockname()[:2]
        host = LOOPBACKS.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.asynccontextmanager
async def running_server(
    config: Config,
    *,
    on_progress: Progress | None = None,
    environment: Environment | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve while the context is open; leaving it drains, then stops.

    The server listens at once and answers 503 until the engine is ready, which is when the body runs.

    Raises:
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot start.
    """
    if not config.model.path:
        raise ConfigError("model.path: no checkpoint given. Remedy: vsched serve PATH")
    with contextlib.closing(_listen(config)) as listener:
        engine = Engine(config, on_progress=on_progress, environment=environment)
        server = _Server(_uvicorn_config(engine, config, listener.getsockname()[0]))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        running: RunningServer | None = None
        try:
            await engine.start()
            running = RunningServer(listener, engine)
            yield running
            if not running.stop_requested.is_set():
                await _unless(running.stop_requested, engine.drain())
        finally:
            hurried = running is not None and running.stop_requested.is_set()
            try:
                await engine.stop(grace_s=0 if hurried else STOP_GRACE_S)
            finally:
                server.should_exit = True
                server.force_exit = True
                await serving


async def serve(
    config: Config,
    *,
    on_progress: Progress | None = None,
    on_ready: Callable[[RunningServer], None],
    on_drain: Callable[[], None],
    environment: Environment | None = None,
) -> None:
    """Serve until a signal: the first SIGINT or SIGTERM drains, the second stops at once.

    Raises:
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot start.
    """
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    ready: list[RunningServer] = []

    def on_signal() -> None:
        if not ready:
            if not signalled.is_set():
                task.cancel()  # still loading: nothing to drain
        elif signalled.is_set():
            ready[0].stop_requested.set()
        else:
            on_drain()
        signalled.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    async with running_server(config, on_progress=on_progress, environment=environment) as running:
        favour_event_loop()
        ready.append(running)
        on_ready(running)
        await signalled.wait()


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
    map_large_blocks()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _uvicorn_config(engine: EngineContract, config: Config, address: str) -> uvicorn.Config:
    server = config.server
    settings = ApiSettings(
        api_key=_key(config, "api_key_variable"),
        admin_key=_key(config, "admin_key_variable"),
        tenant_keys=_tenant_keys(config),
        tenant_header=server.tenant_header.lower(),
        tenants_max=server.tenants_max,
        metrics_without_key=server.metrics_without_key,
        allowed_hosts=_allowed_hosts(config, address),
        cors_origins=server.cors_origins,
        body_bytes_max=server.body_bytes_max,
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
        bodies_bytes_max=server.bodies_bytes_max,
        logprobs_max=server.logprobs_max,
        answers_max=server.answers_max,
        strict_fields=server.strict_fields,
        usage_always=server.usage_always,
        root_path=server.root_path,
        body_wait_s=server.receive_s / 2,  # the rest is for the body to arrive
    )
    return uvicorn.Config(
        create_app(engine, settings),
        host=server.host,
        port=server.port,
        http=partial(BoundedProtocol, limits=server),  # type: ignore[arg-type]  # it is only called
        lifespan="off",
        access_log=False,
        log_config=None,  # its records go where all others go
        log_level="warning",
        limit_concurrency=server.max_connections,
        proxy_headers=False,  # who is on this machine is judged by the connection
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


def _allowed_hosts(config: Config, address: str) -> tuple[str, ...] | None:
    """Return the names by which clients may call; None for any.

    On a loopback address they are on this machine, and need no other name than the one that was configured. Elsewhere
    the names of balancers, services and proxies cannot be known here.
    """
    named = config.server.allowed_hosts
    if ipaddress.ip_address(address).is_loopback:
        return (*named, config.server.host)
    keys = config.server.api_key_variable or config.server.tenant_keys_variable
    if not named and not keys:
        logger.warning(
            "the server is open to the network, without a key, under any name. Remedy: set server.api_key_variable, or "
            "server.allowed_hosts to the names that clients use"
        )
    return named or None


def _key(config: Config, setting: str) -> str:
    """Return the key that is in the environment under the name that a setting gives; empty for none.

    Raises:
        ConfigError: When it is not there.
    """
    name = getattr(config.server, setting)
    if not name:
        return ""
    key = os.environ.get(name, "")
    if not key:
        raise ConfigError(
            f"server.{setting}: the environment variable {name} is empty or not set. "
            f"Remedy: set it, or leave server.{setting} empty to ask for no key"
        )
    return key


def _tenant_keys(config: Config) -> dict[str, str]:
    """Return the keys of tenants, by tenant.

    Raises:
        ConfigError: When the variable that a setting names is not there, or cannot be read.
    """
    text = _key(config, "tenant_keys_variable")
    path = "server.tenant_keys_variable"
    return read_tenant_keys(text, path=path) if text else {}


def _listen(config: Config) -> socket.socket:
    """Take the address before anything is loaded, so that a port in use is told at once."""
    host, port = config.server.host.removeprefix("[").removesuffix("]"), config.server.port
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=2048,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        # `create_server` adds the address once more; errors of a name's resolution are negative.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else str(error.strerror).partition(" (while")[0]
        key, remedy = _REMEDIES.get(code, _OTHER_HOST)
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port} ({reason}). Remedy: {remedy}"
        ) from error


_REMEDIES = {
    errno.EADDRINUSE: ("server.port", "choose a free port, or 0 to let the system choose"),
    errno.EACCES: ("server.port", "choose a port from 1024 on, or 0 to let the system choose"),
}
_OTHER_HOST = (
    "server.host",
    "give an address of this machine: 127.0.0.1 for local clients only, 0.0.0.0 or :: for all",
)


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do the work, but give it up when `stop` is set."""
    doing = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
    for one in (doing, stopping):
        one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one
