"""`python -m tests.parity`: compare architectures with transformers' `generate`, and write docs/models.md's tables.

With names, only these are compared and nothing is written; with `images`, those that take images are compared, and
their table is written. It takes about ten minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from tests.parity.architectures import ARCHITECTURES, FAMILY_SIZES, REFUSED
from tests.parity.compare import Parity, compare, refusal_of
from tests.parity.vision_architectures import VISION_ARCHITECTURES, VISION_REFUSED
from tests.parity.vision_compare import compare_own, compare_vision
from tests.workers.parallel.ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- parity: begin -->\n", "<!-- parity: end -->\n"
SEEING_BEGIN, SEEING_END = "<!-- image parity: begin -->\n", "<!-- image parity: end -->\n"
HEAD = "| architecture | path | {} | chunked | preempted | prefix cache |{} equal |\n|---|---|---|---|---|---|{}---|"


def row(name: str, parity: Parity, *, sees: bool = False) -> str:
    """Return the table's line of an architecture."""
    ways: list[bool | None] = [parity.text, parity.chunked, parity.preempted]
    ways.append(parity.prefix_cache)
    ways += [] if sees else [parity.two_ranks]
    cells = [f"`{name}`", parity.path, *(_WORDS[one] for one in ways)]
    return f"| {' | '.join(cells)} | {'yes' if parity.equal else '**no**'} |"


_WORDS = {True: "yes", False: "no", None: "one rank"}


def tables(rows: list[str], refused: list[str]) -> str:
    """Content between the markers of the page."""
    return "\n".join(
        [
            HEAD.format("text", " two ranks |", "---|"),
            *rows,
            "",
            "| refused | because it has |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def write(begin: str, end: str, content: str) -> None:
    """Replace the content between two markers of the page."""
    text = PAGE.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(f"{before}{begin}{content}{end}{after}")


def main(names: list[str]) -> int:
    """Compare, print results, and return the number of differences."""
    logging.disable_progress_bar()
    if names == ["images"]:
        return compare_images()
    rows, refused, unequal = [], [], 0
    with tempfile.TemporaryDirectory(prefix="vsched-ranks-") as folder:
        ranks = Ranks(2, Path(folder))
        for name in names or [*FAMILY_SIZES, *ARCHITECTURES]:
            sees = name in VISION_ARCHITECTURES
            parity = compare_vision(name) if sees else compare(name, ranks=ranks)
            unequal += not parity.equal
            rows.append(row(name, parity, sees=sees))
            print(rows[-1], flush=True)
        ranks.stop()
    for name in () if names else REFUSED:
        why = refusal_of(name)
        unequal += not why
        refused.append(f"| `{name}` | {why or '**is not refused**'} |")
        print(refused[-1], flush=True)
    if not names:
        write(BEGIN, END, tables(rows, refused))
        unequal += compare_images()
    return unequal


def compare_images() -> int:
    """Compare the architectures that take images, write their table, and return the number of differences."""
    rows, unequal = [HEAD.format("image", "", "")], 0
    seeing = [name for name in VISION_ARCHITECTURES if name not in VISION_REFUSED]
    for name in (*FAMILY_SIZES, *seeing):
        parity = compare_own(name) if name in FAMILY_SIZES else compare_vision(name)
        unequal += not parity.equal
        rows.append(row(name, parity, sees=True))
        print(rows[-1], flush=True)
    write(SEEING_BEGIN, SEEING_END, "\n".join([*rows, ""]))
    return unequal


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
