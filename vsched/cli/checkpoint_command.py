"""`vsched make-checkpoint`: write a random-weight checkpoint, offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vsched.cli import app
from vsched.errors import ConfigError
from vsched.worker.capabilities import CheckpointMaker
from vsched.worker.registry import load_worker


@app.command("make-checkpoint")
def make_checkpoint(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; it must not hold a checkpoint.", show_default=False),
    ] = None,
    size: Annotated[str, typer.Option(help="Which; see --list.")] = "tiny25",
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    *,
    list_sizes: Annotated[bool, typer.Option("--list", help="List the sizes and stop.")] = False,
) -> None:
    """Write a random-weight checkpoint with tokenizer, chat template and image processor."""
    plugin = load_worker("transformers")
    assert isinstance(plugin, CheckpointMaker)
    sizes = plugin.checkpoint_sizes()
    if list_sizes:
        for name, summary in sizes.items():
            typer.echo(f"{name:8} {summary}")
        return
    if path is None:
        raise ConfigError("PATH is missing. Remedy: vsched make-checkpoint PATH --size tiny25")
    if size not in sizes:
        raise ConfigError(f"--size: {size!r} is not one of {', '.join(sizes)}")
    if (path / "config.json").exists():
        raise ConfigError(f"{path} holds a checkpoint already. Remedy: choose another folder")
    started_s = time.monotonic()
    parameters = plugin.make_checkpoint(str(path), size, dtype=dtype, seed=seed)
    typer.echo(
        f"{path}: {size}, {parameters / 1e6:.1f} M random parameters in {dtype}, "
        f"{time.monotonic() - started_s:.1f} s"
    )
