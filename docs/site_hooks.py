"""Pages that the site takes from the code and from CHANGELOG.md when it is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from vsched.cli import app
from vsched.cli.main import import_commands

OPTIONS = "<!-- generated: options -->"
CHANGELOG = "<!-- generated: changelog -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the places for generated text; called by MkDocs for each page."""
    if CHANGELOG in markdown:
        return (Path(__file__).parents[1] / "CHANGELOG.md").read_text().replace("](docs/", "](")
    return markdown.replace(OPTIONS, options()) if OPTIONS in markdown else markdown


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
