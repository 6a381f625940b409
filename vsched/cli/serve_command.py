"""`vsched serve`: serve a checkpoint over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vsched.cli import app
from vsched.cli.vllm_flags import NOTES, ServeCommand
from vsched.errors import VschedError
from vsched.logs import change_logging
from vsched.terminal.options import CheckpointArgument, ConfigOption, SetOption, load_served

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

    from vsched.api.server import RunningServer
    from vsched.config import Config
    from vsched.fork_server import ForkServer

logger = logging.getLogger("vsched.serve")


@app.command(cls=ServeCommand)
def serve(
    context: typer.Context,
    path: CheckpointArgument = "",
    config: ConfigOption = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on, 0.0.0.0 for all; server.host."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on, 0 for any; server.port."),
    ] = None,
    record: Annotated[
        str, typer.Option(help="Record the scheduler's events in a file; record.path.")
    ] = "",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the requests of a killed server; record.resume."),
    ] = False,
    ray: Annotated[
        str,
        typer.Option(
            help="Place replicas with Ray: HOST:PORT, or auto; cluster.ray.", show_default=False
        ),
    ] = "",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(
            case_sensitive=False,
            help="Level of vsched's log lines; VSCHED_LOG_LEVEL, info by default.",
        ),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Format of log lines; VSCHED_LOG_FORMAT, text by default."),
    ] = None,
    assignments: SetOption = None,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible HTTP API. Ctrl-C drains; a second one stops at once.

    Flags of `vllm serve` are understood, too: docs/reference/vllm-flags.md.
    """
    from vsched.fork_server import ForkServer

    change_logging(level=log_level or "", form=log_format or "")
    for note in context.meta[NOTES]:
        logger.info("%s", note)
    given = {
        "model.path": path,
        "server.host": host,
        "server.port": port,
        "record.path": record,
        "record.resume": "true" if resume else "",
        "cluster.ray": ray,
    }
    overrides = [*(assignments or ())]
    overrides += [f"{key}={value}" for key, value in given.items() if value not in (None, "")]
    with contextlib.closing(ForkServer()) as idle:
        idle.start()  # first, because its imports take most of the start-up time
        _run(config, overrides, idle)


def _run(config: Path | None, overrides: list[str], idle: ForkServer) -> None:
    """Load the configuration and serve; on a terminal raise errors, elsewhere log them."""
    from rich.console import Console

    from vsched.aio.launcher import early_fork_servers
    from vsched.devices import log_devices

    console = Console(stderr=True)
    try:
        loaded = load_served(config, overrides, only_serves=True)
        settings = loaded.config
        log_devices(loaded.devices)
        with early_fork_servers(settings, idle) as started:
            _serve(settings, console, started)
    except VschedError as error:
        if console.is_terminal:
            raise
        for line in str(error).splitlines():
            logger.error("%s", line)  # noqa: TRY400 - the message says it all
        raise typer.Exit(2) from None


def _serve(
    settings: Config, console: Console, started: Mapping[tuple[str, ...], ForkServer]
) -> None:
    """Serve until a signal, and report progress: as sentences on a terminal, as log lines elsewhere."""
    started_s = time.monotonic()
    # Imports create little garbage, and collection takes a tenth of their time; `favour_event_loop`
    # turns it on.
    gc.disable()
    import uvloop

    from vsched.api.http_server import forgo_models, raise_open_files_limit
    from vsched.api.server import serve as serve_http
    from vsched.config.devices import placement_here
    from vsched.engine import Environment, make_launcher
    from vsched.terminal.progress import loading_progress

    raise_open_files_limit()
    forgo_models(settings)
    environment = Environment(make_launcher=partial(make_launcher, started=started))

    def say(text: str) -> None:
        if console.is_terminal:
            console.print(text, soft_wrap=True, highlight=False)
        else:
            logger.info("%s", text)

    async def run() -> None:
        with contextlib.ExitStack() as bars:
            report = bars.enter_context(loading_progress(console))

            def on_ready(server: RunningServer) -> None:
                bars.close()
                if settings.placement == "auto" and server.engine.config.encode.replicas:
                    say(f"{placement_here(settings)}.")
                where = ", and on every other address of this machine" * server.on_every_address
                say(
                    f"{server.engine.model_name} is served at {server.url}/v1{where} "
                    f"(ready after {time.monotonic() - started_s:.1f} s)"
                )
                if console.is_terminal:
                    say("Ctrl-C drains and stops; a second one stops at once.")

            def on_drain() -> None:
                say("Draining: running requests finish, new ones are refused.")

            await serve_http(
                settings,
                on_progress=report,
                on_ready=on_ready,
                on_drain=on_drain,
                environment=environment,
            )

    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run())
    say("Stopped.")
