"""The CUDA backend: tested attention kernels, captured decode steps, and copies that overlap with computing.

docs/gpu.md lists how each part is tested, also without a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.base import (
    CapturedSteps,
    LanguageLayers,
    Product,
    RunModel,
    RunnableLanguage,
)
from vsched_workers.backends.cuda import fused_layers, fused_tower
from vsched_workers.backends.cuda.attention_trials import try_kernels, usable_kernels
from vsched_workers.backends.cuda.device import (
    VARIABLE,
    CudaMemory,
    CudaSwapArea,
    NcclCollectives,
    RowCopies,
    parts_off,
)
from vsched_workers.backends.cuda.fused_layers import FusedLayers, LayerKernels, fits, merge
from vsched_workers.backends.cuda.fused_tower import FusedTower, VisionKernels
from vsched_workers.backends.cuda.graphs import CudaGraphStream, DecodeGraphs
from vsched_workers.backends.cuda.products import (
    DeviceProduct,
    QuantizedKernels,
    QuantizedLayer,
    RowProduct,
    product_on,
    quantized_trial,
)
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.backends.reference.layers import ModuleLayers, stored_bytes
from vsched_workers.backends.reference.packed_weights import (
    flatten_patches,
    packed_names,
    replace_linears,
)
from vsched_workers.batching.kv_cache import KvCache, SwapArea
from vsched_workers.batching.paged_attention import AttentionKernels
from vsched_workers.batching.recurrent_state import RecurrentStates
from vsched_workers.device_copies import sent
from vsched_workers.quantized.layers import QuantizedLinear, Quantizer, tie_embedding
from vsched_workers.quantized.weights import QuantizedWeight

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.families.decoders import Decoder

logger = logging.getLogger(__name__)


class CudaBackend(Backend):
    """One CUDA device; transformers' modules with vsched's attention kernels."""

    # A layer's call returns when its kernels are launched, not when they are done.
    synchronous: ClassVar[bool] = False
    keeps_indices = True

    def __init__(self, settings: WorkerSettings, dtype: torch.dtype) -> None:
        if torch.device(settings.device).index is not None:
            # Before any other CUDA call: pinning memory creates a context on the current device, and Triton starts
            # kernels there, wherever their tensors are.
            torch.cuda.set_device(settings.device)
        # No TF32, with its 10-bit mantissa, which torch allows for convolutions of float32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        super().__init__(settings, dtype)
        self.memory, self.collectives = CudaMemory(settings.device), NcclCollectives()
        self._off = parts_off()
        # Ranks that share a model communicate in every step, which cannot be captured.
        self._captures = settings.ranks == 1 and "graphs" not in self._off
        self.spare_blocks = 1 if self._captures else 0
        self._quantizer: Quantizer | None = None
        if settings.quantizes:
            self._quantizer = Quantizer(
                settings.weights, settings.weights_group, self._product, self.device
            )

    @functools.cached_property
    def _copies(self) -> RowCopies:
        return RowCopies(self.device)

    @functools.cached_property
    def _quantized_kernels(self) -> dict[str, QuantizedKernels | None]:
        """The kernels of each format in use; None if they cannot be used."""
        return {}

    @functools.cached_property
    def _graph_stream(self) -> CudaGraphStream:
        return CudaGraphStream(self.device)

    def prepare_language(
        self, model: Any, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        kernels = None
        # LoRA adapters are applied to transformers' unfused layers.
        may_fuse = not self.settings.adapters and "layers" not in self._off
        if may_fuse and fits(decoder, model.config):
            kernels = usable_kernels(
                LayerKernels,
                fused_layers.trial,
                self.dtype,
                self.device,
                what="fused layer kernels",
            )
        if kernels is not None:
            merge(model, decoder)
        size = self._replace_quantized(model)
        layers: LanguageLayers
        if kernels is None:
            layers = ModuleLayers(model, self.send, axes=decoder.axes)
        else:
            layers = FusedLayers(model, decoder, self.send, kernels)
        if self._quantizer is None:
            product: Product = functools.partial(functional.linear, weight=head)
            if kernels is not None:
                product = RowProduct(head, None, kernels.multiply_row)
            size += stored_bytes(head, *model.parameters())
            return RunnableLanguage(layers=layers, head=product, weights_bytes=size)
        self._quantizer.embed(model.embed_tokens, head)
        head_product = self._quantizer.head(head, None)
        tie_embedding(model.embed_tokens, head, head_product)
        size += head_product.size_bytes + self._quantizer.embedding_bytes
        size += stored_bytes(*model.parameters())
        return RunnableLanguage(layers=layers, head=head_product, weights_bytes=size)

    def prepare_tower(self, tower: nn.Module) -> int:
        flash = fused_tower.use_flash(tower, self.settings, self.dtype)
        flatten_patches(tower, None)
        kernels = None
        # LoRA adapters are applied to transformers' unfused layers, in their own sizes.
        if not self.settings.adapters and "tower" not in self._off:
            if self._quantizer is None:
                fused_tower.pad_inner(tower)
            if fused_tower.fits(tower):
                kernels = usable_kernels(
                    VisionKernels,
                    fused_tower.trial,
                    self.dtype,
                    self.device,
                    what="fused vision tower",
                )
        if kernels is not None:
            fused_tower.merge(tower)
        size = self._replace_quantized(tower) + sum(each.nbytes for each in tower.parameters())
        if kernels is None:
            tower.register_forward_pre_hook(self._send_grids, with_kwargs=True)
        else:
            tower.forward = FusedTower(tower, kernels, flash=flash)
        return size

    def _send_grids(
        self, _: nn.Module, given: tuple[object, ...], options: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        """Copy the grids of images to the device, where transformers' towers need them."""
        if "grid_thw" in options:
            options = {**options, "grid_thw": options["grid_thw"].to(self.device)}
        return given, options

    def without_holes(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch's allocator on a GPU splits and joins blocks freely

    def prepare_whole(self, model: nn.Module) -> int:
        return self._replace_quantized(model) + stored_bytes(*model.parameters())

    prepare_any_tower = prepare_whole

    def lays_out(self, module: nn.Module) -> Collection[str]:
        return () if self._quantizer is None else packed_names(module)

    def _replace_quantized(self, module: nn.Module) -> int:
        """Replace the layers below a module whose weights are or get quantized; return their bytes."""
        replaced = replace_linears(module, self._quantized_layer)
        return sum(each.product.size_bytes for each in replaced)

    def _quantized_layer(self, linear: nn.Linear) -> QuantizedLayer | None:
        bias = None if linear.bias is None else linear.bias.to(self.device)
        if self._quantizer is not None:
            return QuantizedLayer(linear, self._quantizer.linear(linear.weight, bias))
        if isinstance(linear, QuantizedLinear):
            return QuantizedLayer(linear, self._product(linear.weight, bias))
        return None

    def _product(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> DeviceProduct:
        kind = weight.kind
        if kind not in self._quantized_kernels:
            self._quantized_kernels[kind] = usable_kernels(
                QuantizedKernels,
                functools.partial(quantized_trial, kind),
                self.dtype,
                self.device,
                what=f"kernels of {kind} weights",
            )
        return product_on(self.device, weight, bias, self._quantized_kernels[kind])

    def load_attention(self) -> None:
        if not self._captures:
            ranks = self.settings.ranks
            why = f"{ranks} ranks share the model" if ranks > 1 else f"{VARIABLE} turns them off"
            logger.info("decode steps run without CUDA graphs: %s", why)

    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        return try_kernels(self.settings, self.dtype, cache, heads, ruled=ruled)

    def capture_steps(
        self,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        states: RecurrentStates | None,
    ) -> CapturedSteps | None:
        if not self._captures or not getattr(attention.decode, "capturable", False):
            return None
        stream, reserved = self._graph_stream, self.memory.reserved
        return DecodeGraphs(stream, cache, attention, run, reserved=reserved, states=states)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, touch: bool) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def swap_area(self, cache: KvCache, blocks: int) -> SwapArea:
        return CudaSwapArea(cache, blocks, device=self.device)

    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return sent(array, self.device)

    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        return self._copies.fetch(source, wanted)

    def send_pixels(self, parts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        shape = (sum(len(part) for part in parts), parts[0].shape[1])
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        np.concatenate(parts, out=pixels.numpy())
        return pixels.to(device=self.device, non_blocking=True)
