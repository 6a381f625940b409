"""A rank with timers: `python -m tests.bench.parts.profile.rank FOLDER`.

It is an ordinary rank with timers at its probe points. Their values are in a file of the folder,
named by the process id, which the profiler may read at any time.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.parts.profile.meter import OUTSIDE, Meter, ProbePoint, cell_count
from vsched import rank
from vsched.transport.zmq_link import RankLink
from vsched.wire import FollowerLog
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.member import Member
from vsched.worker.stage_rank import EncodeRank

COMPONENTS = ("waiting", "decoding", "rows", "model", "sampling", "vision", "reporting")
NAMES = (OUTSIDE, *COMPONENTS)
SEAMS = (
    ProbePoint(RankLink, "receive", "waiting"),
    ProbePoint(rank, "wait_readable", "waiting"),
    ProbePoint(FollowerLog, "accept", "decoding"),
    ProbePoint(Member, "report", "reporting"),
    ProbePoint(GenerateRank, "apply", "rows"),
    ProbePoint(EncodeRank, "apply", "rows"),
    ProbePoint(EncodeRank, "go_on", "rows"),
)
_ITEM_BYTES = 8


def cells_of(folder: Path, pid: int) -> array[int]:
    """Return the cells of a rank; see `meter.read_cells`."""
    cells = array("q")
    cells.frombytes((folder / str(pid)).read_bytes())
    return cells


def _watch_workers(meter: Meter) -> None:
    """Install timers on workers when they are created, since their classes are known only to the plug-in."""

    def watch(cls: Any, component: str, *methods: str) -> None:
        plain: Callable[..., None] = cls.__init__
        seen: list[type] = []

        def init(self: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
            if type(worker) not in seen:
                seen.append(type(worker))
                for method in methods:
                    if hasattr(worker, method):
                        meter.install(type(worker), method, component)
                module = sys.modules[type(worker).__module__]
                if hasattr(module, "sample"):
                    meter.install(module, "sample", "sampling")
            plain(self, worker, *args, **kwargs)

        cls.__init__ = init

    watch(GenerateRank, "model", "step")
    watch(EncodeRank, "vision", "encode", "advance")


def main() -> int:
    """Run a rank with timers."""
    size = cell_count(len(NAMES)) * _ITEM_BYTES
    with (Path(sys.argv[1]) / str(os.getpid())).open("w+b") as file:
        file.truncate(size)
        cells = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
    # Of the whole process: a library's threads work for the component that waits for them.
    meter = Meter(COMPONENTS, cells=cells, cpu_clock=time.process_time_ns)
    _watch_workers(meter)
    with meter.at(SEAMS):
        return rank.main()


if __name__ == "__main__":
    sys.exit(main())
