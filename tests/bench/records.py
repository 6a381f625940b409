"""What was measured, on disk after every run, so that a run that was cut off goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from vsched.bench.load.figures import Figures
from vsched.terminal.options import write_json


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two runs the same run.

    Attributes:
        purpose: Command or part of one, such as `compare`, `sweep`, `table` or `timeline`.
        side: `vsched`, the name of the peer, or `before`.
        length: Tokens of the prompt as asked for, where prompts grow; else 0.
        budget: The peer's token budget; 0 where it has none of its own.
        neighbours: Busy loops that run beside the server.
        settings: Everything else that the figures depend on.
    """

    purpose: str
    side: str
    case: str
    concurrency: int
    repeat: int
    checkpoint: str
    settings: str
    length: int = 0
    budget: int = 0
    neighbours: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run, what it gave, when, and by what version.

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
    """What one start of a server took, and what the server takes when it has nothing to do.

    Attributes:
        ready_s: From the start of the process until it says that it is ready.
        answered_s: From the start of the process to the end of the first answer.
        idle_cores: Cores kept busy without a request, after the first answer.
        memory_mib: Resident memory by process, shared pages divided among those that share them.
        paused: Whether it is stopped when it is the other's turn, because it keeps cores busy when idle.
    """

    side: str
    checkpoint: str
    settings: str
    budget: int
    version: str
    command: list[str]
    environment: dict[str, str]
    ready_s: float
    answered_s: float
    idle_cores: float
    memory_mib: dict[str, float]
    paused: bool
    taken: str


class SchedulerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case of a scheduler without a model; microseconds."""

    side: str
    case: str
    running: int
    repeat: int
    p50_us: float
    p99_us: float


class Report(msgspec.Struct, kw_only=True):
    """Everything in the file."""

    machine: str = ""
    runs: list[Run] = []
    starts: list[Started] = []
    scheduler: list[SchedulerRow] = []


class Store:
    """The file of all runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "runs.json"
        self.report = Report()
        if self.path.exists():
            self.report = msgspec.json.decode(self.path.read_bytes(), type=Report)

    def save(self) -> None:
        """Write the file anew; whoever reads it meanwhile sees the old one or the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        write_json(draft, self.report)
        os.replace(draft, self.path)

    def add(self, run: Run) -> None:
        """Keep a run in place of an earlier one with the same key."""
        self.report.runs = [kept for kept in self.report.runs if kept.key != run.key]
        self.report.runs.append(run)
        self.save()

    def drop_outdated(self, versions: Mapping[str, str], checkpoint: str, settings: str) -> None:
        """Forget runs of sides that are of another version now: half a table of each says nothing."""

        def is_current(run: Run) -> bool:
            key = run.key
            mine = (key.checkpoint, key.settings) == (checkpoint, settings)
            return not mine or versions.get(key.side, run.version) == run.version

        self.report.runs = [run for run in self.report.runs if is_current(run)]

    def missing(self, pairs: Iterable[Sequence[Key]]) -> list[Sequence[Key]]:
        """Return those groups of runs of which any is missing: halves are made again, next to each other."""
        made = {run.key for run in self.report.runs}
        return [pair for pair in pairs if not made.issuperset(pair)]
