"""A worker plug-in without a model: tokens follow from earlier tokens, embeddings from the metadata.

Further behaviour is given as JSON in place of the path of a checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import DeviceOutOfMemory
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder, StandInGenerator, stand_in_info
from vsched.types import ArenaLayout, ModelInfo
from vsched.worker.contract import (
    Batch,
    EncodeJob,
    Progress,
    Sampled,
    SequenceState,
    WorkerPlugin,
    WorkerSettings,
)

NAME = "tests.unit.rank.fake_plugin:plugin"
KV_BYTES = 8
LAYOUT = ArenaLayout(pixel_bytes=4096, pages=8, page_rows=4, row_bytes=16)


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of the plug-in beyond its results.

    Attributes:
        load_s: Time to load.
        load_error: An error to fail with while loading: `DeviceOutOfMemory`, `MemoryError` or another.
        load_signal: A signal that kills the process while it loads, as if out of memory; 0 for none.
        meet: A directory in which this many ranks must meet while they load.
        step_s: Time of a generate step; if `slow_at` is given, only of steps with a sequence of that many tokens.
        hook_s: Interval of the hook `balance`, None for no hooks.
        forkable: The modules that a fork server imports for its ranks; with none, ranks are new processes.
    """

    load_s: float = 0.0
    load_error: str = ""
    load_signal: int = 0
    meet: str = ""
    meet_ranks: int = 0
    step_s: float = 0.0
    slow_at: int = 0
    hook_s: float | None = None
    forkable: tuple[str, ...] = ()


def model_info(behaviour: Behaviour | None = None) -> ModelInfo:
    """Return the facts of a model with this behaviour."""
    return stand_in_info(
        path=msgspec.json.encode(behaviour or Behaviour()).decode(), kv_bytes_per_token=KV_BYTES
    )


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that follows; never a negative or a special one."""
    return (sum((index + 1) * token for index, token in enumerate(tokens)) * 31) % 80 + 10


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Tokens that follow a prompt, however it is scheduled."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def raise_named(name: str) -> NoReturn:
    """Raise the error of this name."""
    known = {"DeviceOutOfMemory": DeviceOutOfMemory, "MemoryError": MemoryError}
    raise known.get(name, RuntimeError)("weights.safetensors is not there")


class FakeEncoder(StandInEncoder):
    """Fills every row of an item with the first byte of its metadata."""

    def __init__(self) -> None:
        super().__init__(_device())

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        for job in jobs:
            for page in job.pages:
                embeddings[page] = job.metadata[0]


class FakeGenerator(StandInGenerator):
    """Checks its embeddings, and yields `next_token` of each sequence."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(_device(), kv_bytes_per_token=KV_BYTES, weights_bytes=1 << 10)
        self._behaviour = behaviour

    def prepare(self, sequence: SequenceState) -> None:
        sequence.state = sequence.prompt_length

    def step(self, batch: Batch) -> Sampled:
        decodes = zip(batch.decode_sequences, batch.decode_positions.tolist(), strict=True)
        rows = [(sequence, position + 1) for sequence, position in decodes]
        for chunk in batch.chunks:
            written = [place.metadata[0] for place in chunk.sequence.items]
            for item in chunk.items:
                assert batch.embeddings[item.pages[0], 0, 0] in written
            if chunk.samples:
                rows.append((chunk.sequence, chunk.stop))
        if self._behaviour.slow_at in (0, *(length for _, length in rows)):
            time.sleep(self._behaviour.step_s)
        tokens = [next_token(sequence.tokens[:length].tolist()) for sequence, length in rows]
        return Sampled(np.asarray(tokens, np.int32))

    def hooks(self) -> dict[str, float]:
        return {} if self._behaviour.hook_s is None else {"balance": self._behaviour.hook_s}

    def run_hook(self, name: str) -> None:
        """No-op."""


def _device() -> SimulatedMemory:
    return SimulatedMemory(1 << 30, pool=f"fake of {os.getpid()}")


class FakePlugin(WorkerPlugin):
    """The plug-in that `load_worker` finds."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        return model_info(msgspec.json.decode(path, type=Behaviour))

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Any number of ranks is valid."""

    def forkable_modules(self, info: ModelInfo, device: str) -> Sequence[str]:
        return msgspec.json.decode(info.path, type=Behaviour).forkable

    def load_preprocessor(self, info: ModelInfo) -> Any:
        raise NotImplementedError

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> FakeEncoder:
        _load(info, progress)
        return FakeEncoder()

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> FakeGenerator:
        return FakeGenerator(_load(info, progress))


def _load(info: ModelInfo, progress: Progress) -> Behaviour:
    behaviour = msgspec.convert(json.loads(info.path), Behaviour)
    progress("weights", 0.5)
    time.sleep(behaviour.load_s)
    if behaviour.meet_ranks:
        Path(behaviour.meet, str(os.getpid())).touch()
        while len(list(Path(behaviour.meet).iterdir())) < behaviour.meet_ranks:
            time.sleep(0.005)
    if behaviour.load_error:
        raise_named(behaviour.load_error)
    progress("weights", 1.0)
    if behaviour.load_signal:
        os.kill(os.getpid(), behaviour.load_signal)
    return behaviour


plugin = FakePlugin()
