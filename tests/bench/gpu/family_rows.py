"""Results of families on a device, light to import."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

Outcome = Literal["equal", "differs", "failed", "out of time", "not begun"]

_WARNING = re.compile(r" (?:WARNING|ERROR) (?:\[.*?\]) (.*)")
_CAPTURED = re.compile(r"captured decode steps of up to \d+ rows in [\d.]+ s.*")
WARNINGS_MAX = 6


class FamilyRow(msgspec.Struct, kw_only=True):
    """Result of one family in one data type.

    Attributes:
        path: The path of the computation, as in `vsched check`.
        ready_s: Duration of the start; 0 if it did not start.
        outcome: Comparison of the tokens, or the reason why there is none.
        killed: Comparison of the tokens of requests whose rank was killed; empty if none was.
        difference: The first differing token of each differing request.
        gaps: Their differences of logits.
        steps: `captured`, or `eager`.
        warnings: Warnings in the log.
    """

    family: str
    dtype: str
    path: str = ""
    ready_s: float = 0.0
    seconds: float = 0.0
    outcome: Outcome = "not begun"
    killed: str = ""
    difference: str = ""
    gaps: list[float] = []
    steps: str = ""
    error: str = ""
    warnings: list[str] = []

    @property
    def right(self) -> bool:
        """Return True if the tokens are equal, in bfloat16 also if all arrived."""
        allowed = {"equal"} if self.dtype == "float32" else {"equal", "differs"}
        return self.outcome in allowed and self.killed in {"", *allowed}

    def read_log(self, text: str) -> None:
        """Take the kind of decode steps and the warnings from the log."""
        self.steps = "captured" if _CAPTURED.search(text) else "eager"
        self.warnings = list(dict.fromkeys(_WARNING.findall(text)))[:WARNINGS_MAX]


def line(row: FamilyRow) -> str:
    """Return a row for the terminal."""
    parts = [f"{row.family} {row.dtype}: {row.outcome}", row.path, row.steps]
    if row.ready_s:
        parts.append(f"ready after {row.ready_s:.1f} s")
    if row.killed:
        parts.append(f"after a kill {row.killed}")
    parts += [f"{row.seconds:.1f} s in all", row.difference, row.error.strip().rpartition("\n")[2]]
    return ", ".join(part for part in parts if part)


def table(rows: Iterable[FamilyRow]) -> str:
    """Return the rows as Markdown, a line for each family."""
    families: dict[str, dict[str, FamilyRow]] = {}
    for row in rows:
        families.setdefault(row.family, {})[row.dtype] = row
    dtypes = list(dict.fromkeys(dtype for each in families.values() for dtype in each))
    head = ["family", "path", "decode steps", *dtypes, "killed rank", "ready s", "errors"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for family, by_dtype in families.items():
        found = list(by_dtype.values())
        outcomes = [_outcome(by_dtype[each]) if each in by_dtype else "" for each in dtypes]
        ready = ", ".join(f"{row.ready_s:.1f}" for row in found if row.ready_s)
        errors = "; ".join(
            dict.fromkeys(row.error.strip().rpartition("\n")[2] for row in found if row.error)
        )
        cells = [
            f"`{family}`",
            _joined(row.path for row in found),
            _joined(row.steps for row in found),
        ]
        cells += [
            *outcomes,
            _joined(row.killed for row in found),
            ready,
            errors.replace("|", "\\|"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


def _outcome(row: FamilyRow) -> str:
    if row.outcome != "differs" or not row.gaps:
        return row.outcome
    return f"{len(row.gaps)} differ, logits {min(row.gaps):.2g} to {max(row.gaps):.2g} apart"
