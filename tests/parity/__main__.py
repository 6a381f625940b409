"""`python -m tests.parity`: compare architectures with transformers' `generate`, and write docs/models.md's tables.

With names, only these are compared and nothing is written. It takes about five minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
from pathlib import Path

from transformers.utils import logging

from tests.parity.architectures import ARCHITECTURES, FAMILY_SIZES, REFUSED
from tests.parity.compare import Parity, compare, refusal_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- parity: begin -->\n", "<!-- parity: end -->\n"


def row(name: str, parity: Parity) -> str:
    """Return the table's line of an architecture."""
    ways = (parity.text, parity.chunked, parity.preempted, parity.prefix_cache)
    cells = [f"`{name}`", parity.path, *("yes" if one else "no" for one in ways)]
    return f"| {' | '.join(cells)} | {'yes' if parity.equal else '**no**'} |"


def tables(rows: list[str], refused: list[str]) -> str:
    """Return what stands between the marks of the page."""
    return "\n".join(
        [
            "| architecture | path | text | chunked | preempted | prefix cache | equal |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "| refused | because it has |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def main(names: list[str]) -> int:
    """Compare, say so, and return how many are unequal."""
    logging.disable_progress_bar()
    rows, refused, unequal = [], [], 0
    for name in names or [*FAMILY_SIZES, *ARCHITECTURES]:
        parity = compare(name)
        unequal += not parity.equal
        rows.append(row(name, parity))
        print(rows[-1], flush=True)
    for name in () if names else REFUSED:
        why = refusal_of(name)
        unequal += not why
        refused.append(f"| `{name}` | {why or '**is not refused**'} |")
        print(refused[-1], flush=True)
    if not names:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}{tables(rows, refused)}{END}{after}")
    return unequal


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
