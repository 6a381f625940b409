"""Options shared by several commands: the configuration and output files."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vsched.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vsched.config import Config, LoadedConfig

PIPE_COLUMNS = 160
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        help="Checkpoint: a folder, ORG/NAME[@REVISION] of the Hugging Face hub, or a GGUF file; model.path."
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, such as generate.slots=8."),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the figures as JSON.", show_default=False)
]


def load(config: Path | None, assignments: list[str] | None) -> LoadedConfig:
    """Load the configuration from the options `--config` and `--set` and the environment."""
    from vsched.config import load_config  # takes a fifth of a second

    return load_config(config, sets=assignments or (), environ=os.environ)


def load_served(
    config: Path | None,
    assignments: list[str] | None,
    path: str = "",
    *,
    only_serves: bool = False,
) -> LoadedConfig:
    """Load a configuration with `path` as its `model.path`, and resolve it as `resolve_served`."""
    loaded = load(config, [*(assignments or ()), *([f"model.path={path}"] if path else [])])
    return resolve_served(loaded, only_serves=only_serves)


def resolve_served(loaded: LoadedConfig, *, only_serves: bool = False) -> LoadedConfig:
    """Choose the devices of a configuration, and download or convert a checkpoint that is missing.

    `only_serves` means that this process loads no model.
    """
    from rich.console import Console

    from vsched.checkpoints import with_local_checkpoints
    from vsched.devices import resolve_loaded
    from vsched.terminal.progress import loading_progress

    with loading_progress(Console(stderr=True)) as report:
        served = with_local_checkpoints(loaded.config, partial(report, "checkpoint"))
    return resolve_loaded(msgspec.structs.replace(loaded, config=served), only_serves=only_serves)


def load_measured(config: Path | None, assignments: list[str] | None, path: str) -> Config:
    """Load a configuration like `load_served`, to measure an engine: it leaves the record of a server alone."""
    from vsched.config import RecordConfig

    loaded = load_served(config, assignments, path)
    return msgspec.structs.replace(loaded.config, record=RecordConfig())


def table_console() -> Console:
    """Return a console for tables, which are wide if standard output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


def new_table(title: str, *columns: str, texts: Collection[str], **options: Any) -> Table:
    """Return an empty table with a title on the left; columns are numbers, except those in `texts`."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", **options)
    for name in columns:
        table.add_column(name, justify="left" if name in texts else "right")
    return table


def check_writable(files: Mapping[str, Path | None], *, inputs: Collection[Path] = ()) -> None:
    """Check that output files can be written, before work that may take minutes; none may be one of the `inputs`.

    Raises:
        ConfigError: When one cannot, or two are the same; names the option.
    """
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option and (path.is_file() or not path.exists()):
            raise ConfigError(f"{option} {path}: {other} has the same file. Remedy: name another")
        if path.is_file() and any(one.exists() and path.samefile(one) for one in inputs):
            raise ConfigError(f"{option} {path}: it is the input. Remedy: name another file")
        target = path if path.exists() else path.parent  # /dev/stdout is in no writable folder
        if path.is_dir() or not os.access(target, os.W_OK):
            raise ConfigError(
                f"{option} {path}: cannot be written. Remedy: name a file in an existing, writable folder"
            )


def open_output(option: str, path: Path) -> IO[bytes]:
    """Open a file to write.

    Raises:
        ConfigError: If it cannot be written; names the option.
    """
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be written: {error.strerror}. Remedy: name another file"
        ) from error


def write_json(path: Path, report: Any) -> None:
    """Write a report as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
