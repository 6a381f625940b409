"""Options of the commands, validated before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.servers.peers import PEERS
from tests.bench.servers.sides import ROOT, ServerSizes
from vsched.bench.load.shapes import Case

CASES = tuple(case.value for case in Case)
SMOLLM2 = "smollm2"
MADE = ("tiny25", "mid25")
WIDE = "wide25"
"""Created like the others, for sampling with a real vocabulary size; not in the tables of the pages."""
CHECKPOINTS = (*MADE, WIDE, SMOLLM2)
TABLED = (*MADE, SMOLLM2)
SIDES = (
    *("vsched", "vsched-best", "vsched-int8", "vsched-int4"),
    *(name for name in PEERS if name != "transformers"),
)
"""Sides of the table, in order."""
PAGES = ROOT / "docs" / "benchmarks"
IMAGES = ROOT / "docs" / "images"


def numbers(text: str) -> list[int]:
    """Parse positive numbers separated by commas, without duplicates and sorted."""
    found = _integers(text)
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of positive numbers such as 1,8,32"
        )
    return sorted(set(found))


def neighbours(text: str) -> list[int]:
    """Parse numbers of neighbours separated by commas, without duplicates and sorted; 0 is a quiet machine."""
    found = _integers(text)
    if not found or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1")
    return sorted(set(found))


def stretches(text: str) -> tuple[int, int, int]:
    """Parse the seconds before, with and after the neighbours."""
    found = _integers(text)
    if len(found) != 3 or min(found) < 3:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three numbers of seconds, each 3 or more, such as 10,20,15"
        )
    return found[0], found[1], found[2]


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []


def among(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of a comma-separated subset of names, in the order of `names`."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := sorted(set(found) - set(names)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(names)}")
        return [name for name in names if name in found]

    return read


cases = among(CASES)
"""Parses names of cases."""


def assignment(text: str) -> str:
    """Parse `name=value`."""
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: give 1 or more")
    return value


def _sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands with servers."""
    add = parser.add_argument
    add("--checkpoints", type=Path, default=ROOT / "checkpoints", help="folder of checkpoints")
    add("--threads", type=_count, default=len(os.sched_getaffinity(0)), help="threads of each side")
    add("--slots", type=_count, default=64, help="maximum running requests, both sides")
    add("--context", type=_count, default=8192, help="longest prompt and output, both sides")
    add("--kv-gib", type=_count, default=2, help="GiB of KV cache, both sides")
    add("--turns", type=_count, default=8, help="turns of a conversation")
    add("--repeats", type=_count, default=3, help="pairs of runs")
    add("--out", type=Path, required=True, help="folder for all runs; earlier runs are kept")
    add("--ready-s", type=float, default=600.0, help="deadline for a server to be ready")
    add("--idle-s", type=float, default=30.0, help="how long each idle server is watched")
    add("--timeout-s", type=float, default=1800.0, help="deadline for a request")
    add("--report-only", action="store_true", help="make no runs, write tables of those there are")
    add("--write-docs", action="store_true", help="put tables and plots into docs/benchmarks/")


def _common(parser: argparse.ArgumentParser) -> None:
    _sizes(parser)
    add = parser.add_argument
    add(
        "--checkpoint",
        choices=CHECKPOINTS,
        default="tiny25",
        help="checkpoint name, created if missing",
    )
    add(
        "--set", type=assignment, action="append", default=[], help="section.field=value for vsched"
    )
    add("--sessions", type=_count, help="sessions per run; default 2 x clients, at least 8")
    add("--words", type=_count, help="words per message; default by case")
    add("--output-tokens", type=_count, help="output tokens per request; default by case")


def _timeline(parser: argparse.ArgumentParser) -> None:
    _sizes(parser)
    parser.set_defaults(slots=32, context=2048, turns=1, idle_s=5.0, timeout_s=600.0)
    add = parser.add_argument
    add("--peers", type=Path, required=True, help="folder of `setup`")
    add("--budget", type=_count, default=2048, help="of vLLM's steps, in tokens")
    add("--checkpoint", choices=TABLED, default="mid25")
    add("--sides", type=among(SIDES), default=["vsched", "vllm", "llamacpp", "openvino"])
    add("--case", choices=("text", "image"), default="text")
    add("--clients", type=_count, default=8)
    add("--neighbours", type=_count, default=1, help="number of temporary busy loops")
    add(
        "--seconds",
        type=stretches,
        default=(10, 20, 15),
        help="seconds before, with and after them",
    )
    add("--sessions", type=_count, help="drawn requests; more than a side can serve")
    add("--best", type=assignment, action="append", default=[], help="as of `table`")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m tests.bench`."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="vsched compared with a peer, measured in turns."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    setup = commands.add_parser("setup", help="install a peer into its own virtual environment")
    setup.add_argument("--peer", choices=list(PEERS), default="vllm")
    setup.add_argument("--peers", type=Path, required=True, help="folder; the peer's name is added")
    setup.add_argument("--pip-arguments", default="", help="such as --extra-index-url URL")

    table = commands.add_parser("table", help="vsched and all peers, in rounds: one table")
    _sizes(table)
    table.set_defaults(slots=32, context=2048, turns=1, idle_s=5.0, timeout_s=600.0)
    table.add_argument("--peers", type=Path, required=True, help="folder of `setup`")
    table.add_argument("--budget", type=_count, default=2048, help="of vLLM's steps, in tokens")
    table.add_argument("--models", type=among(TABLED), default=list(TABLED))
    table.add_argument("--sides", type=among(SIDES), default=list(SIDES))
    table.add_argument(
        "--cases",
        type=among(("text", "image", "video")),
        default=["text", "image"],
        help="video: mid25 and the sides vsched and vllm only",
    )
    table.add_argument("--concurrency", type=numbers, default=[1, 8, 32])
    table.add_argument(
        "--best",
        type=assignment,
        action="append",
        default=[],
        help="a setting of the tuned vsched sides; prefix MODEL: for one model",
    )
    table.add_argument(
        "--neighbours",
        type=neighbours,
        default=[0],
        help="busy loops during measurements: 1, or 0,1 for both in turns",
    )

    _timeline(commands.add_parser("timeline", help="requests/s with temporary neighbours"))

    regress = commands.add_parser("regress", help="vsched compared with an earlier commit")
    _common(regress)
    regress.add_argument("--before", required=True, help="the commit")
    regress.add_argument("--before-set", type=assignment, action="append", help="in place of --set")
    regress.add_argument("--cases", type=cases, default=list(CASES))
    regress.add_argument("--concurrency", type=numbers, default=[1, 8, 32])

    samplers = commands.add_parser("samplers", help="samplers of vsched, vLLM and llama.cpp")
    samplers.add_argument("--peers", type=Path, required=True)
    samplers.add_argument("--vocabulary", type=_count, default=152_064)
    samplers.add_argument("--repeats", type=_count, default=5, help="steps a case")
    samplers.add_argument("--out", type=Path, required=True)
    samplers.add_argument("--write-docs", action="store_true")

    price = commands.add_parser("price", help="CPU time with model.deterministic and without")
    price.add_argument("folder", help="of the checkpoint")
    price.add_argument("--words", type=numbers, default=[50, 1000], help="of a prompt")
    price.add_argument("--tokens", type=numbers, default=[32], help="of an answer")
    price.add_argument("--chunk", type=numbers, default=[512], help="maximum rows of a chunk")
    price.add_argument("--requests", type=int, choices=range(1, 33), default=4, metavar="N")
    price.add_argument("--rounds", type=_count, default=7, help="runs of each, in turns")
    price.add_argument("--threads", type=_count, default=1, help="of a worker")

    adapters = commands.add_parser("adapters", help="decode and prefill with LoRA adapters")
    adapters.add_argument("folder", help="of the checkpoint")
    adapters.add_argument(
        "--adapters", type=numbers, default=[1, 4, 8], help="in a batch, beside 0"
    )
    adapters.add_argument("--rows", type=numbers, default=[1, 8], help="in a batch")
    adapters.add_argument("--rank", type=_count, default=16)
    adapters.add_argument("--prompt", type=_count, default=128, help="tokens of a row")
    adapters.add_argument("--tokens", type=_count, default=32, help="of an answer")
    adapters.add_argument("--rounds", type=_count, default=3, help="runs of each, in turns")
    adapters.add_argument("--threads", type=_count, default=1, help="of a worker")
    adapters.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    adapters.add_argument("--peft", action="store_true", help="PEFT's own batch, too: text alone")
    return parser


def sizes_of(options: argparse.Namespace) -> ServerSizes:
    """Return the sizes common to both sides."""
    return ServerSizes(
        threads=options.threads,
        slots=options.slots,
        context=options.context,
        kv_bytes=options.kv_gib << 30,
        images=max(options.turns, 1),
    )


def settings_text(options: argparse.Namespace) -> str:
    """Describe everything that figures depend on beyond their keys."""
    parts = [sizes_of(options).text, f"turns={options.turns}"]
    parts += [
        f"{name}={getattr(options, name)}"
        for name in ("sessions", "words", "output_tokens")
        if getattr(options, name, None)
    ]
    parts += sorted(options.set)
    parts += [f"before_set:{text}" for text in getattr(options, "before_set", None) or ()]
    return " ".join(parts)


def options_of(command: str, *, tokens: int, rounds: int) -> argparse.ArgumentParser:
    """Return the common options of a command that alternates two variants; the command may add others."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{command}")
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--set", action="append", default=[], help="a setting, as of the server")
    return parser


def settings_of(options: argparse.Namespace) -> list[str]:
    """Return the settings of an engine that serves the checkpoint."""
    return [f"model.path={options.checkpoint}", "model.name=bench", *options.set]
