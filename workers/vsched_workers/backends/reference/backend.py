"""The backend: everything about running a model that depends on the device.

`LanguageWorker` and `VisionWorker` handle models, batches and ranks, and use one `Backend`, which
`choice.choose_backend` picks once per worker. There are three: the one in this file is torch alone, `cpu` adds fused
layers and compiled kernels, `cuda` adds attention kernels, captured decode steps and copies that overlap with
computing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.nn import functional

from vsched.worker.contract import Progress, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers.adapters.places import MakeSums, TorchSums
from vsched_workers.backends.base import CapturedSteps, RunModel, RunnableLanguage
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather
from vsched_workers.backends.reference.host_memory import HostMemory, mapped_pieces, zeroed_pages
from vsched_workers.backends.reference.layers import ModuleLayers, stored_bytes
from vsched_workers.backends.reference.packed_weights import (
    MakeProduct,
    PackedLinear,
    PackedProduct,
    block_activations,
    flatten_patches,
    pack_linears,
    replace_linears,
    warm_up,
)
from vsched_workers.batching.kv_cache import KvCache, SwapArea
from vsched_workers.batching.paged_attention import AttentionKernels
from vsched_workers.batching.recurrent_state import RecurrentStates
from vsched_workers.batching.sampling import SpecialRow, draw_in_torch, greedy_tokens
from vsched_workers.parallel.rank_group import Collectives
from vsched_workers.quantized.experts import MultiplyEach, one_by_one, pack_experts
from vsched_workers.quantized.layers import tie_embedding

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.families.decoders import Decoder


_DISTRIBUTED: Any = torch.distributed


class GlooCollectives:
    """See `Collectives`."""

    exchanges = True
    wakes_peers = True

    def connect(self, store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
        gloo = _DISTRIBUTED.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001  # torch offers these under such names only
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        return gloo(store, rank, size, options)


class Backend:
    """A device, and the implementation of a rank's models on it: here torch on the host, bit-exact to transformers.

    Attributes:
        device: The device's name in torch.
        dtype: The data type of models.
        kv_dtype: The data type of KV caches: `dtype` or int8.
        memory: The memory of the device.
        collectives: Communication between ranks on devices of this kind.
        synchronous: Whether a module's call returns when the device is done, so that layers can be timed and encoding
            can pause after one.
        compiles: Whether kernels are compiled while a model is prepared, which is slow the first time.
        fuses_mixtures: Whether layers with mixtures of experts can be fused, but for the experts.
        keeps_indices: Whether the layers of a step share the slots and the mask of a chunk, which the step keeps.
        spare_blocks: Extra blocks of a KV cache, for the padding of captured steps.
        make_product: Makes the product of a linear layer; None if weights are not packed.
        make_head: Makes the product of the head, likewise.
        make_plain: Makes that of a patch embedding, which is not quantized.
    """

    synchronous: ClassVar[bool] = True
    compiles = False
    fuses_mixtures = False
    keeps_indices = False
    spare_blocks = 0
    make_product: MakeProduct | None = None
    make_head: MakeProduct | None = None
    make_plain: MakeProduct | None = None

    def __init__(
        self, settings: WorkerSettings, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.settings = settings
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = settings.device
        self._host = HostMemory(settings.device, promises=settings.promises)
        self.memory: DeviceMemory = self._host
        self.collectives: Collectives = GlooCollectives()

    def computing(
        self, stage: str, rows: int, kind: Hashable = None
    ) -> AbstractContextManager[None]:
        """Return the context manager in which a step of a stage is computed; steps of one `kind` are comparable."""
        return nullcontext()

    # --- matrix products and layers ---

    def prepare_language(
        self, model: nn.Module, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        """Prepare a loaded decoder-only language model for this device; its linear layers may be replaced.

        Shape: `head` [vocabulary, hidden], the embedding itself if the two are tied.
        """
        layers = ModuleLayers(model, self.send, axes=decoder.axes)
        if self.make_product is None or self.make_head is None:
            product = functools.partial(functional.linear, weight=head)
            return RunnableLanguage(layers, product, stored_bytes(head, *model.parameters()))
        packed_head = self.make_head(head, None)
        tie_embedding(cast("nn.Embedding", model.embed_tokens), head, packed_head)
        size = self._pack(model, packed_head) + packed_head.size_bytes
        return RunnableLanguage(layers, packed_head, size + stored_bytes(*model.parameters()))

    def prepare_tower(self, tower: nn.Module) -> int:
        """Prepare a loaded vision tower for this device; its layers may be replaced. Return its weights' bytes."""
        flatten_patches(tower, self.make_plain)
        return self._pack_tower(tower)

    def prepare_whole(self, model: Any) -> int:
        """Prepare a loaded language model of the generic path; see `prepare_tower`."""
        head, make, size = model.get_output_embeddings(), self.make_head, 0
        if make is not None:
            for packed in replace_linears(
                model, lambda each: PackedLinear(each, make) if each is head else None
            ):
                tie_embedding(model.get_input_embeddings(), head.weight, packed.packed)
                size = packed.packed.size_bytes
        return size + self._pack(model) + stored_bytes(*model.parameters())

    def state_functions(self, names: Collection[str]) -> Mapping[str, Callable[..., Any]]:
        """Return replacements for functions that recurrent layers call; compile their kernels.

        `names` are the names in the modules' code.
        """
        return {}

    def prepare_any_tower(self, model: nn.Module) -> int:
        """Prepare a loaded vision tower of the generic path; see `prepare_tower`."""
        if self.make_plain is not None:
            flatten_patches(model, self.make_plain)
        return self._pack_tower(model)

    def _pack_tower(self, tower: nn.Module) -> int:
        size = self._pack(tower)
        block_activations(tower)
        return size + stored_bytes(*tower.parameters())

    def _pack(self, module: nn.Module, *others: PackedProduct) -> int:
        """Pack the linear layers and experts below a module, if weights are packed; return their bytes.

        Compile the kernels of these and of other products.
        """
        if self.make_product is None:
            return 0
        size: int = pack_linears(module, self.make_product)
        mixtures = pack_experts(module, self.make_product, self.experts_together)
        products: list[PackedProduct] = [product for each in mixtures for product in each.products]
        warm_up(module, self.dtype, *others, *products)
        return size + sum(each.size_bytes for each in products)

    def experts_together(self, products: Sequence[Any]) -> MultiplyEach:
        """Return the function that multiplies by the products of experts."""
        return one_by_one(products)

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

    def compile_tower(self, tower: nn.Module, progress: Progress) -> int:
        """Compile the kernels of a vision tower, or of a model with one, in the same way."""
        return 0

    def kernels_here(self) -> Mapping[str, int]:
        """Return, for each compiled kernel of this process, the number of its specializations."""
        return {}

    def argmax(self, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        """Return the token of the largest logit of each row; see `greedy_tokens`."""
        found: npt.NDArray[np.int32] = greedy_tokens(logits).cpu().numpy()
        return found

    def draw(self, logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
        """Sample the tokens of special rows, -1 for none, by default in torch."""
        return draw_in_torch(logits, special)

    # --- attention and captured steps ---

    def load_attention(self) -> None:
        """Load the attention kernels of a language model; compile them unless they need a cache."""

    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        """Return the kernels for a new cache; `heads` are this rank's query heads.

        `ruled`: some layers have score rules (`ScoreRule`), or values of another size than keys.

        Raises:
            DeviceOutOfMemory: When benchmarking kernels took more memory than available.
        """
        return AttentionKernels(decode_by_gather, prefill_by_gather)

    def capture_steps(
        self,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        states: RecurrentStates | None,
    ) -> CapturedSteps | None:
        """Return captured decode steps over a cache; None if steps are not captured."""
        return None

    # --- memory and copies ---

    def without_holes(self) -> AbstractContextManager[None]:
        """Avoid heap fragmentation by allocations until the context ends; slower, so for one-time work."""
        return mapped_pieces()

    def sparsely(self) -> AbstractContextManager[None]:
        """Have runs do only a part of their work, with the memory of all of it, until the context ends.

        By default they do all of it.
        """
        return nullcontext()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, touch: bool) -> torch.Tensor:
        """Allocate zeroed device memory; `touch` makes the host hand out all its pages immediately."""
        size = math.prod(shape) * dtype.itemsize
        pages = zeroed_pages(size, touch=touch and not self._host.promises)
        return torch.from_numpy(pages).view(dtype).reshape(shape)

    def swap_area(self, cache: KvCache, blocks: int) -> SwapArea:
        """Return host memory for swapped blocks of a cache; by default, the cache is in host memory, too.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        return SwapArea(cache, blocks)

    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copy a small array to the device, without waiting for work that is queued there."""
        return torch.from_numpy(array)

    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Copy rows of host memory to the device.

        Shape: source uint8 [rows, bytes], wanted int64 [n]; returns uint8 [n, bytes].
        """
        return torch.from_numpy(source[wanted])

    def send_pixels(self, parts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        """Copy the pixels of several images, [patches, patch values] each, to the device, concatenated."""
        # The copy makes the tensor writable: the arena's view is read-only.
        return torch.from_numpy(np.concatenate(parts))
