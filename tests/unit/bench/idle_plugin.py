"""A worker plug-in without a model: a token is a byte, and every step ends at once, so only the server takes time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.bench.parts.stub_plugin import StubPlugin
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInGenerator, stand_in_info
from vsched.types import ModelInfo
from vsched.worker.contract import GenerateWorker, Preprocessor, Progress, WorkerSettings
from vsched_workers.checkpoint.tokenize import ByteDetokenizer, TokenTable

NAME = "tests.unit.bench.idle_plugin:plugin"
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


class IdlePlugin(StubPlugin):
    """The plug-in that the configuration names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        sizes = {"vocab_size": 256, "context_tokens": 4096, "item_tokens_max": 64}
        return stand_in_info(family="idle", path=path, image_token_id=0, **sizes)

    def forgo_models(self, path: str) -> None:
        """No-op: there are none."""

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        return Letters(info)

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        memory = SimulatedMemory(1 << 30, pool="idle")
        return StandInGenerator(memory, kv_bytes_per_token=info.kv_bytes_per_token)


plugin = IdlePlugin()
