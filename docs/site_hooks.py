"""Write the options of every command into reference/cli.md when the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from vsched.cli import app
from vsched.cli.main import import_commands

PLACE = "<!-- generated: options -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the place by a heading and a table per command; called by MkDocs for each page."""
    return markdown.replace(PLACE, options()) if PLACE in markdown else markdown


def options() -> str:
    """Headings and tables of all commands, in Markdown."""
    import_commands()
    return "\n".join(_command("vsched", typer.main.get_command(app)))


def _command(name: str, command: Any) -> Iterator[str]:
    subcommands = getattr(command, "commands", {})
    if not subcommands and not command.hidden:
        yield f"\n## `{name}`\n\n{command.help or ''}\n\n| option | |\n|---|---|"
        for parameter in command.params:
            names = ", ".join(f"`{one}`" for one in parameter.opts)
            text = " ".join((getattr(parameter, "help", None) or "").split())
            yield f"| {names} | {text.replace('|', chr(92) + '|')} |"
    for subname, subcommand in sorted(subcommands.items()):
        yield from _command(f"{name} {subname}", subcommand)
