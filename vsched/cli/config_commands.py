"""`vsched config`: check and show the configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from vsched.cli import app
from vsched.config import keys_table, to_toml
from vsched.config.checks import check_folders
from vsched.terminal.options import ConfigOption, SetOption, load, resolve_served

config_app = typer.Typer(help="Check and show the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@config_app.command()
def check(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Load the configuration, build all its policies, and check the checkpoint, if one is set."""
    loaded = load(config, assignments)
    check_folders(loaded.config)
    if loaded.config.model.path:
        from vsched.cli.check_command import check_served

        check_served(resolve_served(loaded))
    typer.echo("The configuration is valid.")


@config_app.command()
def show(
    config: ConfigOption = None,
    assignments: SetOption = None,
    *,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show the origin of each value.")
    ] = False,
) -> None:
    """Print the configuration in force, as TOML."""
    typer.echo(to_toml(load(config, assignments), origin=origin), nl=False)


@config_app.command(hidden=True)
def keys() -> None:
    """Print the table of keys in docs/config.md."""
    typer.echo(keys_table(), nl=False)


@config_app.command(hidden=True)
def vllm_flags() -> None:
    """Print the table of docs/reference/vllm-flags.md."""
    from vsched.cli.vllm_flags import flags_table

    typer.echo(flags_table(), nl=False)
