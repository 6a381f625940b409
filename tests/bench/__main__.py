"""The command line of the benchmark harness; `python -m tests.bench --help`."""

from __future__ import annotations

import signal
import sys
from subprocess import CalledProcessError
from types import FrameType
from typing import NoReturn

from rich.console import Console

from tests.bench.options import make_parser
from tests.bench.servers import setup
from tests.bench.servers.peers import PEERS
from tests.bench.table import table
from tests.bench.timeline import timeline
from vsched.errors import VschedError


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End as by Ctrl-C, so that no server is left running."""
    raise KeyboardInterrupt


def main() -> None:
    """Run a command; an expected error prints one message and exits with status 2."""
    options = make_parser().parse_args()
    signal.signal(signal.SIGTERM, stop)
    console = Console(stderr=True)
    try:
        match options.command:
            case "table":
                table(options, console)
            case "timeline":
                timeline(options, console)
            case "setup":
                peer = PEERS[options.peer]
                setup.install(
                    peer,
                    peer.folder(options.peers),
                    pip_arguments=options.pip_arguments,
                    console=console,
                )
    except (VschedError, CalledProcessError) as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("Stopped. The same command continues from here.")
        sys.exit(130)


if __name__ == "__main__":
    main()
