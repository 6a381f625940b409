"""A worker plug-in without a model: a token is a byte, and every step is over at once. What is left is the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Batch,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    Preprocessor,
    Progress,
    Sampled,
    SequenceState,
    WorkerSettings,
)
from vsched_workers.checkpoint.detokenize import ByteDetokenizer, TokenTable

NAME = "tests.unit.bench.idle_plugin:plugin"
LETTER = ord("e")
TABLE = TokenTable(*2 * [[bytes([byte]) for byte in range(256)]])


class Letters:
    """Tokenizer and template of no model."""

    settings_digest = b"idle"

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def render(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        return "\n".join(str(message["content"]) for message in messages)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return TABLE.bytes_of(token_id)

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer(TABLE)

    def expand(self, token_ids: Sequence[int], _: Sequence[int]) -> tuple[list[int], list[int]]:
        return list(token_ids), []


class IdleWorker:
    """Encodes nothing, and yields the same letter for every row."""

    weights_bytes = 1 << 10

    def __init__(self) -> None:
        self._memory = SimulatedMemory(1 << 30, pool="idle")

    def device_memory(self) -> SimulatedMemory:
        return self._memory

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """There is nothing to encode."""

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """There is nothing to keep."""

    def drop_graphs(self) -> None:
        """There are none."""

    def drop_kv(self) -> None:
        """There is none."""

    def prepare(self, sequence: SequenceState) -> None:
        """There is nothing to prepare."""

    def step(self, batch: Batch) -> Sampled:
        rows = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
        return Sampled(np.full(rows, LETTER, np.int32))


class IdlePlugin:
    """What the configuration names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        return ModelInfo(
            family="idle",
            path=path,
            dtype="float32",
            hidden_size=4,
            embedding_levels=1,
            vocab_size=256,
            context_tokens=4096,
            kv_bytes_per_token=8,
            patch_values=4,
            item_tokens_max=64,
            image_token_id=0,
            stop_token_ids=(),
        )

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Every number of ranks will do."""

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        letters: Any = Letters(info)
        found: Preprocessor = letters
        return found

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        return IdleWorker()

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        return IdleWorker()


plugin = IdlePlugin()
