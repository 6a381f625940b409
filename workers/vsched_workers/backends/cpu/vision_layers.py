"""Fused layers of a bfloat16 vision tower on a CPU, similar to the layers of `language_layers.py`.

Rows go through the products in blocks, so that the result of one product is still in the cache for the next. Windows
of equal size are attended to in one call: a single one is too small to be worth a call. Towers of other architectures
keep transformers' modules.

**Encoders.** Most towers have the structure of the first vision transformers (Dosovitskiy et al., "An Image is Worth
16x16 Words", ICLR 2021): layer norms, full attention with as many key heads as query heads, an MLP with GELU. They
differ in names, and some scale the outputs in residual sums. A tower is recognized by its modules, not by its family's
name. As its computation is in its code, the first layer is verified: in float32, against a reference computation. The
activation function is identified by its values as well.

A layer is four products with packed weights and the calls between them: QKV is one product, whose result attention
reads in place. Heads that are not whole vectors are padded with zeros, in the weights, so that an attention kernel fits
them. Layers remain the same modules, with only their `forward` replaced: transformers records hidden states by module
class, and some models use those of an earlier layer. For the same reason a layer does not overwrite its input.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from vsched_workers.adapters.places import LayerPlace, carrier_of, held_places
from vsched_workers.backends.cpu.attention import fits, patch_kernel
from vsched_workers.backends.cpu.kernels import activation, norm, rope
from vsched_workers.backends.cpu.kernels.activation import gelu, gelu_quick, gelu_tanh, swiglu
from vsched_workers.backends.cpu.kernels.norm import add_layer_norm, add_norm
from vsched_workers.backends.cpu.kernels.rope import rope_patches
from vsched_workers.backends.cpu.kernels.simd import LANES
from vsched_workers.backends.cpu.language_layers import product_of
from vsched_workers.backends.cpu.layer_parts import Norm, block_slices
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.reference.layers import frozen, merged
from vsched_workers.backends.reference.packed_weights import BLOCK_ROWS
from vsched_workers.batching.paged_attention import PatchKernel
from vsched_workers.memory.sparse_runs import is_left_out
from vsched_workers.parallel.slicing import Cut


def fuse_blocks(tower: Any, threads: int, *, deterministic: bool = False) -> bool:
    """Fuse the blocks of a tower with packed linear layers; return False if they cannot be fused.

    With `deterministic`, the result for an image does not depend on the others.
    """
    if not can_fuse(tower):
        return False
    norm.warm_up()
    activation.warm_up(swiglu)
    rope.warm_up_patches()
    attend = patch_kernel(deterministic=deterministic)
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = FusedBlock(block, threads, attend)
    return True


def can_fuse(tower: Any) -> bool:
    """Return True if the blocks of a tower have the architecture that can be fused."""
    return bool(tower.blocks) and all(
        _is_known(block) and fits(block_head_dim(block)) for block in tower.blocks
    )


def _is_known(block: Any) -> bool:
    return (
        all(hasattr(norm, "variance_epsilon") for norm in (block.norm1, block.norm2))
        and all(hasattr(block.mlp, f"{name}_proj") for name in ("gate", "up", "down"))
        and all(hasattr(block.attn, name) for name in ("qkv", "proj", "num_heads", "scaling"))
        and (isinstance(block.mlp.act_fn, nn.SiLU) or _is_librarys_silu(block.mlp.act_fn))
    )


def _is_librarys_silu(activation: object) -> bool:
    """Return True if an activation is transformers' own; avoids importing transformers, which takes seconds."""
    library: Any = sys.modules.get("transformers.activations")
    return library is not None and isinstance(activation, library.SiLUActivation)


def block_head_dim(block: Any) -> int:
    """Return the head dimension of a block."""
    size: int = block.attn.qkv.out_features // (3 * block.attn.num_heads)
    return size


class FusedBlock(nn.Module):
    """Fused block, with the same arguments and result as transformers' own."""

    def __init__(
        self,
        block: Any,
        threads: int,
        attend: PatchKernel,
    ) -> None:
        super().__init__()
        self.block = block
        self._pool = pool_of(threads)
        self._attend_within = attend
        self._norms = Norm.of(block.norm1), Norm.of(block.norm2)
        self._qkv, self._proj = product_of(block.attn.qkv), product_of(block.attn.proj)
        mlp = block.mlp
        self._gate, self._up, self._down = map(
            product_of, (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )

    def forward(
        self,
        hidden: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> torch.Tensor:
        """Run the block over patches [patches, hidden], which are overwritten."""
        assert hidden.is_contiguous(), "`hidden` must be contiguous"
        if is_left_out((hidden.shape, len(cu_seqlens))):
            return hidden
        attended = self._attend(hidden, cu_seqlens, position_embeddings)
        for part in block_slices(len(hidden)):
            rows = hidden[part]
            normed = torch.empty_like(rows)
            self._add_norm(rows, self._proj(attended[part]), self._norms[1], normed)
            gate, up = self._gate(normed), self._up(normed)
            swiglu(self._pool, gate.data_ptr(), up.data_ptr(), *gate.shape)
            rows += self._down(gate)
        return hidden

    def adapter_places(self, within: str, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
        """Return the positions of adapters; see `module_places`."""
        attention, mlp = self.block.attn, self.block.mlp
        return held_places(
            self,
            within,
            cuts,
            {
                "attn.qkv": ("_qkv", attention.qkv),
                "attn.proj": ("_proj", attention.proj),
                "mlp.gate_proj": ("_gate", mlp.gate_proj),
                "mlp.up_proj": ("_up", mlp.up_proj),
                "mlp.down_proj": ("_down", mlp.down_proj),
            },
        )

    def _attend(
        self,
        hidden: torch.Tensor,
        cu_seqlens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the input of the output projection, [patches, heads * head_dim]."""
        heads = self.block.attn.num_heads
        count = len(hidden)
        half = angles[0].shape[1] // 2
        # Both halves of a head are rotated by the same angles.
        cos, sin = (each[:, :half].float().contiguous().numpy() for each in angles)
        heads_buffer = hidden.new_empty(3 * heads, count, 2 * half)
        for part in block_slices(len(hidden)):
            rows = hidden[part]
            normed = torch.empty_like(rows)
            self._add_norm(rows, None, self._norms[0], normed)
            qkv = self._qkv(normed)
            start_at = qkv.data_ptr() - part.start * qkv.shape[1] * qkv.itemsize
            stop = part.start + len(rows)
            rope_patches(
                *(self._pool, start_at, part.start, stop, heads, cos, sin, heads_buffer.data_ptr())
            )
        query, key, value = heads_buffer.split(heads)
        attended = hidden.new_empty(count, heads, 2 * half)
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        start = 0
        for length, equal in itertools.groupby(lengths):
            number = sum(1 for _ in equal)
            part = slice(start, start + number * length)
            queries, keys, values = (
                each[:, part].unflatten(1, (number, length)) for each in (query, key, value)
            )
            scale: float = self.block.attn.scaling
            to = attended[part].unflatten(0, (number, length))
            self._attend_within(queries, keys, values, scale, to)
            start = part.stop
        return attended.flatten(1)

    def _add_norm(
        self, rows: torch.Tensor, delta: torch.Tensor | None, norm: Norm, out: torch.Tensor
    ) -> None:
        add_norm(
            self._pool,
            rows.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            norm.weight_at,
            norm.width,
            norm.eps,
            out.data_ptr(),
            len(rows),
        )


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The names of modules within a layer.

    Attributes:
        norms: The norms before attention and before the MLP.
        attention: The attention module, with query, key and value projections, and `num_heads`.
        output: Its output projection.
        inner: The MLP module, with two linear layers and an activation in between.
        scales: Parameters that scale the outputs of attention and MLP in residual sums; empty if there are none.
    """

    norms: Sequence[str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    output: str = "out_proj"
    inner: str = "mlp"
    linears: Sequence[str] = ("fc1", "fc2")
    activation: str = "activation_fn"
    scales: Sequence[str] = ()


ENCODERS: Sequence[Encoder] = (
    Encoder(),
    Encoder(
        norms=("layernorm_before", "layernorm_after"),
        attention="attention",
        output="projection_layer",
        scales=("lambda_1", "lambda_2"),
    ),
)
"""Known structures: CLIP and SigLIP, and InternVL."""


VERIFIED_ROWS = 5
VERIFIED_WITHIN = 1e-3
"""Maximum deviation from the reference, as a share of the maximum value: float32, with another order of sums."""

_Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Sequence[tuple[_Function, Any]] = (
    (functional.gelu, gelu),
    (lambda rows: functional.gelu(rows, approximate="tanh"), gelu_tanh),
    (lambda rows: rows * torch.sigmoid(1.702 * rows), gelu_quick),
)
"""torch's activation functions and the corresponding kernels."""


@dataclass(frozen=True)
class RecognizedLayer:
    """A layer of a recognized architecture, and the kernel of its activation."""

    layer: Any
    encoder: Encoder
    activation: Any


def merge_encoders(model: nn.Module) -> list[RecognizedLayer]:
    """Find the layers below a module that can be fused, merge their QKV projections, and return them.

    Afterwards the linear layers are packed, then `fuse_encoders` fuses the layers.
    """
    found = []
    for layers in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        recognized = _recognize(list(layers))
        for layer in layers if recognized else ():
            assert recognized is not None
            encoder, kernel = recognized
            attention: Any = getattr(layer, encoder.attention)
            setattr(layer, encoder.attention, MergedEncoderAttention(attention, encoder))
            found.append(RecognizedLayer(layer, encoder, kernel))
    return found


def fuse_encoders(
    layers: Sequence[RecognizedLayer], threads: int, *, deterministic: bool = False
) -> None:
    """Replace the `forward` of layers whose linear layers are packed."""
    if not layers:
        return
    norm.warm_up_layer_norm()
    for kernel in {id(each.activation): each.activation for each in layers}.values():
        activation.warm_up(kernel)
    attend = patch_kernel(deterministic=deterministic)
    for each in layers:
        each.layer.forward = FusedEncoderLayer(each, threads, attend)


class MergedEncoderAttention(nn.Module):
    """Attention of one layer with merged QKV projections, and heads padded to whole vectors."""

    def __init__(self, attention: Any, encoder: Encoder) -> None:
        super().__init__()
        linears = [getattr(attention, name) for name in encoder.qkv]
        self.heads: int = attention.num_heads
        size: int = linears[0].out_features // self.heads
        self.size = size
        self.head_dim = -(-size // LANES) * LANES
        self.scaling = size**-0.5
        padded = [_padded_outputs(each, self.heads, self.head_dim) for each in linears]
        self.qkv: nn.Module = merged(padded)
        self.output: nn.Module = _padded_inputs(
            getattr(attention, encoder.output), self.heads, self.head_dim
        )


class FusedEncoderLayer:
    """Fused `forward` of a layer, with the same arguments and result as transformers' own."""

    def __init__(self, recognized: RecognizedLayer, threads: int, attend: PatchKernel) -> None:
        """Take a layer with packed linear layers."""
        layer, encoder = recognized.layer, recognized.encoder
        self._recognized = recognized
        self._pool = pool_of(threads)
        self._attend = attend
        self._activation = recognized.activation
        attention: MergedEncoderAttention = getattr(layer, encoder.attention)
        self._attention = attention
        self._qkv, self._output = product_of(attention.qkv), product_of(attention.output)
        inner = getattr(layer, encoder.inner)
        self._first, self._second = (product_of(getattr(inner, name)) for name in encoder.linears)
        self._norms = [_LayerNorm.of(getattr(layer, name)) for name in encoder.norms]
        scales = [getattr(layer, name) for name in encoder.scales] or [None, None]
        self._scales_at = [0 if scale is None else scale.data_ptr() for scale in scales]
        self._kept = scales

    def __call__(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        """Run the layer over sequences [sequences, rows, hidden]."""
        width = hidden.shape[-1]
        # Embeddings computed by a convolution are stored column by column.
        rows = hidden.reshape(-1, width).clone(memory_format=torch.contiguous_format)
        attended = self._attended(rows, hidden.shape[:-1], attention_mask)
        before, after = self._norms
        normed = rows.new_empty(min(len(rows), BLOCK_ROWS), width)
        for part in block_slices(len(rows)):
            block = rows[part]
            self._add_norm(block, self._output(attended[part]), self._scales_at[0], after, normed)
            inner = self._first(normed[: len(block)])
            self._activation(self._pool, inner.data_ptr(), 0, *inner.shape)
            self._add_norm(block, self._second(inner), self._scales_at[1], before, None)
        return rows.view(hidden.shape)

    def adapter_places(self, within: str, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
        """Return the positions of adapters; see `module_places`. Matrices are padded as the weights are."""
        layer, encoder, attention = (
            self._recognized.layer,
            self._recognized.encoder,
            self._attention,
        )
        inner = getattr(layer, encoder.inner)
        held = zip(encoder.linears, ("_first", "_second"), strict=True)
        places = held_places(
            self,
            f"{within}{encoder.inner}.",
            cuts,
            {name: (attribute, getattr(inner, name)) for name, attribute in held},
        )
        qkv = carrier_of(self, "_qkv", attention.qkv)
        output = carrier_of(self, "_output", attention.output)
        padded, plain = attention.heads * attention.head_dim, attention.heads * attention.size
        pad = functools.partial(_padded_heads, heads=attention.heads, head_dim=attention.head_dim)
        for index, name in enumerate(encoder.qkv):
            place = LayerPlace(qkv, qkv.inputs, plain, index * padded, up=pad)
            places[f"{within}{encoder.attention}.{name}"] = [place]
        place = LayerPlace(output, plain, output.outputs, down=lambda down: pad(down.T).T)
        places[f"{within}{encoder.attention}.{encoder.output}"] = [place]
        return places

    def _attended(
        self, rows: torch.Tensor, shape: Sequence[int], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the input of the output projection, [sequences * rows, heads * head_dim]."""
        attention = self._attention
        heads, head_dim = attention.heads, attention.head_dim
        qkv = rows.new_empty(len(rows), 3 * heads * head_dim)
        normed = rows.new_empty(min(len(rows), BLOCK_ROWS), rows.shape[1])
        for part in block_slices(len(rows)):
            block = rows[part]
            self._add_norm(block, None, 0, self._norms[0], normed)
            qkv[part] = self._qkv(normed[: len(block)])
        split = qkv.view(*shape, 3, heads, head_dim)
        query, key, value = (each.permute(2, 0, 1, 3) for each in split.unbind(2))
        out = rows.new_empty(*shape, heads, head_dim)
        if mask is None or (mask.dtype == torch.bool and bool(mask.all())):
            self._attend(query, key, value, attention.scaling, out)
        else:
            queries, keys, values = (each.transpose(0, 1) for each in (query, key, value))
            masked = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=attention.scaling
            )
            out.copy_(masked.transpose(1, 2))
        return out.view(len(rows), -1)

    def _add_norm(
        self,
        rows: torch.Tensor,
        delta: torch.Tensor | None,
        scale_at: int,
        norm: _LayerNorm,
        out: torch.Tensor | None,
    ) -> None:
        """Add to rows, and write their norms if `out` is given."""
        add_layer_norm(
            self._pool,
            rows.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            scale_at,
            norm.weight_at,
            norm.bias_at,
            rows.shape[1],
            norm.eps,
            0 if out is None else out.data_ptr(),
            len(rows),
        )


@dataclass(frozen=True)
class _LayerNorm:
    """A layer norm: epsilon and the addresses of its weights, which the module owns."""

    weight_at: int
    bias_at: int
    eps: np.float32

    @classmethod
    def of(cls, module: nn.LayerNorm) -> _LayerNorm:
        return cls(module.weight.data_ptr(), module.bias.data_ptr(), np.float32(module.eps))


def _recognize(layers: Sequence[Any]) -> tuple[Encoder, Any] | None:
    """Return the architecture of layers, and the kernel of their activation; None if unknown."""
    for encoder in ENCODERS if layers else ():
        if not all(
            type(each) is type(layers[0]) and _has_modules(each, encoder) for each in layers
        ):
            continue
        kernel = _activation_of(getattr(getattr(layers[0], encoder.inner), encoder.activation))
        if kernel is not None and _matches_reference(layers[0], encoder):
            return encoder, kernel
    return None


def _has_modules(layer: Any, encoder: Encoder) -> bool:
    attention, inner = (getattr(layer, name, None) for name in (encoder.attention, encoder.inner))
    linears: list[Any] = [getattr(attention, name, None) for name in (*encoder.qkv, encoder.output)]
    linears += [getattr(inner, name, None) for name in encoder.linears]
    norms = [getattr(layer, name, None) for name in encoder.norms]
    scales = [getattr(layer, name, None) for name in encoder.scales]
    heads: int = getattr(attention, "num_heads", 0)
    return (
        all(type(each) is nn.Linear for each in linears)
        and len({each.weight.shape for each in linears[:3]}) == 1
        and len({each.bias is None for each in linears[:3]}) == 1
        and bool(heads)
        and linears[0].out_features % heads == 0
        and all(type(each) is nn.LayerNorm and each.bias is not None for each in norms)
        and all(isinstance(each, torch.Tensor) for each in scales)
        and {each.dtype for each in layer.parameters()} == {torch.bfloat16}
        and isinstance(getattr(inner, encoder.activation, None), nn.Module)
    )


def _activation_of(module: nn.Module) -> Any:
    ramp = torch.linspace(-6, 6, 200)
    result = module(ramp)
    for function, kernel in ACTIVATIONS:
        if torch.allclose(function(ramp), result, atol=1e-5, rtol=1e-4):
            return kernel
    return None


@torch.inference_mode()
def _matches_reference(layer: Any, encoder: Encoder) -> bool:
    """Return True if a layer matches the reference computation of its architecture."""
    twin = copy.deepcopy(layer).float()
    width = getattr(layer, encoder.norms[0]).weight.shape[0]
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(2, VERIFIED_ROWS, width, generator=chance)
    takes_mask = "attention_mask" in inspect.signature(twin.forward).parameters
    try:
        result = twin(rows.clone(), attention_mask=None) if takes_mask else twin(rows.clone())
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False  # requires further arguments, such as angles
    if not isinstance(result, torch.Tensor) or result.shape != rows.shape:
        return False
    apart = (result - _reference_forward(twin, encoder, rows)).abs().max()
    return bool(apart < VERIFIED_WITHIN * result.abs().max())


def _reference_forward(layer: Any, encoder: Encoder, rows: torch.Tensor) -> torch.Tensor:
    attention, inner = getattr(layer, encoder.attention), getattr(layer, encoder.inner)
    first, second = (getattr(layer, name) for name in encoder.norms)
    scales = [getattr(layer, name) for name in encoder.scales] or [1.0, 1.0]
    normed = first(rows)
    query, key, value = (
        getattr(attention, name)(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for name in encoder.qkv
    )
    attended = functional.scaled_dot_product_attention(query, key, value)
    attended = getattr(attention, encoder.output)(attended.transpose(1, 2).flatten(2))
    rows = rows + scales[0] * attended
    linears = [getattr(inner, name) for name in encoder.linears]
    wide = getattr(inner, encoder.activation)(linears[0](second(rows)))
    result: torch.Tensor = rows + scales[1] * linears[1](wide)
    return result


def _padded_outputs(linear: nn.Linear, heads: int, head_dim: int) -> nn.Linear:
    """Pad the outputs of a linear layer with zeros to heads of this size."""
    missing = head_dim - linear.out_features // heads
    if not missing:
        return linear
    padded = nn.Linear(linear.in_features, heads * head_dim, linear.bias is not None, device="meta")
    padded.weight = frozen(_padded_heads(linear.weight, heads, head_dim))
    if linear.bias is not None:
        bias = functional.pad(linear.bias.unflatten(0, (heads, -1)), (0, missing))
        padded.bias = frozen(bias.flatten())
    return padded


def _padded_heads(matrix: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Insert zeros after each head of a matrix [heads * size, columns]."""
    each = matrix.unflatten(0, (heads, -1))
    return functional.pad(each, (0, 0, 0, head_dim - each.shape[1])).flatten(0, 1)


def _padded_inputs(linear: nn.Linear, heads: int, head_dim: int) -> nn.Linear:
    """Pad the inputs of a linear layer to heads of this size, with zero weights."""
    missing = head_dim - linear.in_features // heads
    if not missing:
        return linear
    padded = nn.Linear(heads * head_dim, linear.out_features, device="meta")
    weight = functional.pad(linear.weight.unflatten(1, (heads, -1)), (0, missing))
    padded.weight = frozen(weight.flatten(1))
    padded.bias = linear.bias
    return padded
