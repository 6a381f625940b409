"""Results of checks, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ERROR_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Check:
    """A check, and its error; empty if it passed."""

    name: str
    error: str


@dataclass(frozen=True)
class Tried:
    """A client with its version, and its checks."""

    client: str
    version: str
    checks: list[Check]


def read(results: Path, trouble: str) -> list[Check]:
    """Return the checks in a script's results, and a failed one for a bad end or an empty file."""
    lines = results.read_text().splitlines() if results.exists() else []
    checks = [Check(line["check"], line["error"]) for line in map(json.loads, lines)]
    if trouble or not checks:
        checks.append(Check("end", trouble or "the script told of no check"))
    return checks


def write(tried: Sequence[Tried]) -> str:
    """Return the table of clients, followed by that of failures."""
    lines = ["| client | version | passed | failed |", "|---|---|---|---|"]
    for one in tried:
        passed = ", ".join(check.name for check in one.checks if not check.error)
        failed = ", ".join(check.name for check in one.checks if check.error)
        lines.append(f"| {one.client} | {one.version} | {passed} | {failed} |")
    failures = [
        f"| {one.client}: {check.name} | {_short(check.error)} |"
        for one in tried
        for check in one.checks
        if check.error
    ]
    if failures:
        lines += ["", "| failed | error |", "|---|---|", *failures]
    return "\n".join(lines).replace("_", "\\_")


def _short(error: str) -> str:
    return " ".join(error.split())[:ERROR_CHARACTERS_MAX].replace("|", "\\|")
