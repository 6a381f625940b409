"""The command line.

Each module here adds its commands to `app` when it is imported, and imports what is heavy inside them, so that no
command pays for another.
"""

import typer

app = typer.Typer(
    name="vsched",
    help="Serve vision-language models with a scheduler whose every choice is a policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

__all__ = ["app"]
