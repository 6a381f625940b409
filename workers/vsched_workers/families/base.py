"""The interface of a model family: sizes, modules, token counts and positions.

Everything that only reads `config.json` works without torch, so that inspecting a checkpoint is quick; methods that
build or run a module import torch and transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError
from vsched.types import ItemPlace
from vsched_workers.families.sharing import Sharing

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vsched_workers.families.decoder import Decoder
    from vsched_workers.families.qwen_image import ResizeLimits

Grid = tuple[int, int, int]
Items = Sequence[ItemPlace]


class LanguageFamily(Protocol):
    """A family's language model; attributes and methods as in `Family`."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def language_prefixes(self) -> tuple[str, ...]: ...

    @property
    def language_sharing(self) -> Sharing: ...

    @property
    def flips(self) -> tuple[str, ...]: ...

    def model_config(self, path: str) -> Any: ...

    def build_language(self, path: str, attention: str) -> nn.Module: ...

    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]: ...


class Family(ABC):
    """A model family; stateless.

    Attributes:
        name: The `model_type` of its `config.json`.
        decoder: The description of its language model's layers.
        language_prefixes: Prefixes of its language model's tensors in a checkpoint, newest layout first.
        vision_prefixes: The same for its vision tower.
        text_defaults: Defaults of optional entries in the text part of `config.json`.
        vision_defaults: The same for its vision part.
        language_sharing: Tensor parallelism of the language model without its head.
        flips: Patterns of language model tensors whose last two dimensions may be swapped in a file.
        vision_sharing: Tensor parallelism of the vision tower.
    """

    name: ClassVar[str]
    decoder: ClassVar[Decoder]
    language_prefixes: ClassVar[tuple[str, ...]]
    vision_prefixes: ClassVar[tuple[str, ...]]
    text_defaults: ClassVar[Mapping[str, Any]]
    vision_defaults: ClassVar[Mapping[str, Any]]
    language_sharing: ClassVar[Sharing]
    flips: ClassVar[tuple[str, ...]] = ()
    vision_sharing: ClassVar[Sharing]

    def text(self, config: Mapping[str, Any], key: str) -> Any:
        """Return an entry of the text part; older checkpoints have it at the top level."""
        part = config.get("text_config")
        found = part.get(key) if isinstance(part, Mapping) else None
        if found is None and not isinstance(part, Mapping):
            found = config.get(key)
        return found if found is not None else self._default(self.text_defaults, key, "text_config")

    def vision(self, config: Mapping[str, Any], key: str) -> Any:
        """Return an entry of the vision part."""
        part = config.get("vision_config")
        found = part.get(key) if isinstance(part, Mapping) else None
        return (
            found
            if found is not None
            else self._default(self.vision_defaults, key, "vision_config")
        )

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
    def build_language(self, path: str, attention: str) -> nn.Module:
        """Build the language model without its head, on the current default device, uninitialized."""

    @abstractmethod
    def build_vision(self, path: str, attention: str) -> nn.Module:
        """Build the vision tower on the current default device, uninitialized."""

    @abstractmethod
    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Run the tower over the patches of several images.

        Shape: `pixels` [sum of t*h*w, patch values]; `grids` int64 [images, 3]. Returns [tokens, levels * hidden].
        """

    @abstractmethod
    def largest_units(
        self, limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
    ) -> dict[int, int]:
        """Return the largest images: the most tokens along the long side for each number along the short side.

        `limits` bound the resized image, `tokens_max` its tokens (0: no bound), `pixels_max` the original image;
        `factor` is the side of a token in pixels.
        """

    @abstractmethod
    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the mrope positions of a prompt, int64 [3, tokens], and the delta of the positions after it.

        `config` is the module's own configuration object, of the whole model.
        """

    @abstractmethod
    def model_config(self, path: str) -> Any:
        """Load the configuration object of the whole model."""
