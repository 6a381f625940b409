"""The command line of the bench harness; `python -m tests.bench --help`."""

from __future__ import annotations

import signal
import sys
from subprocess import CalledProcessError
from types import FrameType
from typing import NoReturn

from rich.console import Console

from tests.bench import adapters, compare, growth, price, regress, scheduler
from tests.bench.options import make_parser
from tests.bench.samplers.table import samplers
from tests.bench.servers import setup
from tests.bench.servers.peers import PEERS
from tests.bench.table.measure import table
from vsched.errors import VschedError


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End as by Ctrl-C, so that no server is left behind."""
    raise KeyboardInterrupt


def main() -> None:
    """Run a command; what goes wrong on purpose is one message and status 2."""
    options = make_parser().parse_args()
    signal.signal(signal.SIGTERM, stop)
    console = Console(stderr=True)
    try:
        match options.command:
            case "setup":
                setup.install(
                    PEERS[options.peer],
                    PEERS[options.peer].folder(options.peers),
                    pip_arguments=options.pip_arguments,
                    console=console,
                )
            case "compare":
                compare.compare(options, console)
            case "table":
                table(options, console)
            case "growth":
                growth.growth(options, console)
            case "regress":
                regress.regress(options, console)
            case "scheduler":
                scheduler.scheduler(options, console)
            case "samplers":
                samplers(options, console)
            case "price":
                price.price(options)
            case "adapters":
                adapters.adapters(options)
    except (VschedError, CalledProcessError) as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on where this one ended.")
        sys.exit(130)


if __name__ == "__main__":
    main()
