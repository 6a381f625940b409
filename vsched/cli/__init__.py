"""The command line.

Each module here adds its commands to `app` when it is imported, and imports slow modules inside the
commands, so that other commands start quickly.
"""

from typing import Annotated

import typer

app = typer.Typer(
    name="vsched",
    help="Serve vision-language models with a scheduler whose every choice is a policy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

__all__ = ["app"]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"vsched {version('vsched')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve vision-language models with a scheduler whose every choice is a policy."""
