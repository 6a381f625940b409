"""The transformers workers, in ranks that can be made to diverge, and that some requests kill.

A test sends SIGUSR1 to a rank that is ready: the next entry of its log then differs from the leader's. After SIGUSR2
its next results differ from those of its peers; it is used for other ranks than the first, whose results go to clients.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from vsched.types import ModelInfo
from vsched.wire import FollowerLog, LogEntry
from vsched.worker.contract import (
    Batch,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    Progress,
    Sampled,
    SequenceState,
    WorkerPlugin,
    WorkerSettings,
)
from vsched_workers.plugin import TransformersPlugin

NAME = "tests.e2e.faulty_plugin:plugin"
OTHER_LOG = signal.SIGUSR1
OTHER_RESULT = signal.SIGUSR2
POISON_SEED = 13131313
"""A request with this seed kills every rank that generates its third token."""


class Wanted:
    """Faults that this rank has been signalled to have."""

    def __init__(self) -> None:
        self.signals: set[int] = set()

    def note(self, number: int, _: FrameType | None) -> None:
        self.signals.add(number)


wanted = Wanted()
_accept = FollowerLog.accept


def _accept_another(log: FollowerLog, frame: bytes) -> LogEntry:
    if OTHER_LOG in wanted.signals:
        log.digest = bytes(reversed(log.digest))
    return _accept(log, frame)


def _listen() -> None:
    """Let a test's signals reach this rank."""
    FollowerLog.accept = _accept_another  # type: ignore[method-assign,assignment]
    for number in (OTHER_LOG, OTHER_RESULT):
        signal.signal(number, wanted.note)


def _encode_otherwise(encode: Callable[..., None]) -> Callable[..., None]:
    def changed(jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        encode(jobs, embeddings)
        if OTHER_RESULT in wanted.signals:
            raise RuntimeError("the other ranks know nothing of this")

    return changed


def _step_otherwise(step: Callable[[Batch], Sampled]) -> Callable[[Batch], Sampled]:
    def changed(batch: Batch) -> Sampled:
        sequences = [*batch.decode_sequences, *(chunk.sequence for chunk in batch.chunks)]
        if any(map(_is_deadly, sequences)):
            os._exit(9)
        sampled = step(batch)
        if OTHER_RESULT in wanted.signals:
            sampled.tokens[:] = np.where(sampled.tokens == 0, 1, 0)
        return sampled

    return changed


def _is_deadly(sequence: SequenceState) -> bool:
    return sequence.sampling.seed == POISON_SEED and len(sequence.outputs) >= 2


class FaultyPlugin(TransformersPlugin):
    """Loads the workers, and handles signals."""

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        _listen()
        worker: Any = super().load_encoder(info, settings, progress)
        worker.encode = _encode_otherwise(worker.encode)
        loaded: EncodeWorker = worker
        return loaded

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        _listen()
        worker: Any = super().load_generator(info, settings, progress)
        worker.step = _step_otherwise(worker.step)
        loaded: GenerateWorker = worker
        return loaded


plugin: WorkerPlugin = FaultyPlugin()
