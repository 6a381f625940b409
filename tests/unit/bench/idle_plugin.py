"""A worker plug-in without a model: a token is a byte, and every step ends at once, so only the server takes time."""

from __future__ import annotations

from tests.bench.parts.stub_plugin import StubPlugin
from tests.unit.media.fakes import FakePreprocessor
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInGenerator, stand_in_info
from vsched.types import ModelInfo
from vsched.worker.contract import GenerateWorker, Preprocessor, Progress, WorkerSettings

NAME = "tests.unit.bench.idle_plugin:plugin"


class IdlePlugin(StubPlugin):
    """The plug-in that the configuration names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        sizes = {"vocab_size": 256, "context_tokens": 4096, "item_tokens_max": 64}
        return stand_in_info(family="idle", path=path, image_token_id=0, **sizes)

    def forgo_models(self, path: str) -> None:
        """No-op: there are none."""

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        return FakePreprocessor(info)

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        memory = SimulatedMemory(1 << 30, pool="idle")
        return StandInGenerator(memory, kv_bytes_per_token=info.kv_bytes_per_token)


plugin = IdlePlugin()
