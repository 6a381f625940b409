"""The reference backend: torch alone on the host, transformers' layers, and attention by gather."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.base import Backend, CapturedSteps, RunModel, RunnableLanguage
from vsched_workers.backends.reference.collectives import GlooCollectives
from vsched_workers.backends.reference.gather_attention import decode_by_gather, prefill_by_gather
from vsched_workers.backends.reference.host_memory import HostMemory, mapped_pieces, zeroed_pages
from vsched_workers.backends.reference.module_layers import ModuleLayers, stored_bytes
from vsched_workers.backends.reference.packed_weights import (
    MakeProduct,
    block_activations,
    flatten_patches,
    pack_linears,
    warm_up,
)
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels
from vsched_workers.batching.recurrent_state import RecurrentStates

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.families.decoder import Decoder


class ReferenceBackend(Backend):
    """Torch alone on the host, bit-exact to transformers; a subclass may pack weights.

    `make_product` builds the product of a linear layer, `make_head` that of the head, and `make_plain` that of a patch
    embedding, which is not quantized; None if weights are not packed.
    """

    synchronous: ClassVar[bool] = True
    layers_reuse_memory: ClassVar[bool] = True
    keeps_indices = False
    spare_blocks = 0
    make_product: MakeProduct | None = None
    make_head: MakeProduct | None = None
    make_plain: MakeProduct | None = None

    def __init__(
        self, settings: WorkerSettings, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        self._host = memory = HostMemory(settings.device, promises=settings.promises)
        super().__init__(
            settings, dtype, kv_dtype=kv_dtype, memory=memory, collectives=GlooCollectives()
        )
        self.compiles = False

    def prepare_language(
        self, model: nn.Module, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        layers = ModuleLayers(model, self.send, axes=decoder.axes)
        if self.make_product is None or self.make_head is None:
            product = functools.partial(functional.linear, weight=head)
            return RunnableLanguage(layers, product, stored_bytes(head, *model.parameters()))
        # A tied head is packed too: it is the largest product of a step. The embedding needs the unpacked weight.
        packed_head = self.make_head(head, None)
        size = pack_linears(model, self.make_product) + packed_head.size_bytes
        warm_up(model, self.dtype, packed_head)
        return RunnableLanguage(layers, packed_head, size + stored_bytes(*model.parameters()))

    def prepare_whole(self, model: nn.Module) -> int:
        return self._pack(model) + stored_bytes(*model.parameters())

    def prepare_tower(self, tower: nn.Module) -> int:
        size = stored_bytes(*tower.parameters())
        flatten_patches(tower, self.make_plain)
        if self.make_product is not None:
            before = stored_bytes(*tower.parameters())
            packed = self._pack(tower)
            size += packed + stored_bytes(*tower.parameters()) - before
        block_activations(tower)
        return size

    def prepare_any_tower(self, model: nn.Module) -> int:
        size = self._pack(model)
        block_activations(model)
        return size + stored_bytes(*model.parameters())

    def _pack(self, module: nn.Module) -> int:
        """Pack the linear layers below a module, if weights are packed; return their bytes."""
        if self.make_product is None:
            return 0
        size = pack_linears(module, self.make_product)
        warm_up(module, self.dtype)
        return size

    def argmax(self, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        return logits.argmax(dim=-1).numpy().astype(np.int32)

    def load_attention(self) -> None:
        """Do nothing: attention by gather needs no compilation."""

    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        return AttentionKernels(decode_by_gather, prefill_by_gather)

    def capture_steps(
        self,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        states: RecurrentStates | None,
    ) -> CapturedSteps | None:
        return None

    def without_holes(self) -> AbstractContextManager[None]:
        return mapped_pieces()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, touch: bool) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        pages = zeroed_pages(size, touch=touch and not self._host.promises)
        return torch.from_numpy(pages).view(dtype).reshape(shape)

    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array)

    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        return torch.from_numpy(source[wanted])

    def send_pixels(self, parts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        # The copy makes the tensor writable: the arena's view is read-only.
        return torch.from_numpy(np.concatenate(parts))
