"""What a backend owns: everything about running a model that depends on the device.

`LanguageWorker` and `VisionWorker` know models, batches and ranks, and speak to one `Backend`; `choice.choose_backend`
picks it once per worker. Three exist: `reference` is torch alone, `cpu` adds fused layers and compiled kernels, `cuda`
adds attention kernels, captured decode steps and copies that overlap with computing.
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
from vsched_workers.batching.sampling import SpecialRow, draw_in_numpy
from vsched_workers.batching.swap_area import SwapArea
from vsched_workers.parallel.rank_group import Collectives

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.batching.packed_step import Images
    from vsched_workers.families.decoder import Decoder

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies rows [..., in] by a weight; returns [..., out]."""

RunModel = Callable[[torch.Tensor, torch.Tensor, PagedStep], torch.Tensor]
"""Runs a step of decode rows: token ids [rows] and positions [4, 1, rows] give logits [rows, vocabulary]."""


class LanguageLayers(Protocol):
    """Runs the layers of a language model over one packed row."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
        /,
    ) -> torch.Tensor:
        """Return the normed hidden states of the wanted rows.

        Shape: token ids int64 [rows]; positions int64 [4, 1, rows], of the text and on three axes; `wanted` ascending
        row numbers, all decode rows among them. Returns [wanted or more, hidden]: rows beyond the wanted ones are
        filling, and come last.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnableLanguage:
    """A language model as a backend runs it.

    Attributes:
        layers: From token ids to hidden states; to logits, where the model has its head within.
        head: From hidden states [rows, hidden] to logits [rows, vocabulary]; a rank's part of the vocabulary where
            ranks share it. From logits, it is nothing.
        weights_bytes: Bytes of the weights on the device; tied weights count once.
        apart: Layers and head as one by one, where `layers` has the head within and yields logits of wanted rows alone.
    """

    layers: LanguageLayers
    head: Product
    weights_bytes: int
    apart: tuple[LanguageLayers, Product] | None = None


class CapturedSteps(Protocol):
    """Decode steps over one KV cache that were captured, and are started again as a whole."""

    def step(self, batch: Batch) -> Sampled | None:
        """Run a step and sample; None for a batch that has to be run layer by layer, which may be done at once."""
        ...

    def drop(self) -> None:
        """Forget what was captured: it points into the KV cache."""
        ...


class Backend(ABC):
    """One device, and how the models of a rank run on it.

    Attributes:
        device: As torch names it.
        dtype: The type of models, and `kv_dtype` that of KV caches: the same, or int8.
        memory: The memory of the device.
        collectives: How ranks on devices of this kind talk with each other.
        synchronous: Whether a call of a module returns when the device is done, so that a layer can be timed and
            paused after.
        compiles: Whether kernels are compiled while a model is prepared, which takes a while the first time.
        layers_reuse_memory: Whether a layer takes no more memory than the one before it gave back.
        keeps_indices: Whether the layers of a step share the slots and the mask of a chunk.
        spare_blocks: Blocks that a KV cache needs beyond its own, for the padding of captured steps.
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
        """Return the context that a step of this kind is computed in."""
        return nullcontext()

    # --- products and layers ---

    @abstractmethod
    def prepare_language(
        self, model: nn.Module, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        """Lay a loaded language model of this make out for this device; its linear layers may be replaced.

        Shape: `head` [vocabulary, hidden], the embedding itself where the two are tied.
        """

    @abstractmethod
    def prepare_tower(self, tower: nn.Module) -> int:
        """Lay a loaded vision tower out for this device; its layers may be replaced. Return its weights' bytes."""

    def lays_out(self, module: nn.Module) -> Collection[str]:
        """Return the parameters of a module that are laid out anew when it is prepared, and copied for that.

        Until then they may lie in mapped files.
        """
        return ()

    def prepare_adapters(self) -> MakeSums:
        """Return what makes what keeps adapters' parts of a product; compile what that needs."""
        return TorchSums

    def compile_language(
        self, config: Any, decoder: Decoder | None, kinds: Sequence[str], progress: Progress
    ) -> int:
        """Compile what a language model will need, before it is loaded; return how many kernels were not there yet.

        `config` is that of the model, `decoder` its make where it is of one, and `kinds` are those of weights that its
        checkpoint has in fewer bits. By default nothing is done: what has to be compiled is when it is prepared.
        """
        return 0

    def compile_tower(self, tower: nn.Module | None, progress: Progress) -> int:
        """Compile what a vision tower will need, before it has weights, in the same way; None is one of any make."""
        return 0

    def kernels_here(self) -> Mapping[str, int]:
        """Return for how many kinds of arguments this process has each compiled kernel; see `CountsKernels`."""
        return {}

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        """Return the place of the largest logit of each row, the first of equal ones; logits [rows, vocabulary]."""

    def draw(self, logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
        """Choose the tokens of special rows, as `draw_in_numpy` does, which is what there is by default.

        Raises:
            FloatingPointError: When there is nothing to draw from.
        """
        return draw_in_numpy(logits, special)

    # --- attention and captured steps ---

    @abstractmethod
    def load_attention(self) -> None:
        """Load, and compile where that needs no cache, the configured attention kernels of a language model.

        Raises:
            ConfigError: When the kernel that the configuration names is not installed.
        """

    @abstractmethod
    def choose_attention(self, cache: KvCache, heads: int) -> AttentionKernels:
        """Return the kernels for a cache that was just built; `heads` are this rank's query heads.

        Raises:
            DeviceOutOfMemory: When trying kernels out took more memory than there is.
        """

    @abstractmethod
    def capture_steps(
        self, cache: KvCache, attention: AttentionKernels, run: RunModel
    ) -> CapturedSteps | None:
        """Return what captures decode steps over a cache; None where steps are not captured."""

    # --- memory and copies ---

    def without_holes(self) -> AbstractContextManager[None]:
        """Have what is allocated and freed until the context ends leave no holes: it is slower, for what is done once.

        By default nothing is done: an allocator of blocks that can be split and joined at will needs nothing.
        """
        return nullcontext()

    def sparsely(self) -> AbstractContextManager[None]:
        """Have runs until the context ends do a part of their work only, which takes the memory that all of it would.

        By default they do all of it.
        """
        return nullcontext()

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, touch: bool) -> torch.Tensor:
        """Allocate memory of the device that reads as zeros; with `touch`, the host hands all of it out now."""

    def swap_area(self, cache: KvCache, blocks: int) -> SwapArea:
        """Return places for blocks of a cache in host memory; by default, the cache is in that, too.

        Raises:
            DeviceOutOfMemory: When the host has not as much.
        """
        return SwapArea(cache, blocks)

    @abstractmethod
    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return a small array on the device; the host waits for nothing that the device has to do first."""

    @abstractmethod
    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Return rows of host memory on the device.

        Shape: source uint8 [rows, bytes], wanted int64 [n]; returns uint8 [n, bytes].
        """

    @abstractmethod
    def send_pixels(self, parts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        """Return the pixels of several images, [patches, patch values] each, one after the other on the device."""
