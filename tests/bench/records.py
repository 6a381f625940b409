"""Measurements on disk, written after every run, so that an interrupted command continues where it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from vsched.bench.load.generator import Figures
from vsched.terminal.options import write_json


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a run.

    Attributes:
        purpose: `table` or `timeline`.
        side: `vsched`, or the name of the peer.
        neighbours: Number of busy loops next to the server.
        settings: Everything else that the figures depend on.
    """

    purpose: str
    side: str
    case: str
    concurrency: int
    repeat: int
    checkpoint: str
    settings: str
    neighbours: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its figures, time and version.

    Attributes:
        rates: Requests/s in each interval of a run over time.
    """

    key: Key
    figures: Figures
    version: str
    taken: str
    load: float
    rates: list[float] = []


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one start of a server, and of the idle server.

    Attributes:
        ready_s: From the start of the process until it reports ready.
        answered_s: From the start of the process to the end of the first response.
        idle_cores: Cores kept busy without a request, after the first response.
        memory_mib: Resident memory by process, with shared pages divided among their users (PSS).
    """

    side: str
    checkpoint: str
    settings: str
    version: str
    ready_s: float
    answered_s: float
    idle_cores: float
    memory_mib: dict[str, float]
    taken: str


class Report(msgspec.Struct, kw_only=True):
    """Content of the file."""

    machine: str = ""
    runs: list[Run] = []
    starts: list[Started] = []


class Store:
    """The file of all runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "runs.json"
        self.report = Report()
        if self.path.exists():
            self.report = msgspec.json.decode(self.path.read_bytes(), type=Report)

    def save(self) -> None:
        """Replace the file atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        write_json(draft, self.report)
        os.replace(draft, self.path)

    def add(self, run: Run) -> None:
        """Store a run, replacing an earlier one with the same key."""
        self.report.runs = [kept for kept in self.report.runs if kept.key != run.key]
        self.report.runs.append(run)
        self.save()

    def by_side(
        self, sides: Iterable[str], purpose: str, checkpoint: str, settings: str
    ) -> dict[str, list[Run]]:
        """Return the runs of each side that has some."""
        wanted = (purpose, checkpoint, settings)
        found: dict[str, list[Run]] = {side: [] for side in sides}
        for run in self.report.runs:
            key = run.key
            if (key.purpose, key.checkpoint, key.settings) == wanted and key.side in found:
                found[key.side].append(run)
        return {side: runs for side, runs in found.items() if runs}
