"""The command line of `vsched serve`, and its output."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from tests.each_case import each_case
from tests.programs import printed_by
from vsched import fork_server
from vsched.aio import launcher
from vsched.api import http_server as http_server_module
from vsched.api import server as server_module
from vsched.api.server import RunningServer
from vsched.cli import app, serve_command
from vsched.config import Config
from vsched.engine import Engine, Environment
from vsched.errors import GroupLostError


class Served:
    """Stands for the server: records its configuration, is ready at once, drains, and ends as the test demands."""

    def __init__(self) -> None:
        self.config = Config()
        self.error: Exception | None = None

    async def serve(
        self,
        config: Config,
        *,
        on_progress: Callable[[str, str, float], None],
        on_ready: Callable[[RunningServer], None],
        on_drain: Callable[[], None],
        environment: Environment,
    ) -> None:
        self.config = config
        self.environment = environment
        on_progress("generate", "starting", 0.0)
        if self.error is not None:
            raise self.error
        address = (config.server.host, config.server.port)
        engine = cast("Engine", SimpleNamespace(model_name="demo", config=Config()))
        with socket.create_server(address) as listener:
            on_ready(RunningServer(listener, engine))
        on_drain()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    stand_in = Served()
    monkeypatch.setattr(server_module, "serve", stand_in.serve)
    monkeypatch.setattr(http_server_module, "forgo_models", lambda _: None)
    monkeypatch.setattr(launcher, "early_fork_servers", lambda *_: nullcontext({}))
    monkeypatch.setattr(fork_server.ForkServer, "start", lambda _: None)
    with caplog.at_level(logging.INFO, "vsched"):
        assert serve_command.logger.isEnabledFor(logging.INFO)
        yield stand_in


def serve(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)


def test_serve_without_a_terminal_reports_its_life_in_log_lines(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Host and port override the file, the environment and --set, as everywhere."""
    done = serve("checkpoint", "--set", "server.port=1", "--host", "127.0.0.2", "--port", "0")
    assert (done.exit_code, done.output) == (0, "")
    assert (served.config.server.host, served.config.server.port) == ("127.0.0.2", 0)
    assert served.config.model.path == "checkpoint"
    starting, placed, ready, draining, stopped = caplog.messages
    assert starting == "generate: starting"
    assert placed.startswith("placement = separate, because weights of 0 MiB are light")
    assert ready.startswith("demo is served at http://127.0.0.2:")
    assert "/v1 (ready after " in ready
    assert draining == "Draining: running requests finish, new ones are refused."
    assert stopped == "Stopped."


def test_serve_on_all_addresses_names_one(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """0.0.0.0 is no address to connect to. At a soft limit of files, connections would be closed without a response."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    serve("checkpoint", "--host", "0.0.0.0", "--port", "0")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (ready,) = [text for text in caplog.messages if "is served at" in text]
    assert "http://127.0.0.1:" in ready
    assert ", and on every other address of this machine (" in ready


def test_serve_that_fails_without_a_terminal_reports_why_in_a_log_line(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Every typo in its own line."""
    served.error = GroupLostError("generate: rank 0 exited with code 9")
    done = serve("checkpoint")
    assert (done.exit_code, done.output) == (2, "")
    assert [(one.levelname, one.getMessage()) for one in caplog.records[1:]] == [
        ("ERROR", "generate: rank 0 exited with code 9")
    ]
    caplog.clear()
    done = serve("checkpoint", "--port", "70000", "--set", "generate.slotz=1")
    assert (done.exit_code, done.output) == (2, "")
    assert [text.partition(" ")[0] for text in caplog.messages] == ["generate.slotz", "server.port"]


PROGRAM = "import sys; sys.argv[0] = 'vsched'; from vsched.cli.main import main; main()"


def test_vsched_prints_its_version() -> None:
    assert printed_by(PROGRAM, "--version").startswith("vsched 0.")


@each_case(
    ("line", "word"),
    [
        ("vsched sim", "simulate"),
        ("vsched serve --log", "--log-level"),
        ("vsched serve m --max-num-s", "--max-num-seqs"),
    ],
)
def test_vsched_completes_commands_and_options(line: str, word: str) -> None:
    said = printed_by(PROGRAM, _VSCHED_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    assert word in said


def test_serve_sets_level_and_format_of_the_log(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[dict[str, str]] = []
    monkeypatch.setattr(serve_command, "change_logging", lambda **given: found.append(given))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    serve("model", "--port", "0", "--log-level", "DEBUG", "--log-format", "json", "--seed", "1")
    assert found == [{"level": "debug", "form": "json"}]
    assert caplog.messages[0].startswith("--seed of vLLM has no effect")
    assert caplog.messages[1].startswith("VLLM_API_KEY has no effect: set ")
