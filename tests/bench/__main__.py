"""The command line of the benchmark harness; `python -m tests.bench --help`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from subprocess import CalledProcessError
from types import FrameType
from typing import NoReturn

from rich.console import Console

from tests.bench import adapters, price, regress
from tests.bench.options import make_parser
from tests.bench.samplers.table import samplers
from tests.bench.servers import setup
from tests.bench.servers.peers import PEERS
from tests.bench.table.measure import table
from tests.bench.timeline.measure import timeline
from vsched.errors import VschedError

MEASURED: Mapping[str, Callable[[argparse.Namespace, Console], None]] = {
    "table": table,
    "timeline": timeline,
    "regress": regress.regress,
    "samplers": samplers,
}
"""Commands that measure in turns and write tables."""


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End as by Ctrl-C, so that no server is left running."""
    raise KeyboardInterrupt


def main() -> None:
    """Run a command; an expected error prints one message and exits with status 2."""
    options = make_parser().parse_args()
    signal.signal(signal.SIGTERM, stop)
    console = Console(stderr=True)
    try:
        if command := MEASURED.get(options.command):
            command(options, console)
            return
        match options.command:
            case "setup":
                setup.install(
                    PEERS[options.peer],
                    PEERS[options.peer].folder(options.peers),
                    pip_arguments=options.pip_arguments,
                    console=console,
                )
            case "price":
                price.price(options)
            case "adapters":
                adapters.adapters(options)
    except (VschedError, CalledProcessError) as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("Stopped. The same command continues from here.")
        sys.exit(130)


if __name__ == "__main__":
    main()
