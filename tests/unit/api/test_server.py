"""The life of a server: the port first, then the engine; a signal drains, a second one stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import http.client
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from signal import SIGINT, SIGTERM
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import PATIENCE_S, patience, until
from vsched.aio.worker_groups import STOP_GRACE_S
from vsched.api import ApiSettings, create_app
from vsched.api import http_server as http_server_module
from vsched.api import server as server_module
from vsched.api.http_server import favour_event_loop, http_server
from vsched.api.server import RunningServer, running_server, serve
from vsched.config import Config, ModelConfig, ServerConfig, load_config
from vsched.engine import Engine
from vsched.errors import CheckpointError, ConfigError, GroupLostError


class Acted:
    """Calls to an engine that does nothing; those in `held` wait for their event, `errors` are raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.grace_s = -1.0
        self.held: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        for name in ("start", "drain", "stop"):
            monkeypatch.setattr(Engine, name, self._method(name))

    def _method(self, name: str) -> Any:
        async def act(_: Engine, *, grace_s: float = -1.0) -> None:
            self.calls.append(name)
            self.grace_s = grace_s
            if name in self.errors:
                raise self.errors[name]
            try:
                if name in self.held:
                    await self.held[name].wait()
            except asyncio.CancelledError:
                self.calls.append(f"{name} cancelled")
                raise

        return act


class QuietServer:
    """Stands for uvicorn, which checks only now and then whether it should exit."""

    made: list[QuietServer]
    written: asyncio.Event
    """Set once all responses are sent."""

    def __init__(self, config: object) -> None:
        self.should_exit = self.force_exit = self.over = False
        QuietServer.made.append(self)

    async def serve(self, sockets: list[socket.socket]) -> None:
        await until(lambda: self.should_exit)
        await until(lambda: self.force_exit or self.written.is_set())
        self.over = True


@pytest.fixture
async def acted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Acted]:
    """No freezing of all objects, which takes a second in the large process of the tests."""
    QuietServer.made = []
    QuietServer.written = asyncio.Event()
    QuietServer.written.set()
    monkeypatch.setattr(http_server_module, "HttpServer", QuietServer)
    monkeypatch.setattr(server_module, "favour_event_loop", lambda: None)
    yield Acted(monkeypatch)
    assert all(server.over for server in QuietServer.made), "a server serves on"
    loop = asyncio.get_running_loop()
    for number in (SIGINT, SIGTERM):
        loop.remove_signal_handler(number)


def config(**server: object) -> Config:
    return Config(model=ModelConfig(path="nowhere"), server=ServerConfig(**{"port": 0, **server}))  # type: ignore[arg-type]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def is_free(url: str) -> bool:
    """Return True if the address of a server on 127.0.0.1 can be bound again."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port_of(url)))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (Config(), None, "model.path: no checkpoint given"),
        (config(api_key_variable="VSCHED_NO_SUCH_KEY"), None, "VSCHED_NO_SUCH_KEY is empty or not"),
        (config(host="host.invalid."),
         socket.gaierror(-2, "Name or service not known (while attempting to bind)"),
         r"server.host: cannot listen on host.invalid.:0 \(Name or service not known\)"),
        (config(), OSError(errno.EADDRINUSE, "no"),
         (r"^server.port: cannot listen on 127.0.0.1:0 \(Address already in use\). "
          "Remedy: choose a free port, or 0 to let the system choose$")),
        (config(), OSError(errno.EACCES, "no"), "server.port: .*Permission denied.* from 1024 on"),
        (config(host="192.0.2.1"), OSError(errno.EADDRNOTAVAIL, "no"),
         "server.host: .*Cannot assign .* 0.0.0.0 or :: for all"),
        (config(host="::1"), OSError(errno.EAFNOSUPPORT, "no"),
         "server.host: .*not supported.* 127.0.0.1 for local"),
    ],
    ids=["no model", "no key", "no host", "busy port", "low port", "foreign address", "no family"],
)  # fmt: skip
async def test_server_that_cannot_be_made_is_reported_and_leaves_no_socket(
    acted: Acted,
    monkeypatch: pytest.MonkeyPatch,
    settings: Config,
    error: OSError | None,
    message: str,
) -> None:
    """The error comes with its remedy, before anything is loaded."""
    listeners: list[socket.socket] = []
    real = socket.create_server

    def create(address: tuple[str, int], **kind: int) -> socket.socket:
        if error is not None:
            raise error
        listeners.append(real(address, **kind))  # type: ignore[arg-type]
        return listeners[-1]

    monkeypatch.setattr(socket, "create_server", create)
    with pytest.raises(ConfigError, match=message):
        async with running_server(settings):
            pass
    assert (acted.calls, QuietServer.made) == ([], [])
    assert all(listener.fileno() == -1 for listener in listeners)


def test_server_key_is_its_variable_without_line_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of secrets end with one, and no header can have it."""
    monkeypatch.setenv("VSCHED_TEST_KEY", " secret\n")
    settings = config(api_key_variable="VSCHED_TEST_KEY", admin_key_variable="VSCHED_TEST_KEY")
    found = server_module.api_settings(settings, "127.0.0.1")
    assert (found.api_key, found.admin_key) == ("secret", "secret")


async def test_server_refuses_a_missing_folder() -> None:
    sets = ["model.path=demo", "media.directory=/nowhere", "adapters.directory=/proc"]
    message = (
        "^media.directory: not a folder: value '/nowhere', .* Remedy: create /nowhere, or [^\n]*$"
    )
    with pytest.raises(ConfigError, match=message):
        async with running_server(load_config(None, sets=sets, environ={}).config):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "::1", "[::1]", "::"])
async def test_server_url_can_be_reached(acted: Acted, host: str) -> None:
    """A loopback address for any bind address; `::` is reachable over IPv4, too."""
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    async with running_server(config(host=host)) as running:
        assert running.url.startswith("http://[::1]:" if ":" in host else "http://127.0.0.1:")
        assert running.on_every_address == (host in {"0.0.0.0", "::"})
        reached = {"0.0.0.0": ["127.0.0.1"], "::": ["::1", "127.0.0.1"]}
        for address in reached.get(host, [host.strip("[]")]):
            socket.create_connection((address, port_of(running.url)), PATIENCE_S).close()


def test_server_leaves_the_layout_of_logs_alone() -> None:
    """Uvicorn installs handlers of its own by default."""
    settings = config()
    http_server(create_app(Engine(settings), ApiSettings()), settings)
    assert logging.getLogger("uvicorn").handlers == []
    assert logging.getLogger("uvicorn").propagate


@pytest.mark.parametrize(
    ("fails", "error", "calls"),
    [
        ("", None, ["start", "drain", "stop"]),
        ("start", CheckpointError("corrupt"), ["start", "stop"]),
        ("start", GroupLostError("gone"), ["start", "stop"]),
        ("start", OSError("odd"), ["start", "stop"]),
        ("body", KeyError("body"), ["start", "stop"]),  # requests are not waited for
        ("drain", RuntimeError("drain"), ["start", "drain", "stop"]),
        ("stop", RuntimeError("stop"), ["start", "drain", "stop"]),
    ],
)
async def test_server_ends_whatever_fails(
    acted: Acted, fails: str, error: Exception | None, calls: list[str]
) -> None:
    """Errors reach the caller, the engine is stopped, and the address is free again."""
    url = ""
    if error is not None:
        acted.errors[fails] = error
    with pytest.raises(type(error), match=str(error)) if error else contextlib.nullcontext():
        async with running_server(config()) as running:
            url = running.url
            assert (is_free(url), acted.calls) == (False, ["start"])
            if error is not None and fails == "body":
                raise error
    assert acted.calls == calls
    assert error or acted.grace_s == STOP_GRACE_S
    assert fails == "start" or is_free(url)


class Served:
    """A server that runs until a signal, as `vsched serve` does."""

    def __init__(self, acted: Acted) -> None:
        self.ready = asyncio.Event()
        self.on_drain = Mock()
        self._acted = acted
        serving = serve(config(), on_ready=self._on_ready, on_drain=self.on_drain)
        self.task = asyncio.create_task(serving)

    def _on_ready(self, running: RunningServer) -> None:
        self._acted.calls.append("ready")
        self.ready.set()

    async def end(self) -> None:
        async with patience():
            await self.task


async def test_server_favours_the_event_loop(acted: Acted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are frozen for the garbage collector, garbage of requests is still collected; threads switch often."""
    monkeypatch.setattr(server_module, "favour_event_loop", favour_event_loop)
    interval_s = sys.getswitchinterval()
    gc.unfreeze()
    try:
        served = Served(acted)
        await served.ready.wait()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects(2)) < 10_000
        assert sys.getswitchinterval() < 0.001
    finally:  # a server's process is its own, a test's is not
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
    signal.raise_signal(SIGINT)
    await served.end()


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize(
    ("number", "second"), [(SIGINT, None), (SIGTERM, None), (SIGINT, SIGINT), (SIGINT, SIGTERM)]
)
async def test_server_first_signal_drains_and_a_second_one_stops_at_once(
    acted: Acted, number: signal.Signals, second: signal.Signals | None, drained: bool
) -> None:
    """Live requests are awaited, and ranks have their grace; after a second Ctrl-C, neither is.

    Nor are, after the drain, slow clients that read the last responses.
    """
    held = QuietServer.written if drained else acted.held.setdefault("drain", asyncio.Event())
    held.clear()
    served = Served(acted)
    await served.ready.wait()
    signal.raise_signal(number)
    await until(lambda: ("stop" if drained else "drain") in acted.calls)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not served.task.done()
    if second is None:
        held.set()
    else:
        signal.raise_signal(second)
    await served.end()
    cancelled = ["drain cancelled"] if second and not drained else []
    assert acted.calls == ["start", "ready", "drain", *cancelled, "stop"]
    served.on_drain.assert_called_once()
    assert acted.grace_s == (0 if cancelled else STOP_GRACE_S)


@pytest.mark.parametrize("signals", [1, 2])
async def test_server_signal_while_it_loads_stops_it(acted: Acted, signals: int) -> None:
    """There is nothing to drain; a second signal does not keep the ranks from being stopped."""
    acted.held["start"] = asyncio.Event()
    served = Served(acted)
    await until(lambda: acted.calls)
    for _ in range(signals):
        signal.raise_signal(SIGTERM)
    await until(served.task.done)
    assert served.task.cancelled()
    assert (acted.calls, served.on_drain.called) == (["start", "start cancelled", "stop"], False)


def status_of(port: int) -> int:
    """Status of the response to a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/ready")
        return connection.getresponse().status


async def test_server_answers_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 until the engine is ready, over a real socket; afterwards the port is closed."""
    acted = Acted(monkeypatch)
    acted.held["start"] = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def run() -> None:
        async with running_server(config(port=port)):
            pass

    task = asyncio.create_task(run())
    await until(lambda: acted.calls)
    assert await asyncio.to_thread(status_of, port) == 503
    acted.held["start"].set()
    async with patience():
        await task
    with pytest.raises(ConnectionRefusedError):
        status_of(port)
