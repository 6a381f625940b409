"""The worker plug-ins of a simulated engine: model facts and a preprocessor, and those of its ranks with workers.

Text consists of decimal token ids separated by blanks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image as PillowImage

from vsched.errors import RequestRefused
from vsched.sim.ranks.symbolic_model import (
    DRAFT,
    END_TOKEN,
    GROUP_FRAMES,
    IMAGE_TOKEN,
    PIXELS,
    VIDEO_TOKEN,
    VOCABULARY,
    SymbolicGrammars,
    group_plan,
    image_plan,
    pixels,
)
from vsched.sim.ranks.symbolic_workers import (
    Process,
    SymbolicDraft,
    SymbolicEncoder,
    SymbolicGenerator,
)
from vsched.sim.workload.images import SETTINGS_DIGEST, SIDE
from vsched.sim.world import World
from vsched.types import ModelInfo, Spans
from vsched.worker.contract import (
    AdapterFacts,
    Arrays,
    Companion,
    EncodeWorker,
    FrameSize,
    GenerateWorker,
    ImagePlan,
    ItemPlan,
    Preprocessor,
    Progress,
    VideoFacts,
    VideoPlan,
    VideoSampling,
    WorkerPlugin,
    WorkerSettings,
)
from vsched.worker.expansion import expand_images

NAME = "vsched.sim.ranks.plugin:plugin"
IMAGE_TEXT, VIDEO_TEXT = "<image>", "<video>"
_PLACEHOLDERS = {"image": IMAGE_TEXT, "video": VIDEO_TEXT}
ITEM_TOKENS_MAX = 128
CONTEXT_TOKENS = 4096
HYBRID = "simulated-hybrid"
"""Path of the checkpoint whose layers have a recurrent state; all others have none."""
STATE_BYTES = 4 << 20
SEES_IMAGES, SEES_PROMPTS = "simulated-sees-images", "simulated-sees-prompts"
"""Paths of checkpoints with bidirectional attention within an image, or within the prompt."""
SEEN_TOKENS_MAX = 49
"""Maximum tokens of an image with bidirectional attention: it fits into a step of a small engine."""


class SimulatedDetokenizer:
    """Detokenizer that writes each token as a number and a blank."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in token_ids)

    def flush(self) -> str:
        return ""


class SimulatedPreprocessor(Preprocessor):
    """Tokenizer, chat template and image processor without a model."""

    settings_digest = SETTINGS_DIGEST
    companion = Companion("tokens", ("tokens",))

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def render(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        texts: list[str] = []
        for message in messages:
            content = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content
            texts += [
                part["text"] if "text" in part else _PLACEHOLDERS[part["type"]] for part in parts
            ]
        return " ".join(texts)

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        del images
        return [self._token(word) for word in text.split()]

    def _token(self, word: str) -> int:
        if word == IMAGE_TEXT:
            return self.info.placeholder
        if word == VIDEO_TEXT:
            return VIDEO_TOKEN
        if not word.isdecimal():
            raise RequestRefused(f"{word!r} is not a token. Remedy: send numbers.", code="no_token")
        return int(word)

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
            raise RequestRefused(f"{tokens} tokens. Remedy: send at least one.", code="no_tokens")
        return image_plan(tokens)

    def process_image(self, image: PillowImage.Image) -> Arrays:
        pixel = image.getpixel((0, 0))
        assert isinstance(pixel, tuple), "an RGB image"
        return {PIXELS: pixels(pixel, self.plan_image(*image.size).tokens)}

    def plan_video(
        self, facts: VideoFacts, sampling: VideoSampling, *, frames_max: int, sample: bool = True
    ) -> VideoPlan:
        del sampling, frames_max
        assert not sample, "simulated videos are sent as frames"
        plan = group_plan(self.plan_image(facts.width, facts.height).tokens)
        size = FrameSize(facts.width, facts.height)
        groups = (plan,) * (facts.frames // GROUP_FRAMES)
        return VideoPlan(tuple(range(facts.frames)), size, groups)

    def process_frames(self, frames: Sequence[PillowImage.Image], size: FrameSize) -> Arrays:
        assert all(frame.size == (size.width, size.height) for frame in frames)
        return self.process_image(frames[-1])

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[int], list[Spans]]:
        return expand_images(token_ids, plans, placeholder=self.info.placeholder, video=VIDEO_TOKEN)


class SimulatedPlugin(WorkerPlugin):
    """The plug-in that the configuration of a simulated engine names."""

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
            video_token_id=VIDEO_TOKEN,
            stop_token_ids=(END_TOKEN,),
        )

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Accept any number of ranks."""

    def load_grammars(self, info: ModelInfo) -> SymbolicGrammars:
        """Return the compiler of grammars that are choices of token sequences."""
        del info
        return SymbolicGrammars()

    def verifies_drafts(self, info: ModelInfo, *, device: str) -> bool:
        """Return True if the model has no recurrent state: rejected draft tokens cannot be removed from a state."""
        del device
        return not info.state_bytes

    def swaps_kv(self, info: ModelInfo, *, device: str) -> bool:
        """Return True if the KV cache is the whole state of a sequence."""
        del device
        return not info.state_bytes

    def keep_adapter(self, info: ModelInfo, path: str, kept: str, *, rank_max: int) -> AdapterFacts:
        """Store nothing: a simulated adapter is only a number."""
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


class RankPlugin(SimulatedPlugin):
    """The worker plug-in of one simulated rank."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> SymbolicEncoder:
        """Load the vision tower."""
        del info
        progress("weights", 0.0)
        return SymbolicEncoder(self._world, self._process, settings)

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> SymbolicGenerator:
        """Load the language model."""
        progress("weights", 0.0)
        kind = SymbolicDraft if info.path.startswith(DRAFT) else SymbolicGenerator
        return kind(self._world, self._process, info, settings)

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]]:
        """Return a single batch of the largest images."""
        del pixels_max
        each = min(info.item_tokens_max, tokens or info.item_tokens_max)
        count = min(items, max(1, tokens // each)) if tokens else items
        return [[image_plan(each)] * count]


plugin = SimulatedPlugin()
