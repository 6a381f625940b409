"""Workers without a model: they allocate simulated memory as a model would; subclasses define their outputs.

All stand-in workers derive from these: `vsched.sim.ranks.symbolic_workers` in simulated engines,
and those of tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Batch,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    Sampled,
    Worker,
)


def stand_in_info(**facts: object) -> ModelInfo:
    """Return the facts of a small model with short contexts; `facts` override defaults."""
    small: dict[str, object] = {
        "family": "fake",
        "path": "",
        "dtype": "float32",
        "hidden_size": 4,
        "embedding_levels": 1,
        "vocab_size": 100,
        "context_tokens": 1000,
        "kv_bytes_per_token": 8,
        "item_tokens_max": 32,
        "image_token_id": 5,
        "stop_token_ids": (),
    }
    return ModelInfo(**{**small, **facts})  # type: ignore[arg-type] # the keys are valid fields


class StandInWorker(Worker):
    """Memory of a worker: allocates its weights on creation.

    Attributes:
        memory: The simulated device.
    """

    def __init__(self, memory: SimulatedMemory, *, weights_bytes: int = 0) -> None:
        self.memory = memory
        self.weights_bytes = weights_bytes
        if weights_bytes:
            memory.allocate(weights_bytes)

    def device_memory(self) -> SimulatedMemory:
        """Return the simulated device."""
        return self.memory


class StandInEncoder(StandInWorker, EncodeWorker):
    """A vision tower that does not write to the arena."""

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode nothing."""


class StandInGenerator(StandInWorker, GenerateWorker):
    """A language model with a KV cache on the simulated device, in one allocation; it yields token 1 for every row."""

    def __init__(
        self,
        memory: SimulatedMemory,
        *,
        kv_bytes_per_token: int,
        weights_bytes: int = 0,
        state_bytes: int = 0,
    ) -> None:
        """Allocate the weights; `state_bytes` is the recurrent state of all slots, allocated with the KV cache."""
        super().__init__(memory, weights_bytes=weights_bytes)
        self._kv_bytes_per_token = kv_bytes_per_token
        self._state_bytes = state_bytes
        self._kv: list[int] = []

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate the KV cache, replacing the previous one.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """
        del touch
        self.drop_kv()
        kv_bytes = blocks * block_size * self._kv_bytes_per_token
        self._kv = [self.memory.allocate(size) for size in (kv_bytes, self._state_bytes) if size]

    def drop_kv(self) -> None:
        """Free the KV cache."""
        for handle in self._kv:
            self.memory.free(handle)
        self._kv = []

    def step(self, batch: Batch) -> Sampled:
        """Yield a token for every row."""
        rows = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
        return Sampled(np.ones(rows, np.int32))
