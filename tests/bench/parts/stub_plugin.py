"""A worker plug-in whose ranks compute nothing, to measure everything except the model.

Checkpoint, tokenizer, chat template and image processor are those of the plug-in `transformers`.
"""

from __future__ import annotations

import numpy as np

from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder, StandInGenerator
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
from vsched.worker.registry import load_worker

NAME = "tests.bench.parts.stub_plugin:plugin"
REAL = "transformers"
_DEVICE_BYTES = 1 << 40
_WORD = " word"
"""Every output token is a part of this word."""


class StubGenerator(StandInGenerator):
    """Yields the token of a word for every row."""

    def __init__(self, info: ModelInfo) -> None:
        memory = SimulatedMemory(_DEVICE_BYTES, pool="stub")
        super().__init__(memory, kv_bytes_per_token=info.kv_bytes_per_token)
        tokens = load_worker(REAL).load_preprocessor(info).tokenize(_WORD)
        self._token = next(token for token in reversed(tokens) if token not in info.stop_token_ids)

    def step(self, batch: Batch) -> Sampled:
        rows = len(super().step(batch).tokens)
        return Sampled(np.full(rows, self._token, np.int32))


class StubPlugin(WorkerPlugin):
    """The plug-in that the configuration of the measured server names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        return load_worker(REAL).inspect(path, dtype=dtype, item_tokens_max=item_tokens_max)

    def forgo_models(self, path: str) -> None:
        """Let the preprocessor load without models."""
        load_worker(REAL).forgo_models(path)

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Accept any number of ranks."""

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        return load_worker(REAL).load_preprocessor(info)

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        """Return an encoder that does not write to the arena."""
        del info, settings, progress
        return StandInEncoder(SimulatedMemory(_DEVICE_BYTES, pool="stub"))

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        """Return a generator that always yields the same token."""
        del settings, progress
        return StubGenerator(info)


plugin = StubPlugin()
