"""The part of a rank in one group that is the same for both stages: hooks, adapters, kernels and threads."""

from __future__ import annotations

import logging
from collections import Counter
from typing import ClassVar

from vsched.errors import CheckpointError, DeviceOutOfMemory, RankDesync
from vsched.wire import AddAdapter, EncodeResult, GenerateResult, LogEntry, Paused, RemoveAdapter
from vsched.worker.contract import Worker, supports
from vsched.worker.memory import memory_errors

logger = logging.getLogger(__name__)


class StageRank:
    """Executes the entries of one group with a worker.

    Attributes:
        adapters: Numbers of the worker's adapters.
    """

    _memory_key: ClassVar[str]

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._kernels: Counter[str] = Counter()
        self._kernels_late = 0
        self.adapters: set[int] = set()

    def carry_out(self, entry: LogEntry) -> GenerateResult | EncodeResult | Paused | None:
        """Execute or continue a decision; None if there is no result.

        Raises:
            RankDesync: When the entry does not match the state of this rank.
        """
        raise NotImplementedError

    def look_ahead(self) -> None:
        """Prepare for the next decision, after the result of this one is sent."""

    def begin(self) -> None:
        """Note the kernels compiled so far; requests wait for kernels that are compiled later."""
        self._kernels = Counter(self._worker.kernels_here())

    def kernels_late(self) -> int:
        """Return the number of kernels compiled or loaded since `begin`, and log new ones."""
        late = Counter(self._worker.kernels_here()) - self._kernels
        if late.total() > self._kernels_late:
            self._kernels_late = late.total()
            logger.warning("requests have waited for kernels: %s", ", ".join(sorted(late)))
        return self._kernels_late

    def threads_here(self) -> int:
        """Return the current number of compute threads; 0 if the worker does not report it."""
        return self._worker.threads_here()

    def hooks(self) -> dict[str, float]:
        """Return the worker's hooks and their intervals."""
        return dict(self._worker.hooks())

    def wanted_hooks(self) -> list[str]:
        """Return the hooks that the worker requests."""
        return list(self._worker.wanted_hooks())

    def run_hook(self, name: str) -> None:
        """Run a hook."""
        if name not in self._worker.hooks():
            raise RankDesync(f"heard of a hook {name!r}, which this rank does not know")
        with memory_errors(f"running the hook {name}", remedy=f"raise {self._memory_key}"):
            self._worker.run_hook(name)

    def change_adapters(self, entry: AddAdapter | RemoveAdapter) -> str:
        """Add or remove an adapter; return the error of adding one, empty on success."""
        if not supports(self._worker, "add_adapter"):
            raise RankDesync(f"heard of adapter {entry.number}, and this rank takes none")
        if isinstance(entry, RemoveAdapter):
            self._worker.remove_adapter(entry.number)
            self.adapters.discard(entry.number)
            return ""
        try:
            with memory_errors("adding an adapter", remedy=f"raise {self._memory_key}"):
                self._worker.add_adapter(entry.number, entry.path)
        except (CheckpointError, DeviceOutOfMemory) as error:
            return str(error)
        self.adapters.add(entry.number)
        return ""
