"""The HTTP server of an engine: start, progress, drain on the first signal, stop on the second."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec

from vsched.aio.worker_groups import STOP_GRACE_S
from vsched.api.app import create_app
from vsched.api.contract import ApiSettings
from vsched.api.http_server import favour_event_loop, http_server, listen
from vsched.api.middleware import read_tenant_keys
from vsched.api.processes.supervisor import ApiProcesses
from vsched.api.resuming import Resumption, open_resumption
from vsched.api.tracing import open_tracing, traces_url
from vsched.config import Config
from vsched.config.checks import check_folders
from vsched.engine import Engine, Environment, Progress
from vsched.errors import ConfigError
from vsched.record.recorder import check_record_path

logger = logging.getLogger(__name__)
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only compared with
"""Wildcard addresses, and the loopback address that reaches each."""


class _InProcessFrontend:
    """Serves HTTP in the engine's process."""

    def __init__(
        self,
        engine: Engine,
        settings: ApiSettings,
        listener: socket.socket,
        resumption: Resumption,
    ) -> None:
        self.pids: list[int] = []
        self._tracing = open_tracing(settings.traces_url)
        app = create_app(engine, settings, resumption=resumption, tracing=self._tracing)
        self._server = http_server(app, engine.config)
        self._listener = listener

    async def start_serving(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def ready(self) -> None:
        pass

    async def finish_responses(self, within_s: float) -> None:
        """Accept no more connections, and send the responses in progress to their end.

        Blocks: for at most `within_s`.
        """
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=within_s)

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        if self._tracing is not None:
            await self._tracing.close()


class RunningServer:
    """A running server and its engine."""

    def __init__(
        self,
        listener: socket.socket,
        engine: Engine,
        front: ApiProcesses | _InProcessFrontend | None = None,
    ) -> None:
        self._listener = listener
        self._front = front
        self.engine = engine
        self.stop_requested = asyncio.Event()

    @property
    def api_pids(self) -> list[int]:
        """Process ids of the API processes, if there are any."""
        return [] if self._front is None else self._front.pids

    @property
    def on_every_address(self) -> bool:
        """True if the server listens on all addresses of this machine."""
        return self._listener.getsockname()[0] in LOOPBACKS

    @property
    def url(self) -> str:
        """URL of the server for clients on this machine."""
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
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: If the engine cannot start.
    """
    if not config.model.path:
        raise ConfigError("model.path: no checkpoint given. Remedy: vsched serve PATH")
    check_folders(config)
    with contextlib.closing(listen(config)) as listener:
        engine = Engine(config, on_progress=on_progress, environment=environment)
        check_record_path(config)  # the journal is part of the record
        resumption = open_resumption(config)
        settings = api_settings(config, listener.getsockname()[0])
        front: ApiProcesses | _InProcessFrontend
        if config.server.processes > 1:
            front = ApiProcesses(engine, settings, listener)
        else:
            front = _InProcessFrontend(engine, settings, listener, resumption)
        running: RunningServer | None = None
        resuming: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        drained_by_s = 0.0
        try:
            await front.start_serving()
            # Before a new record replaces the one that describes these requests.
            await resumption.read_left()
            await engine.start()
            await front.ready()
            resuming = asyncio.create_task(resumption.submit_left())
            running = RunningServer(listener, engine, front)
            yield running
            drained_by_s = loop.time() + engine.config.deadlines.drain_s
            if not running.stop_requested.is_set():
                await _unless(running.stop_requested, engine.drain())
        finally:
            hurried = running is not None and running.stop_requested.is_set()
            if resuming is not None:
                resuming.cancel()
            try:
                await engine.stop(grace_s=0 if hurried else STOP_GRACE_S)
                left_s = drained_by_s - loop.time()
                if running is not None and not hurried and left_s > 0:
                    await _unless(running.stop_requested, front.finish_responses(left_s))
            finally:
                await front.stop()


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
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: If the engine cannot start.
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


def api_settings(config: Config, address: str) -> ApiSettings:
    """Settings of the HTTP layer for a server that listens on this address.

    Raises:
        ConfigError: If a configured key is not in the environment or is malformed, or a package for traces is missing.
    """
    server = config.server
    keys = _key(config, "tenant_keys_variable")
    resolved = {
        "allowed_hosts": _allowed_hosts(config, address),
        "tenant_header": server.tenant_header.lower(),
    }
    return ApiSettings(
        **{**msgspec.structs.asdict(server), **resolved},
        api_key=_key(config, "api_key_variable"),
        admin_key=_key(config, "admin_key_variable"),
        tenant_keys=read_tenant_keys(keys, path="server.tenant_keys_variable") if keys else {},
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
        traces_url=traces_url(server),
        body_wait_s=server.receive_s / 2,  # the rest is for the body to arrive
    )


def _allowed_hosts(config: Config, address: str) -> tuple[str, ...]:
    """Host names that clients may use.

    On a loopback address, all clients are local and need only the configured name. Elsewhere, the names of load
    balancers, services and proxies cannot be known here.
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
    return named or ("*",)


def _key(config: Config, setting: str) -> str:
    """Read a key from the environment variable that a setting names; empty for none.

    Raises:
        ConfigError: If the variable is not set.
    """
    name = getattr(config.server, setting)
    if not name:
        return ""
    # Files of secrets end with a line break, which no header can have.
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"server.{setting}: the environment variable {name} is empty or not set. "
            f"Remedy: set it, or leave server.{setting} empty to ask for no key"
        )
    return key


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Await the work, but cancel it when `stop` is set."""
    doing = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
    for one in (doing, stopping):
        one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one
