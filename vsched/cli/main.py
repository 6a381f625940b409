"""The entry point of the `vsched` command."""

from __future__ import annotations

import sys

from vsched.cli import (
    app,
    bench,
    check_command,
    checkpoint_command,
    config_commands,
    policy_commands,
    profile_command,
    replay_command,
    serve_command,
)
from vsched.cli.demo import command as demo_command
from vsched.cli.simulate import command as simulate_command
from vsched.errors import VschedError
from vsched.logs import configure_logging

COMMANDS = (
    bench,
    demo_command,
    serve_command,
    checkpoint_command,
    check_command,
    config_commands,
    policy_commands,
    profile_command,
    replay_command,
    simulate_command,
)
"""The modules whose import has added commands to `app`."""


def main() -> None:
    """Run the command line; what vsched raises on purpose is a line a problem and exit status 2, not a traceback."""
    configure_logging("engine")
    sys.path.insert(0, "")  # a policy "my_policies:Mine" may lie in the current folder
    try:
        app()
    except VschedError as error:
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        sys.exit(2)
