"""List of the compiled kernels of a model, by name, to load in a rank or to compile beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu.decode_attention import (
    NumbaDecode,
    sample_cache,
)
from vsched_workers.backends.cpu.decode_step import compiled_step
from vsched_workers.backends.cpu.kernels import (
    activation,
    decode_attention,
    norm,
    prefill_attention,
    rope,
    sampling,
)
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.language_layers import GATED
from vsched_workers.backends.cpu.low_rank import kernel as low_rank
from vsched_workers.backends.cpu.prefill_attention import fits, operand
from vsched_workers.backends.cpu.products import make_product
from vsched_workers.backends.cpu.quantized.products import (
    QuantizedProduct,
    quantizes_activations,
    widens_in_tiles,
)
from vsched_workers.backends.cpu.tiles import attention
from vsched_workers.backends.cpu.tiles.kernel import has_tiles
from vsched_workers.backends.cpu.vision_blocks import can_fuse
from vsched_workers.families.decoder import Decoder, head_dim
from vsched_workers.quantized.model import HEAD_FORMAT
from vsched_workers.quantized.weights import QuantizedWeight

_ACTIVATIONS = {each.py_func.__name__: each for each in (*GATED.values(), activation.gelu_quick)}
_INPUTS = 64
"""Inputs of the weight used for compilation."""

_OPERANDS = {"bfloat16": BF16, "float32": FLOAT32}


class Need(NamedTuple):
    """A kernel for one combination of argument types.

    Attributes:
        kernel: Name in `KERNELS`.
        words: Variant to compile.
    """

    kernel: str
    words: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Approximate compile time on a 3 GHz core, for the order of compilation and progress messages."""
        return KERNELS[self.kernel].seconds

    def load(self) -> None:
        """Read the kernel from disk, or compile it."""
        KERNELS[self.kernel].load(*self.words)


class _Kernel(NamedTuple):
    load: Callable[..., None]
    seconds: float


def needs(kernel: str, *words: str) -> Need:
    """Return the need of a kernel."""
    assert kernel in KERNELS, f"no kernel is called {kernel}"
    return Need(kernel, words)


def language_needs(
    settings: WorkerSettings,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    config: Any,
    decoder: Decoder | None,
    kinds: Sequence[str],
) -> Iterator[Need]:
    """Yield the kernels of a language model.

    `config` is the model's configuration, `decoder` describes its architecture if known, and `kinds` are the
    quantization formats of its checkpoint's weights.
    """
    kept = _word(kv_dtype)
    made = [settings.weights, HEAD_FORMAT] if settings.quantizes else []
    yield needs("sampler")
    yield from _product_needs(settings, dtype, [*kinds, *made])
    if dtype == torch.bfloat16:
        yield needs("greedy sampler")
        if fits(head_dim(config)) and not settings.deterministic:
            yield _many_rows_need()
    if settings.adapters and dtype == torch.bfloat16:
        yield needs("low rank")
    if dtype != torch.bfloat16 or decoder is None or decoder.unfit(config):
        yield needs("decode attention of modules", kept)
        return
    yield needs("norm")
    yield needs("rope", kept)
    if not decoder.adds_plainly or decoder.norms_all_heads:
        yield needs("norms of all kinds")
    yield needs("activation", _name(GATED[decoder.activation(config)]))
    yield needs("decode attention", kept)
    if settings.ranks == 1:
        yield needs("decode step", kept)


def tower_needs(settings: WorkerSettings, dtype: torch.dtype, tower: Any) -> Iterator[Need]:
    """Yield the kernels of a vision tower; None is a tower of unknown architecture, with fewer known kernels."""
    yield from _product_needs(settings, dtype, [settings.weights] if settings.quantizes else [])
    if dtype != torch.bfloat16:
        return
    if tower is not None and can_fuse(tower):
        yield _many_rows_need(deterministic=settings.deterministic)
        yield needs("norm")
        yield needs("activation", _name(activation.swiglu))
        yield needs("rope of patches")
    if settings.adapters:
        yield needs("low rank")


def _many_rows_need(*, deterministic: bool = False) -> Need:
    """Return the kernel of bfloat16 attention with many rows, of chunks or images."""
    if has_tiles() and not deterministic:
        return needs("attention in tiles")
    return needs("prefill attention", _operand_word(operand()))


def _product_needs(
    settings: WorkerSettings, dtype: torch.dtype, kinds: Sequence[str]
) -> Iterator[Need]:
    """Yield the kernels of products with activations of a type, for quantized weights of these kinds and others."""
    activations = "int8" if quantizes_activations(settings.activations, dtype) else "float"
    for kind in dict.fromkeys(kinds):
        yield needs("product", _word(dtype), kind, activations)
        yield from _tiles_needs(settings, dtype, kind)
    # In a quantized model, unquantized weights use the same kind of product, in float32 as well.
    pairs = dtype == torch.bfloat16 and has_bf16_dot()
    if pairs:
        yield needs("product of panels")
    elif kinds or dtype == torch.bfloat16:
        yield needs("product", _word(dtype), _word(dtype))


def _tiles_needs(settings: WorkerSettings, dtype: torch.dtype, kind: str) -> Iterator[Need]:
    if widens_in_tiles(settings, dtype):
        yield needs("product in tiles", kind)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _operand_word(tag: npt.NDArray[Any]) -> str:
    return "bfloat16" if tag is BF16 else "float32"


def _name(kernel: Any) -> str:
    name: str = kernel.py_func.__name__
    return name


def _load_rope(kept: str) -> None:
    rope.warm_up(sample_cache(getattr(torch, kept), slots=1))


def _load_decode(kept: str) -> None:
    decode_attention.warm_up(sample_cache(getattr(torch, kept), slots=1))


def _load_step(kept: str) -> None:
    compiled_step.compile_for(sample_cache(getattr(torch, kept), slots=1))


def _load_decode_of_modules(kept: str) -> None:
    NumbaDecode(torch.float32, getattr(torch, kept), 1).warm_up()


def _load_product(rows: str, kind: str, activations: str = "float") -> None:
    dtype: torch.dtype = getattr(torch, rows)
    weight: QuantizedWeight | torch.Tensor = torch.zeros(1, _INPUTS, dtype=dtype)
    if kind in {"int8", "int4", "fp8"}:
        weight = _quantized_zeros(kind, dtype)
    int8_activations = activations == "int8"
    product = QuantizedProduct(weight, None, threads=1, int8_activations=int8_activations)
    product(torch.zeros(1, _INPUTS, dtype=dtype))


def _load_tiles(kind: str) -> None:
    weight = _quantized_zeros(kind, torch.bfloat16)
    product = QuantizedProduct(weight, None, threads=1, tiles=True)
    product(torch.zeros(product.many_rows_min, _INPUTS).bfloat16())


def _quantized_zeros(kind: str, dtype: torch.dtype) -> QuantizedWeight:
    return QuantizedWeight(
        kind=kind,
        values=torch.zeros(
            *(1, _INPUTS // 2 if kind == "int4" else _INPUTS),
            dtype=torch.int8 if kind == "int8" else torch.uint8,
        ),
        scales=torch.ones(1, 1, dtype=torch.float32 if kind == "fp8" else torch.float16),
        group=_INPUTS,
        inputs=_INPUTS,
        dtype=dtype,
    )


def _load_panels() -> None:
    made = make_product(torch.zeros(_INPUTS, _INPUTS).bfloat16(), None, threads=1)
    made(torch.zeros(1, _INPUTS).bfloat16())


KERNELS: Mapping[str, _Kernel] = {
    "norm": _Kernel(lambda: norm.warm_up(), 1.0),
    "norms of all kinds": _Kernel(lambda: norm.warm_up_normed(), 3.0),
    "layer norm": _Kernel(lambda: norm.warm_up_layer_norm(), 1.5),
    "activation": _Kernel(lambda name: activation.warm_up(_ACTIVATIONS[name]), 1.0),
    "rope": _Kernel(_load_rope, 3.0),
    "rope of patches": _Kernel(lambda: rope.warm_up_patches(), 1.5),
    "decode attention": _Kernel(_load_decode, 15.0),
    "decode step": _Kernel(_load_step, 3.0),
    "decode attention of modules": _Kernel(_load_decode_of_modules, 11.0),
    "prefill attention": _Kernel(
        lambda operand: prefill_attention.warm_up(_OPERANDS[operand]), 6.0
    ),
    "attention in tiles": _Kernel(lambda: attention.warm_up(), 6.0),
    "greedy sampler": _Kernel(lambda: sampling.warm_up_greedy(), 0.5),
    "sampler": _Kernel(lambda: sampling.warm_up(), 13.0),
    "low rank": _Kernel(lambda: low_rank.warm_up(), 3.0),
    "product": _Kernel(_load_product, 5.0),
    "product of panels": _Kernel(_load_panels, 5.0),
    "product in tiles": _Kernel(_load_tiles, 2.0),
}
