"""Captured steps contain no operation that a capture forbids, or that is missing in a replay.

The whole decode step runs on torch's meta device, which has shapes and no memory, in place of a GPU: using a value, or
a shape that depends on values, fails there as in a capture. Operations on host memory, whose old contents a replay
would read, or which it would have to wait for, are found among the operations that run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.bench.gpu.costs import FAMILY, SHAPES
from tests.workers.backends.cuda.races import LateStream
from vsched_workers.backends.base import LanguageLayers, RunModel
from vsched_workers.backends.cuda.attention import TritonDecode
from vsched_workers.backends.cuda.fused_layers import FusedLayers, LayerKernels, merge
from vsched_workers.backends.cuda.graphs import DecodeGraphs
from vsched_workers.backends.cuda.products import DeviceProduct, QuantizedKernels, QuantizedLayer
from vsched_workers.backends.reference.attention import prefill_by_gather
from vsched_workers.backends.reference.layers import ModuleLayers
from vsched_workers.backends.reference.packed_weights import replace_linears
from vsched_workers.batching import paged_attention
from vsched_workers.batching.kv_cache import KvCache, KvShape
from vsched_workers.batching.paged_attention import AttentionKernels, DecodeKernel, PagedStep
from vsched_workers.families import FAMILIES
from vsched_workers.quantized.weights import quantize

DEVICE = torch.device("meta")


class ForbiddenInCaptureError(Exception):
    """An operation that may not be captured."""


class Capturing(TorchDispatchMode):
    """Fails when an operation reads, writes or allocates host memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if options.get("pin_memory"):
            raise ForbiddenInCaptureError(f"{func}: pinned memory is allocated")
        found = func(*args, **options)
        for each in tree_leaves((args, options, found)):
            if isinstance(each, torch.Tensor) and each.device != DEVICE:
                raise ForbiddenInCaptureError(f"{func}: memory of the host, {tuple(each.shape)}")
        return found


class Started:
    """A kernel that is launched over a grid, and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(side > 0 for side in grid)
        return lambda *_, **__: None


def triton_decode() -> DecodeKernel:
    """Return the kernel with all of its host code; works without Triton."""
    kernel: Any = TritonDecode.__new__(TritonDecode)
    kernel._decode, kernel._merge, kernel._processors = Started(), Started(), 132
    found: DecodeKernel = kernel
    return found


def quantized_layer(kernels: QuantizedKernels | None, linear: nn.Linear) -> QuantizedLayer:
    """Return a layer with a quantized weight."""
    weight = quantize(torch.zeros(linear.weight.shape), "int4").to("meta")
    return QuantizedLayer(linear, DeviceProduct(weight, linear.bias, kernels, processors=132))


def captured_step(
    folder: Path, rows: int, *, quantized: str, fused: bool
) -> Callable[[], torch.Tensor]:
    """Return a decode step of the smallest model, over memory on the device."""
    shape = SHAPES["nano"]
    (folder / "config.json").write_text(json.dumps(shape.config()))
    paged_attention.register()
    with DEVICE:
        model: Any = FAMILIES[FAMILY].build_language(str(folder), paged_attention.NAME)
    model.eval().to(torch.bfloat16)
    make = FAMILIES[FAMILY].decoder
    if fused:
        merge(model, make)
    if quantized:
        kernels = QuantizedKernels(Started(), Started()) if quantized == "kernels" else None
        assert replace_linears(model, functools.partial(quantized_layer, kernels))
    cache = KvCache(
        [KvShape(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers,
        blocks=8,
        block_size=16,
        dtype=torch.bfloat16,
        allocate=functools.partial(torch.zeros, device=DEVICE),
        spare_blocks=1,
    )

    def send(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(DEVICE)

    layers: LanguageLayers = ModuleLayers(model, send, axes=True)
    if fused:
        # The angles' axes are determined once, from values; in a step, angles are computed on the device.
        model.rotary_emb = type(model.rotary_emb)(model.config)
        layers = made = FusedLayers(
            model, make, send, LayerKernels(Started(), Started(), Started(), Started())
        )
        made._angles._axes = made._angles._axes.to(DEVICE)  # type: ignore[attr-defined]
        model.rotary_emb.to(DEVICE)
    head = model.embed_tokens.weight

    def run(token_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        hidden = layers(token_ids, positions, step, None, np.arange(len(token_ids)))
        return functional.linear(hidden, head)

    return functools.partial(step_of(cache, run)._compute, rows)


def step_of(cache: KvCache, run: RunModel) -> DecodeGraphs:
    kernels = AttentionKernels(triton_decode(), prefill_by_gather)
    graphs = DecodeGraphs(LateStream(), cache, kernels, run, reserved=lambda: 0)
    whole = {"dtype": torch.int32, "device": DEVICE}
    graphs._header = torch.zeros((5, 4), **whole)  # type: ignore[call-overload]
    graphs._tables = torch.zeros((4, 2), **whole)  # type: ignore[call-overload]
    graphs._tokens = torch.zeros(4, **whole)  # type: ignore[call-overload]
    return graphs


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("quantized", ["", "kernels", "torch"])
@pytest.mark.parametrize("fused", [False, True])
def test_captured_step_touches_the_device_alone(
    tmp_path: Path, rows: int, quantized: str, fused: bool
) -> None:
    step = captured_step(tmp_path, rows, quantized=quantized, fused=fused)
    with torch.inference_mode(), Capturing():  # type: ignore[no-untyped-call]
        logits = step()
    assert logits.shape == (rows, SHAPES["nano"].vocab)
