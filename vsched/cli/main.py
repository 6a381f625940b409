"""The entry point of the `vsched` command."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import typer

from vsched.cli import app
from vsched.errors import VschedError
from vsched.logs import configure_logging

COMMANDS = {
    "bench": "vsched.cli.bench",
    "tune": "vsched.cli.bench",
    "demo": "vsched.cli.demo_command",
    "serve": "vsched.cli.serve_command",
    "top": "vsched.cli.top_command",
    "host": "vsched.cli.host_command",
    "make-checkpoint": "vsched.cli.checkpoint_command",
    "compile": "vsched.cli.checkpoint_command",
    "check": "vsched.cli.check_command",
    "config": "vsched.cli.config_commands",
    "policies": "vsched.cli.policy_commands",
    "profile": "vsched.cli.profile_command",
    "calibrate-vllm": "vsched.cli.profile_command",
    "replay": "vsched.cli.replay_command",
    "simulate": "vsched.cli.simulate_command",
}
"""Modules whose import adds commands to `app`, by command, in the order of the help."""


def import_commands(words: Sequence[str] = ()) -> None:
    """Import the module of the given command only, so that a server starts quickly; all modules if there is none."""
    named = next((word for word in words if not word.startswith("-")), "")
    for module in [COMMANDS[named]] if named in COMMANDS else COMMANDS.values():
        importlib.import_module(module)


def main() -> None:
    """Run the command line."""
    configure_logging("host" if sys.argv[1:2] == ["host"] else "engine")
    sys.path.insert(0, "")  # a policy "my_policies:Mine" may be in the current folder
    import_commands(_completed_words() or sys.argv[1:])
    run(app)


def _completed_words() -> list[str]:
    """Words of the command line that a shell wants to complete; empty otherwise."""
    if "_VSCHED_COMPLETE" not in os.environ:
        return []
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:]


def run(commands: typer.Typer) -> None:
    """Run a command; print an expected error line by line, with exit status 2 and without a traceback."""
    try:
        commands()
    except VschedError as error:
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        sys.exit(2)
