"""The interface of a model family: sizes, modules, token counts and positions.

Everything that only reads `config.json` works without torch, so that inspecting a checkpoint is quick; methods that
build or run a module import torch and transformers.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError
from vsched_workers.families.generic import read_config
from vsched_workers.families.qwen_positions import Items, mrope_positions
from vsched_workers.families.sharing import Sharing
from vsched_workers.families.video_processors import VIDEO_PROCESSORS, VideoProcessor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vsched_workers.families.decoders import Decoder


class Family(ABC):
    """A model family; stateless.

    Attributes:
        name: The `model_type` of its `config.json`.
        library_prefix: The beginning of the names of its classes in transformers.
        vision_class: The class of its vision tower in transformers.
        decoder: The description of its language model's layers.
        language_prefixes: Prefixes of its language model's tensors in a checkpoint, newest layout first.
        vision_prefixes: The same for its vision tower.
        text_defaults: Defaults of optional entries in the text part of `config.json`.
        vision_defaults: The same for its vision part.
        language_sharing: Tensor parallelism of the language model without its head.
        flips: Patterns of language model tensors whose last two dimensions may be swapped in a file.
        vision_sharing: Tensor parallelism of the vision tower.
        writes_timestamps: Whether timestamps stand between the frame groups of a video, instead of positions with a
            temporal axis.
        video_processor: The class of its video processor.
        own_modules: Whether its modules are vsched's own, so that ranks do not import transformers.
    """

    name: ClassVar[str]
    library_prefix: ClassVar[str]
    vision_class: ClassVar[str]
    decoder: ClassVar[Decoder]
    language_prefixes: ClassVar[tuple[str, ...]]
    vision_prefixes: ClassVar[tuple[str, ...]]
    text_defaults: ClassVar[Mapping[str, Any]]
    vision_defaults: ClassVar[Mapping[str, Any]]
    language_sharing: ClassVar[Sharing]
    flips: ClassVar[tuple[str, ...]] = ()
    vision_sharing: ClassVar[Sharing]
    writes_timestamps: ClassVar[bool] = False
    own_modules: ClassVar[bool] = False
    video_processor: ClassVar[VideoProcessor] = VIDEO_PROCESSORS["Qwen2VLVideoProcessor"]

    def text(self, config: Mapping[str, Any], key: str) -> Any:
        """Return an entry of the text part; older checkpoints have it at the top level."""
        part = config.get("text_config")
        found = (part if isinstance(part, Mapping) else config).get(key)
        return found if found is not None else self._default(self.text_defaults, key, "text_config")

    def vision(self, config: Mapping[str, Any], key: str) -> Any:
        """Return an entry of the vision part."""
        part = config.get("vision_config")
        found = part.get(key) if isinstance(part, Mapping) else None
        default = self.vision_defaults, key, "vision_config"
        return self._default(*default) if found is None else found

    def _default(self, defaults: Mapping[str, Any], key: str, part: str) -> Any:
        if key not in defaults:
            raise CheckpointError(
                f"config.json: {part}.{key} is missing. Remedy: download the checkpoint again."
            )
        return defaults[key]

    def unsupported(self, config: Mapping[str, Any]) -> str | None:
        """Return an unsupported feature that a checkpoint asks for, in the plural; None if there is none."""
        return None

    @abstractmethod
    def head_dim(self, config: Mapping[str, Any]) -> int:
        """Return the head dimension."""

    @abstractmethod
    def embedding_levels(self, config: Mapping[str, Any]) -> int:
        """Return the number of rows that the encoder computes per token."""

    @abstractmethod
    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Run the tower over the patches of several images.

        Shape: `pixels` [sum of t*h*w, patch values]; `grids` int64 [images, 3]. Returns [tokens, levels * hidden].
        """

    def model_config(self, path: str) -> Any:
        """Load the configuration object of the whole model."""
        return read_config(Path(path), self.name)

    def build_language(self, path: str, attention: str) -> nn.Module:
        """Build the language model without its head, on the current default device, uninitialized."""
        config = self.model_config(path).text_config
        return self._built(f"{self.library_prefix}TextModel", config, attention)

    def build_vision(self, path: str, attention: str) -> nn.Module:
        """Build the vision tower on the current default device, uninitialized."""
        return self._built(self.vision_class, self.model_config(path).vision_config, attention)

    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the mrope positions of a prompt, int64 [3, tokens], and the delta of the positions after it.

        `config` is the configuration object of the whole model.
        """
        vision = config.vision_config
        # Only positions with a temporal axis, of families without timestamps, depend on the rate.
        rate = getattr(vision, "tokens_per_second", 1)
        return mrope_positions(
            len(token_ids), items, merge=vision.spatial_merge_size, per_second=rate
        )

    def _built(self, name: str, config: Any, attention: str) -> nn.Module:
        config._attn_implementation = attention  # noqa: SLF001  # as transformers sets it
        made: nn.Module = self._library(name)(config)
        return made

    def _library(self, name: str) -> Any:
        """Return a class in transformers."""
        module = importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        return getattr(module, name)
