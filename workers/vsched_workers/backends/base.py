"""The backend interface: everything about running a model that depends on the device.

`LanguageWorker` and `VisionWorker` handle models, batches and ranks, and use one `Backend`, which
`choice.choose_backend` picks once per worker. There are three: `reference` is torch alone, `cpu` adds fused layers and
compiled kernels, `cuda` adds attention kernels, captured decode steps and copies that overlap with computing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vsched.worker.contract import Batch, Progress, Sampled, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers.adapters.sums import MakeSums, TorchSums
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep
from vsched_workers.batching.recurrent_state import RecurrentStates
from vsched_workers.batching.sampling import SpecialRow, draw_in_numpy
from vsched_workers.batching.swap_area import SwapArea
from vsched_workers.parallel.rank_group import Collectives

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.batching.packed_step import Images
    from vsched_workers.families.decoder import Decoder

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiply activations [..., in] by a weight; return [..., out]."""

RunModel = Callable[[torch.Tensor, torch.Tensor, PagedStep], torch.Tensor]
"""Run a decode step: token ids [rows] and positions [4, 1, rows] to logits [rows, vocabulary]."""


class LanguageLayers(Protocol):
    """The layers of a language model, run over one packed batch."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
        /,
    ) -> torch.Tensor:
        """Return the normalized hidden states of the wanted rows.

        Shape: token ids int64 [rows]; positions int64 [4, 1, rows], the text position and three mrope axes; `wanted`
        has ascending row numbers, including all decode rows. Returns [wanted or more, hidden]: rows beyond the wanted
        ones are padding at the end.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnableLanguage:
    """A language model as a backend runs it.

    Attributes:
        layers: From token ids to hidden states, or to logits if the model includes its head.
        head: From hidden states [rows, hidden] to logits [rows, vocabulary], or this rank's part of the vocabulary; the
            identity if `layers` returns logits.
        weights_bytes: Bytes of the weights on the device; tied weights count once.
        apart: Separate layers and head, for a model that includes its head and computes logits of wanted rows only.
    """

    layers: LanguageLayers
    head: Product
    weights_bytes: int
    apart: tuple[LanguageLayers, Product] | None = None


class CapturedSteps(Protocol):
    """Captured decode steps over one KV cache, which are replayed as a whole."""

    def step(self, batch: Batch) -> Sampled | None:
        """Run a step and sample; return None for a batch that must be run layer by layer instead."""
        ...

    def drop(self) -> None:
        """Drop the captured steps: they point into the KV cache."""
        ...


class Backend(ABC):
    """A device, and the implementation of a rank's models on it.

    Attributes:
        device: The device's name in torch.
        dtype: The data type of models.
        kv_dtype: The data type of KV caches: `dtype` or int8.
        memory: The memory of the device.
        collectives: Communication between ranks on devices of this kind.
        synchronous: Whether a module's call returns when the device is done, so that layers can be timed and encoding
            can pause after one.
        compiles: Whether kernels are compiled while a model is prepared, which is slow the first time.
        layers_reuse_memory: Whether a layer needs no more memory than the layer before it released.
        keeps_indices: Whether the layers of a step share the slots and the mask of a chunk.
        spare_blocks: Extra blocks of a KV cache, for the padding of captured steps.
    """

    synchronous: ClassVar[bool]
    layers_reuse_memory: ClassVar[bool]
    compiles: bool
    keeps_indices: bool
    spare_blocks: int

    def __init__(
        self,
        settings: WorkerSettings,
        dtype: torch.dtype,
        *,
        kv_dtype: torch.dtype | None = None,
        memory: DeviceMemory,
        collectives: Collectives,
    ) -> None:
        self.settings = settings
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = settings.device
        self.memory = memory
        self.collectives = collectives

    def computing(self, kind: Hashable, rows: int) -> AbstractContextManager[None]:
        """Return the context manager in which a step of this kind is computed."""
        return nullcontext()

    # --- matrix products and layers ---

    @abstractmethod
    def prepare_language(
        self, model: nn.Module, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        """Prepare a loaded decoder-only language model for this device; its linear layers may be replaced.

        Shape: `head` [vocabulary, hidden], the embedding itself if the two are tied.
        """

    @abstractmethod
    def prepare_tower(self, tower: nn.Module) -> int:
        """Prepare a loaded vision tower for this device; its layers may be replaced. Return its weights' bytes."""

    @abstractmethod
    def prepare_whole(self, model: nn.Module) -> int:
        """Prepare a loaded language model of the generic path; see `prepare_tower`."""

    @abstractmethod
    def prepare_any_tower(self, model: nn.Module) -> int:
        """Prepare a loaded vision tower of the generic path; see `prepare_tower`."""

    def lays_out(self, module: nn.Module) -> Collection[str]:
        """Return the names of a module's parameters that are repacked, and thus copied, when it is prepared.

        Until then they may lie in mapped files.
        """
        return ()

    def prepare_adapters(self) -> MakeSums:
        """Return the factory of LoRA products for a layer; compile its kernels."""
        return TorchSums

    def compile_language(
        self, config: Any, decoder: Decoder | None, kinds: Sequence[str], progress: Progress
    ) -> int:
        """Compile the kernels of a language model before it is loaded; return the number that was not cached yet.

        `config` is the model's configuration, `decoder` its decoder description if it has one, and `kinds` are the
        quantization formats of its checkpoint. By default this does nothing: kernels are compiled when the model is
        prepared.
        """
        return 0

    def compile_tower(self, tower: nn.Module | None, progress: Progress) -> int:
        """Compile the kernels of a vision tower, in the same way; None is a tower of the generic path."""
        return 0

    def kernels_here(self) -> Mapping[str, int]:
        """Return, for each compiled kernel of this process, the number of its specializations."""
        return {}

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        """Return the index of the largest logit of each row, the first of equal ones; logits [rows, vocabulary]."""

    def draw(self, logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
        """Sample the tokens of special rows, by default with `draw_in_numpy`.

        Raises:
            FloatingPointError: When no token can be drawn.
        """
        return draw_in_numpy(logits, special)

    # --- attention and captured steps ---

    @abstractmethod
    def load_attention(self) -> None:
        """Load the configured attention kernels of a language model; compile them unless they need a cache.

        Raises:
            ConfigError: When the configured kernel is not installed.
        """

    @abstractmethod
    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        """Return the kernels for a new cache; `heads` are this rank's query heads.

        `ruled`: some layers have score rules (`ScoreRule`), or values of another size than keys.

        Raises:
            DeviceOutOfMemory: When benchmarking kernels took more memory than available.
        """

    @abstractmethod
    def capture_steps(
        self,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        states: RecurrentStates | None,
    ) -> CapturedSteps | None:
        """Return captured decode steps over a cache; None if steps are not captured."""

    # --- memory and copies ---

    def without_holes(self) -> AbstractContextManager[None]:
        """Avoid heap fragmentation by allocations until the context ends; slower, so for one-time work.

        By default this does nothing: an allocator whose blocks can be split and joined freely needs nothing.
        """
        return nullcontext()

    def sparsely(self) -> AbstractContextManager[None]:
        """Have runs do only a part of their work, with the memory of all of it, until the context ends.

        By default they do all of it.
        """
        return nullcontext()

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, touch: bool) -> torch.Tensor:
        """Allocate zeroed device memory; `touch` makes the host hand out all its pages immediately."""

    def swap_area(self, cache: KvCache, blocks: int) -> SwapArea:
        """Return host memory for swapped blocks of a cache; by default, the cache is in host memory, too.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        return SwapArea(cache, blocks)

    @abstractmethod
    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copy a small array to the device, without waiting for work that is queued there."""

    @abstractmethod
    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Copy rows of host memory to the device.

        Shape: source uint8 [rows, bytes], wanted int64 [n]; returns uint8 [n, bytes].
        """

    @abstractmethod
    def send_pixels(self, parts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        """Copy the pixels of several images, [patches, patch values] each, to the device, concatenated."""
