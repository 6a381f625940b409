"""`vsched host`: start ranks for engines on other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from vsched.cli import app
from vsched.errors import ConfigError

logger = logging.getLogger("vsched.host")


@app.command()
def host(
    listen: Annotated[
        str, typer.Option(help="Address for engines, tcp://HOST:PORT; port 0 for any.")
    ] = "",
    key_file: Annotated[
        str, typer.Option(help="File with the secret shared with engines.", show_default=False)
    ] = "",
    name: Annotated[
        str, typer.Option(help="Name of this host in logs; its own by default.", show_default=False)
    ] = "",
    make_key: Annotated[
        Path | None,
        typer.Option(help="Write a new secret to this file and exit."),
    ] = None,
) -> None:
    """Start ranks for engines on other hosts, and forward decisions and data; see docs/hosts.md."""
    import uvloop

    from vsched.aio.hosts.link import read_key_file, write_key_file
    from vsched.aio.hosts.server import serve_host

    if make_key is not None:
        write_key_file(make_key)
        typer.echo(f"{make_key} has a new key. Copy it to the engine's host and to all others.")
        return
    if not listen or not key_file:
        raise ConfigError(
            "vsched host: --listen and --key-file are needed. Remedy: vsched host --listen tcp://0.0.0.0:7700 "
            "--key-file FILE, with a file that `vsched host --make-key FILE` made"
        )
    shared = read_key_file(key_file, key="--key-file")

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None, "this is one"
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await serve_host(
            listen, shared, name=name, on_ready=lambda where: logger.info("listening on %s", where)
        )

    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run())
    logger.info("stopped")
