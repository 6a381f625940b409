"""`vsched compile`: compile the kernels that a checkpoint needs on this machine, so that servers start faster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Literal

import typer

from vsched.assembly import as_served, inspect_checkpoint, worker_group_plans
from vsched.checkpoint_tools import CheckpointTools
from vsched.cli import app
from vsched.config import LoadedConfig
from vsched.terminal.options import CheckpointArgument, ConfigOption, SetOption, load_served
from vsched.terminal.progress import LoadingLines
from vsched.types import ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.registry import load_worker

Stage = Literal["encode", "generate"]


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
    for plan in worker_group_plans(config, info, loaded.policies):
        if plan.encode is not None:
            yield "encode", plan.encode.plugin, info, plan.encode.settings
        if plan.generate is not None:
            role = plan.generate
            yield "generate", role.plugin, info, role.settings
            if role.draft is not None:
                yield "generate", role.plugin, role.draft, role.settings
