"""A worker plug-in without a model: a token is a byte, and every step ends at once, so only the server takes time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder, StandInGenerator, stand_in_info
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Batch,
    EncodeWorker,
    GenerateWorker,
    Preprocessor,
    Progress,
    Sampled,
    WorkerPlugin,
    WorkerSettings,
)
from vsched_workers.checkpoint.tokenize import ByteDetokenizer, TokenTable

NAME = "tests.unit.bench.idle_plugin:plugin"
LETTER = ord("e")
TABLE = TokenTable(*2 * [[bytes([byte]) for byte in range(256)]])


class Letters(Preprocessor):
    """Tokenizer and template of no model."""

    settings_digest = b"idle"

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def render(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        return "\n".join(str(message["content"]) for message in messages)

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        del images
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return TABLE.bytes_of(token_id)

    def detokenizer(self, *, special: bool = False) -> ByteDetokenizer:
        return ByteDetokenizer(TABLE, special=special)


class IdleGenerator(StandInGenerator):
    """Yields the same letter for every row."""

    def step(self, batch: Batch) -> Sampled:
        rows = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
        return Sampled(np.full(rows, LETTER, np.int32))


def _device() -> SimulatedMemory:
    return SimulatedMemory(1 << 30, pool="idle")


class IdlePlugin(WorkerPlugin):
    """The plug-in that the configuration names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        return stand_in_info(
            family="idle",
            path=path,
            vocab_size=256,
            context_tokens=4096,
            item_tokens_max=64,
            image_token_id=0,
        )

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Any number of ranks is valid."""

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        return Letters(info)

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        return StandInEncoder(_device())

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        return IdleGenerator(_device(), kv_bytes_per_token=info.kv_bytes_per_token)


plugin = IdlePlugin()
