"""`vsched calibrate`: measure the inputs of a checkpoint's linear layers for weight quantization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.assembly import inspect_checkpoint, worker_group_plans
from vsched.checkpoint_tools import load_tools
from vsched.cli import app
from vsched.errors import ConfigError
from vsched.terminal.options import CheckpointArgument, ConfigOption, SetOption, load_served
from vsched.terminal.progress import loading_progress

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}
"""Suffixes of image files."""


@app.command()
def calibrate(
    path: CheckpointArgument,
    texts: Annotated[Path, typer.Option(help="UTF-8 text similar to the expected prompts.")],
    output: Annotated[Path, typer.Option(help="File to write, such as calibration.safetensors.")],
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of images, required for the encoder.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run texts and images through a model, and write statistics of the inputs of its linear layers.

    With the file as generate.calibration and encode.calibration, they determine the scales of int8
    and int4 weights.
    """
    from rich.console import Console

    loaded = load_served(config, assignments, path)
    info = inspect_checkpoint(loaded.config, loaded.policies)
    plans = worker_group_plans(loaded.config, info, loaded.policies)
    role = next(plan.generate for plan in plans if plan.generate is not None)
    plugin = load_tools(role.plugin, "calibrate", path="generate.plugin")
    lines = _lines(texts)
    pictures = list(_images(images or []))
    with loading_progress(Console(stderr=True)) as report:
        layers = plugin.calibrate(
            info,
            role.settings,
            str(output),
            partial(report, "calibrate"),
            texts=lines,
            images=pictures,
        )
    typer.echo(f"{output}: {layers} layers, by {len(lines):,} lines and {len(pictures):,} images")


def _lines(file: Path) -> Sequence[str]:
    """Return the non-empty lines of a file.

    Raises:
        ConfigError: When it cannot be read, or has no such line.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--texts: {file} cannot be read ({type(error).__name__}). Remedy: give a file of UTF-8 text"
        ) from error
    if not lines:
        raise ConfigError(f"--texts: {file} has no text. Remedy: give a file with lines of text")
    return lines


def _images(folders: Sequence[Path]) -> Iterator[Image.Image]:
    """Yield the images in folders, by name.

    Raises:
        ConfigError: When a folder has no image, or an image cannot be read.
    """
    from PIL import Image

    for folder in folders:
        found = sorted(each for each in folder.glob("*") if each.suffix.lower() in ENDINGS)
        if not found:
            raise ConfigError(
                f"--images: no image in {folder}. Remedy: give a folder with files {', '.join(sorted(ENDINGS))}"
            )
        for file in found:
            try:
                with Image.open(file) as opened:
                    yield opened.convert("RGB")
            except (OSError, Image.DecompressionBombError) as error:
                raise ConfigError(
                    f"--images: {file} cannot be read ({type(error).__name__}). Remedy: remove it"
                ) from error
