"""The encode side of a rank: hand items to the vision tower, and survive what they do to it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vsched.errors import DeviceOutOfMemory
from vsched.kernel.decisions import EncodeDecision
from vsched.types import Extent
from vsched.wire import EncodeResult
from vsched.worker.contract import EncodeJob, EncodeWorker

logger = logging.getLogger(__name__)


class EncodeRank:
    """Follows the decisions of an encode group."""

    def __init__(
        self,
        worker: EncodeWorker,
        embeddings: npt.NDArray[np.uint8],
        pixel_values: Callable[[Extent], npt.NDArray[np.float32]],
    ) -> None:
        self._worker = worker
        self._embeddings = embeddings
        self._pixel_values = pixel_values

    def apply(self, decision: EncodeDecision) -> EncodeResult:
        """Encode one batch. An error fails the batch, never the rank; its message names no internals."""
        jobs = [
            EncodeJob(
                key=task.key,
                grid=task.grid,
                tokens=task.tokens,
                pixels=self._pixel_values(task.pixels),
                pages=task.pages,
            )
            for task in decision.tasks
        ]
        try:
            self._worker.encode(jobs, self._embeddings)
        except DeviceOutOfMemory as error:
            logger.warning("encode step %d ran out of memory: %s", decision.step, error)
            return EncodeResult(decision.step, "the encoder ran out of memory for this image", 0)
        except Exception:
            logger.exception("encode step %d failed", decision.step)
            return EncodeResult(decision.step, "the image could not be encoded", 0)
        return EncodeResult(decision.step, "", 0)
