"""Generate and encode workers that compute nothing, but allocate simulated memory like a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder, StandInGenerator, stand_in_info
from vsched.types import ArraySpec, ModelInfo, SamplingParams
from vsched.worker.contract import Batch, EncodeJob, ImagePlan, Sampled, SequenceState
from vsched.worker.spec import StepLimits

KV_BYTES = 4096
MIB = 1 << 20
LOAD = StepLimits(slots=4, batch_tokens=40, chunk_tokens=16, context_tokens=128, block_size=16)


def model_info() -> ModelInfo:
    """Return the facts of a model with few bytes."""
    return stand_in_info(path="nowhere", context_tokens=128, kv_bytes_per_token=KV_BYTES)


class RequestMark:
    """Lives as long as its request."""


class MeasuredGenerator(StandInGenerator):
    """Allocates its KV cache and, in a step, `row_bytes` for each row.

    Attributes:
        batches: Sizes of each step: (decode rows, longest decode context, (start, stop, image rows) of each chunk, rows
      with more than argmax).
        events: Calls, in order.
        leaks: Whether the cache stays referenced when it is dropped.
    """

    def __init__(
        self, memory: SimulatedMemory, *, row_bytes: int = 64 << 10, state_bytes: int = 0
    ) -> None:
        super().__init__(
            memory, kv_bytes_per_token=KV_BYTES, weights_bytes=8 * MIB, state_bytes=state_bytes
        )
        self.row_bytes = row_bytes
        self.leaks = False
        self.events: list[str] = []
        self.batches: list[tuple[int, int, list[tuple[int, int, int]], int]] = []
        self.tables: list[int] = []
        self.sampling: list[SamplingParams] = []
        self.held_bytes: list[int] = []
        self.requests: list[weakref.ref[RequestMark]] = []

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        self.events.append(f"build {blocks}")
        self.blocks = blocks
        sizes = (blocks * block_size * KV_BYTES, self._state_bytes)
        self._kv = [self.memory.allocate(size) for size in sizes if size]

    def drop_graphs(self) -> None:
        self.events.append("drop graphs")

    def drop_kv(self) -> None:
        alive = sum(request() is not None for request in self.requests)
        self.events.append(f"drop kv, {alive} requests alive")
        if self.leaks:
            self._kv = []
        super().drop_kv()

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        self.events.append(f"layers {count} of step {len(self.batches)}")
        yield

    def prepare(self, sequence: SequenceState) -> None:
        sequence.state = RequestMark()
        self.sampling.append(sequence.sampling)
        self.requests.append(weakref.ref(sequence.state))

    def step(self, batch: Batch) -> Sampled:
        rows = len(batch.decode_slots) + sum(chunk.stop - chunk.start for chunk in batch.chunks)
        handle = self.memory.allocate(rows * self.row_bytes)
        self.held_bytes.append(self.memory.allocated())
        self.memory.free(handle)
        contexts = (batch.decode_positions + 1).tolist()
        chunks = [
            (chunk.start, chunk.stop, sum(item.row_stop - item.row_start for item in chunk.items))
            for chunk in batch.chunks
        ]
        self.batches.append((len(contexts), max(contexts, default=0), chunks, len(batch.special)))
        self.tables.append(int(batch.block_tables.max()))
        count = len(contexts) + sum(chunk.samples for chunk in batch.chunks)
        return Sampled(np.ones(count, np.int32))


def plan_of(tokens: int) -> ImagePlan:
    """Plan of an image with this number of tokens."""
    spec = ArraySpec("pixels", "float32", (4 * tokens, 4))
    return ImagePlan((spec,), tokens, metadata=b"%d" % tokens)


class MeasuredEncoder(StandInEncoder):
    """Allocates `token_bytes` for each token of a batch, and checks its arrays."""

    def __init__(self, memory: SimulatedMemory, *, token_bytes: int = 1 << 20) -> None:
        super().__init__(memory, weights_bytes=4 * MIB)
        self.token_bytes = token_bytes
        self.batches: list[list[int]] = []

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        self.batches.append([job.tokens for job in jobs])
        handle = self.memory.allocate(sum(job.tokens for job in jobs) * self.token_bytes)
        for job in jobs:
            assert job.arrays["pixels"].shape == (4 * job.tokens, 4)
            assert job.metadata == b"%d" % job.tokens
            embeddings[list(job.pages)] = 1
        self.memory.free(handle)
