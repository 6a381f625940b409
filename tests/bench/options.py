"""Options of the commands, validated before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.servers.peers import PEERS
from tests.bench.servers.sides import ROOT, ServerSizes

SMOLLM2 = "smollm2"
MADE = ("tiny25", "mid25")
TABLED = (*MADE, SMOLLM2)
SIDES = ("vsched", "vsched-best", "vsched-int8", "vsched-int4", *PEERS)
"""Sides of the table, in order."""
PAGES = ROOT / "docs" / "benchmarks"
IMAGES = ROOT / "docs" / "images"


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas, without duplicates and sorted."""
    return sorted({int(part) for part in text.split(",")})


def among(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of a comma-separated subset of names, in the order of `names`."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := sorted(set(found) - set(names)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(names)}")
        return [name for name in names if name in found]

    return read


def assignment(text: str) -> str:
    """Parse `name=value`."""
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    return text


def _add_command(commands: Any, name: str, description: str) -> Callable[..., object]:
    """Add a command that measures servers, with the options of all such commands."""
    add: Callable[..., object] = commands.add_parser(name, help=description).add_argument
    cores = len(os.sched_getaffinity(0))
    add("--checkpoints", type=Path, default=ROOT / "checkpoints", help="folder of checkpoints")
    add("--peers", type=Path, required=True, help="folder of `setup`")
    add("--threads", type=int, default=cores, help="threads of each side")
    add("--slots", type=int, default=32, help="maximum running requests, both sides")
    best = "a setting of the tuned vsched sides; prefix MODEL: for one model"
    add("--best", type=assignment, action="append", default=[], help=best)
    add("--repeats", type=int, default=3, help="pairs of runs")
    add("--out", type=Path, required=True, help="folder for all runs; earlier runs are kept")
    add("--ready-s", type=float, default=600.0, help="deadline for a server to be ready")
    add("--idle-s", type=float, default=5.0, help="how long each idle server is watched")
    add("--report-only", action="store_true", help="make no runs, write tables of those there are")
    add("--write-docs", action="store_true", help="put tables and plots into docs/benchmarks/")
    return add


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="vsched compared with a peer, measured in turns."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    setup = commands.add_parser("setup", help="install a peer into its own environment")
    add: Callable[..., object] = setup.add_argument
    add("--peer", choices=list(PEERS), default="vllm")
    add("--peers", type=Path, required=True, help="folder; the peer's name is added")
    add("--pip-arguments", default="", help="such as --extra-index-url URL")

    add = _add_command(commands, "table", "vsched and all peers, in rounds: one table")
    add("--models", type=among(TABLED), default=list(TABLED))
    add("--sides", type=among(SIDES), default=list(SIDES))
    cases, videos = ("text", "image", "video"), "video: mid25 and the sides vsched and vllm only"
    add("--cases", type=among(cases), default=["text", "image"], help=videos)
    add("--concurrency", type=numbers, default=[1, 8, 32])
    loops = "busy loops during measurements: 1, or 0,1 for both in turns"
    add("--neighbours", type=numbers, default=[0], help=loops)

    add = _add_command(commands, "timeline", "requests/s while a busy loop comes and goes")
    add("--checkpoint", choices=TABLED, default="mid25")
    add("--sides", type=among(SIDES), default=["vsched", "vllm", "llamacpp", "openvino"])
    return parser


def sizes_of(options: argparse.Namespace) -> ServerSizes:
    return ServerSizes(threads=options.threads, slots=options.slots)
