"""The encode stage of a rank: passes images to the vision tower, and reports its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vsched.errors import DeviceOutOfMemory, GroupLostError, RankDesync
from vsched.failures import EncodeErrorKind
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.types import Extent
from vsched.wire import Continue, EncodeResult, LogEntry, Paused
from vsched.worker.contract import EncodeJob, EncodeWorker, view_arrays
from vsched.worker.stage_rank import StageRank

logger = logging.getLogger(__name__)


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
        self._worker: EncodeWorker = worker
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
        return self._run(decision.step, decision.layers, lambda: self._begin(decision))

    def go_on(self, step: int, layers: int) -> EncodeResult | Paused | None:
        """Encode `layers` more layers, 0 for the rest; None if this step has failed here."""
        if step != self._paused:
            return None
        self._paused = 0
        return self._run(step, layers, lambda: self._worker.advance(layers))

    def _run(self, step: int, layers: int, work: Callable[[], bool]) -> EncodeResult | Paused:
        try:
            done = work()
        except DeviceOutOfMemory as error:
            logger.warning("encode step %d ran out of memory: %s", step, error)
            return EncodeResult(step, EncodeErrorKind.OUT_OF_MEMORY, 0)
        except (GroupLostError, RankDesync):
            raise  # not caused by the images: the group is lost
        except Exception:
            logger.exception("encode step %d failed", step)
            return EncodeResult(step, EncodeErrorKind.FAILED, 0)
        if done:
            return EncodeResult(step, None, 0)
        self._paused = step
        return Paused(step, layers, 0)

    def _begin(self, decision: EncodeDecision) -> bool:
        """Start a batch; return True if it is done."""
        jobs = []
        for task in decision.tasks:
            if not task.encoded:
                jobs.append(self._job(task))
            elif self._first:
                self._copy(task)
        if not jobs:
            return True
        if decision.layers and self._worker.pauses:
            self._worker.begin(jobs, self._embeddings)
            return self._worker.advance(decision.layers)
        self._worker.encode(jobs, self._embeddings)
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
