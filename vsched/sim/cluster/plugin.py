"""The worker plug-in of a simulated engine, as far as the engine itself asks: facts, and a preprocessor.

Text is token ids in decimal, with blanks between them. What ranks load is in `workers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image as PillowImage

from vsched.errors import RequestRefused
from vsched.sim.ranks.symbolic_grammars import SymbolicGrammars
from vsched.sim.ranks.symbolic_model import (
    END_TOKEN,
    IMAGE_TOKEN,
    PATCHES_PER_TOKEN,
    PIXELS,
    VOCABULARY,
    image_plan,
)
from vsched.sim.workload.images import SETTINGS_DIGEST, SIDE
from vsched.types import ModelInfo, Spans
from vsched.worker.capabilities import AdapterFacts
from vsched.worker.contract import (
    Arrays,
    Companion,
    EncodeWorker,
    GenerateWorker,
    ImagePlan,
    Progress,
    WorkerSettings,
)
from vsched.worker.expansion import expand_images

NAME = "vsched.sim.cluster.plugin:plugin"
IMAGE_TEXT = "<image>"
ITEM_TOKENS_MAX = 128
CONTEXT_TOKENS = 4096
HYBRID = "simulated-hybrid"
"""Path of a checkpoint whose layers keep a state, too; any other is of one without."""
STATE_BYTES = 4 << 20
SEES_IMAGES, SEES_PROMPTS = "simulated-sees-images", "simulated-sees-prompts"
"""Paths of checkpoints in which the positions of an image see each other, or those of a prompt."""
SEEN_TOKENS_MAX = 49
"""Tokens of an image that sees itself: they fit a step of a small engine."""


class SimulatedDetokenizer:
    """Writes each token as a number and a blank."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in token_ids)

    def flush(self) -> str:
        return ""


class SimulatedPreprocessor:
    """Tokenizer, chat template and image processor of no model."""

    settings_digest = SETTINGS_DIGEST
    companion = Companion("tokens", ("tokens",))
    chat_template = ""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def render(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        texts: list[str] = []
        for message in messages:
            content = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content
            texts += [part.get("text", IMAGE_TEXT) for part in parts]
        return " ".join(texts)

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        del images
        return [self._token(word) for word in text.split()]

    def _token(self, word: str) -> int:
        if word == IMAGE_TEXT:
            return self.info.placeholder
        if not word.isdecimal():
            raise RequestRefused(f"{word!r} is no token. Remedy: send numbers.", code="no_token")
        return int(word)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return SimulatedDetokenizer().push(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id

    def detokenizer(self, *, special: bool = False) -> SimulatedDetokenizer:
        del special
        return SimulatedDetokenizer()

    def plan_image(self, width: int, height: int) -> ImagePlan:
        tokens = min(max(width * height // SIDE**2, 1), self.info.item_tokens_max)
        return image_plan(tokens)

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        (tokens,) = companion
        if tokens < 1:
            raise RequestRefused(f"{tokens} are no tokens. Remedy: send some.", code="no_tokens")
        return image_plan(tokens)

    def process_image(self, image: PillowImage.Image) -> Arrays:
        tokens = self.plan_image(*image.size).tokens
        pixel = image.getpixel((0, 0))
        assert isinstance(pixel, tuple), "an RGB image"
        row = np.array([*pixel, tokens], np.float32)
        return {PIXELS: np.tile(row, (PATCHES_PER_TOKEN * tokens, 1))}

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        return expand_images(token_ids, plans, placeholder=self.info.placeholder)


class SimulatedPlugin:
    """What the configuration of a simulated engine names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        del dtype
        largest = SEEN_TOKENS_MAX if path == SEES_IMAGES else ITEM_TOKENS_MAX
        return ModelInfo(
            family="simulated",
            path=path,
            dtype="float32",
            hidden_size=4,
            embedding_levels=1,
            vocab_size=VOCABULARY,
            context_tokens=CONTEXT_TOKENS,
            kv_bytes_per_token=1 << 20,
            state_bytes=STATE_BYTES if path == HYBRID else 0,
            item_atomic=path == SEES_IMAGES,
            prompt_atomic=path == SEES_PROMPTS,
            item_tokens_max=min(item_tokens_max or largest, largest),
            image_token_id=IMAGE_TOKEN,
            stop_token_ids=(END_TOKEN,),
        )

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Every number of ranks will do."""

    def load_grammars(self, info: ModelInfo) -> SymbolicGrammars:
        """Return what compiles choices of tokens."""
        del info
        return SymbolicGrammars()

    def verifies_drafts(self, info: ModelInfo, *, device: str) -> bool:
        """Return whether steps can run drafts: no row takes back what it did to a state."""
        del device
        return not info.state_bytes

    def swaps_kv(self, info: ModelInfo, *, device: str) -> bool:
        """Return whether KV is all that a sequence has."""
        del device
        return not info.state_bytes

    def keep_adapter(self, info: ModelInfo, path: str, kept: str, *, rank_max: int) -> AdapterFacts:
        """Keep nothing: an adapter is no more than its number."""
        del info, path, kept
        return AdapterFacts(rank=rank_max)

    def load_preprocessor(self, info: ModelInfo) -> SimulatedPreprocessor:
        return SimulatedPreprocessor(info)

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        raise NotImplementedError("simulated ranks load theirs from their launcher")

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        raise NotImplementedError("simulated ranks load theirs from their launcher")


plugin = SimulatedPlugin()
