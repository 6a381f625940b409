"""The part of a rank in one group that is the same for both stages: hooks, adapters, kernels and threads.

The encode stage of a rank: passes images to the vision tower, and reports its errors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError, DeviceOutOfMemory, GroupLostError, RankDesync
from vsched.failures import EncodeErrorKind
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.types import Extent
from vsched.wire import (
    AddAdapter,
    Continue,
    EncodeResult,
    GenerateResult,
    LogEntry,
    Paused,
    RemoveAdapter,
)
from vsched.worker.contract import EncodeJob, EncodeWorker, Worker, supports, view_arrays
from vsched.worker.memory import memory_errors

logger = logging.getLogger(__name__)


class StageRank:
    """Executes the entries of one group with a worker.

    Attributes:
        adapters: Numbers of the worker's adapters.
    """

    _memory_key: ClassVar[str]

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
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

    def mark_kernels(self) -> None:
        """Note the kernels compiled so far; requests wait for kernels that are compiled later."""
        self._kernels = Counter(self.worker.kernels_here())

    def kernels_late(self) -> int:
        """Return the number of kernels compiled or loaded since `mark_kernels`, and log new ones."""
        late = Counter(self.worker.kernels_here()) - self._kernels
        if late.total() > self._kernels_late:
            self._kernels_late = late.total()
            logger.warning("requests have waited for kernels: %s", ", ".join(sorted(late)))
        return self._kernels_late

    def run_hook(self, name: str) -> None:
        """Run a hook."""
        if name not in self.worker.hooks():
            raise RankDesync(f"heard of a hook {name!r}, which this rank does not know")
        with memory_errors(f"running the hook {name}", remedy=f"raise {self._memory_key}"):
            self.worker.run_hook(name)

    def change_adapters(self, entry: AddAdapter | RemoveAdapter) -> str:
        """Add or remove an adapter; return the error of adding one, empty on success."""
        if not supports(self.worker, "add_adapter"):
            raise RankDesync(f"heard of adapter {entry.number}, and this rank takes none")
        if isinstance(entry, RemoveAdapter):
            self.worker.remove_adapter(entry.number)
            self.adapters.discard(entry.number)
            return ""
        try:
            with memory_errors("adding an adapter", remedy=f"raise {self._memory_key}"):
                self.worker.add_adapter(entry.number, entry.path)
        except (CheckpointError, DeviceOutOfMemory) as error:
            return str(error)
        self.adapters.add(entry.number)
        return ""


class EncodeRank(StageRank):
    """Follows the decisions of an encode group."""

    _memory_key = "encode.memory_limit"

    def __init__(
        self,
        worker: EncodeWorker,
        embeddings: npt.NDArray[np.uint8],
        read: Callable[[Extent], npt.NDArray[np.uint8]],
        *,
        rank: int = 0,
    ) -> None:
        """Create a rank; `read` returns the bytes of an extent of the arena's pixel region.

        Only the first rank of a group writes to the arena.
        """
        super().__init__(worker)
        self.worker: EncodeWorker = worker
        self._first = rank == 0
        self._embeddings = embeddings
        self._read = read
        self._paused = 0

    def carry_out(self, entry: LogEntry) -> EncodeResult | Paused | None:
        """Execute or continue a decision of the encode group."""
        match entry:
            case EncodeDecision():
                return self.apply(entry)
            case Continue(step, layers):
                return self.go_on(step, layers)
        raise RankDesync("an encode rank heard a decision of a generate group")

    def apply(self, decision: EncodeDecision) -> EncodeResult | Paused:
        """Encode a batch, or only the decision's number of layers if the worker can pause.

        An error fails the batch, not the rank; only its kind is reported.
        """
        if self._paused:
            raise RankDesync(
                f"encode step {decision.step} came while step {self._paused} is not done"
            )
        return self._run_layers(decision.step, decision.layers, lambda: self._start_batch(decision))

    def go_on(self, step: int, layers: int) -> EncodeResult | Paused | None:
        """Encode `layers` more layers, 0 for the rest; None if this step has failed here."""
        if step != self._paused:
            return None
        self._paused = 0
        return self._run_layers(step, layers, lambda: self.worker.advance(layers))

    def _run_layers(
        self, step: int, layers: int, work: Callable[[], bool]
    ) -> EncodeResult | Paused:
        try:
            done = work()
        except DeviceOutOfMemory as error:
            logger.warning("encode step %d ran out of memory: %s", step, error)
            return EncodeResult(step, EncodeErrorKind.OUT_OF_MEMORY, 0)
        except (GroupLostError, RankDesync):
            raise  # not caused by the images: the group is lost
        except Exception:
            logger.exception("encode step %d failed", step)
            # Raises if the device is lost, as a GPU after an illegal access: every later batch would fail as well.
            self.worker.device_memory().available()
            return EncodeResult(step, EncodeErrorKind.FAILED, 0)
        if done:
            return EncodeResult(step, None, 0)
        self._paused = step
        return Paused(step, layers, 0)

    def _start_batch(self, decision: EncodeDecision) -> bool:
        """Start a batch; return True if it is done."""
        jobs = []
        for task in decision.tasks:
            if not task.encoded:
                jobs.append(self._job(task))
            elif self._first:
                self._copy(task)
        if not jobs:
            return True
        if decision.layers and self.worker.pauses:
            self.worker.begin(jobs, self._embeddings)
            return self.worker.advance(decision.layers)
        self.worker.encode(jobs, self._embeddings)
        return True

    def _job(self, task: EncodeTask) -> EncodeJob:
        if task.adapter and task.adapter not in self.adapters:
            raise RankDesync(f"an image is to be encoded with adapter {task.adapter}, not here")
        arrays = view_arrays(task.arrays, self._read(task.extent))
        return EncodeJob(task.key, task.tokens, arrays, task.metadata, task.pages, task.adapter)

    def _copy(self, task: EncodeTask) -> None:
        """Copy embedding rows sent by the client to their arena pages."""
        _, page_rows, row_bytes = self._embeddings.shape
        rows = self._read(task.extent)[: task.tokens * row_bytes].reshape(task.tokens, row_bytes)
        for index, page in enumerate(task.pages):
            part = rows[index * page_rows : (index + 1) * page_rows]
            self._embeddings[page, : len(part)] = part
