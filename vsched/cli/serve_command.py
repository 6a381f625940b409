"""`vsched serve`: serve a checkpoint over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Annotated

import typer

from vsched.cli import app
from vsched.terminal.options import ConfigOption, SetOption, load


@app.command()
def serve(
    path: Annotated[
        str, typer.Argument(help="Folder of the checkpoint; model.path.", show_default=False)
    ] = "",
    config: ConfigOption = None,
    record: Annotated[
        str, typer.Option(help="Record what the scheduler does into a file; record.path.")
    ] = "",
    assignments: SetOption = None,
) -> None:
    """Serve a checkpoint over OpenAI's HTTP interface. Ctrl-C drains; a second one stops at once."""
    import uvloop
    from rich.console import Console

    from vsched.api.server import RunningServer, forgo_models
    from vsched.api.server import serve as serve_http
    from vsched.terminal.progress import loading_bars

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    overrides = [*(assignments or ())]
    if path:
        overrides.append(f"model.path={path}")
    if record:
        overrides.append(f"record.path={record}")
    settings = load(config, overrides).config
    forgo_models(settings)
    console = Console(stderr=True)
    started_s = time.monotonic()

    async def run() -> None:
        with contextlib.ExitStack() as bars:
            report = bars.enter_context(loading_bars(console))

            def on_ready(server: RunningServer) -> None:
                bars.close()
                console.print(
                    f"[bold]{server.engine.model_name}[/] is served at {server.url}/v1 "
                    f"(ready after {time.monotonic() - started_s:.1f} s)"
                )
                console.print("Ctrl-C drains and stops; a second one stops at once.", style="dim")

            def on_drain() -> None:
                console.print("Draining: running requests finish, new ones are refused.")

            await serve_http(settings, on_progress=report, on_ready=on_ready, on_drain=on_drain)

    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run())
    console.print("Stopped.")
