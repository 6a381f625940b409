"""Fuzz the HTTP API: `python -m tests.fuzz --requests 20000 --seed 1`; with `grammars`, schemas and grammars alone."""

from __future__ import annotations

import argparse
import logging

from tests.fuzz.grammars import fuzz_ranks
from tests.fuzz.run import fuzz_engine, fuzz_sockets

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=("api", "grammars"), default="api")
    parser.add_argument(
        "--requests", type=int, default=20_000, help="number of requests, over all targets"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of a run")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.target == "grammars":
        for what, count in sorted(fuzz_ranks(options.seed, options.requests).items()):
            print(f"{what}: {count}")
    else:
        for name, fuzz in (("a simulated engine", fuzz_engine), ("sockets", fuzz_sockets)):
            statuses = sorted(fuzz(options.seed, options.requests // 2).items())
            counted = ", ".join(f"{count} x {status or 'closed'}" for status, count in statuses)
            print(f"{name}: {counted}", flush=True)
