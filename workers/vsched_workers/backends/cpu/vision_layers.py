"""Fused layers of a bfloat16 vision tower on a CPU, similar to the layers of `language_layers.py`.

Rows go through the products in blocks, so that the result of one product is still in the cache for the next. Windows
of equal size are attended to in one call: a single one is too small to be worth a call. Towers of other architectures
keep transformers' modules.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from vsched_workers.adapters.places import LayerPlace, held_places
from vsched_workers.backends.base import Product
from vsched_workers.backends.cpu.attention import patch_kernel, whole_vectors
from vsched_workers.backends.cpu.kernels.activation import gelu, gelu_tanh, swiglu
from vsched_workers.backends.cpu.kernels.norm import add_norm, add_normed
from vsched_workers.backends.cpu.kernels.rope import rope_patches
from vsched_workers.backends.cpu.language_layers import product_of
from vsched_workers.backends.cpu.layer_parts import Norm, block_slices
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.reference.packed_weights import BlockedActivation, PackedLinear
from vsched_workers.batching.paged_attention import PatchKernel
from vsched_workers.memory.sparse_runs import room_for
from vsched_workers.parallel.slicing import Cut

_MLPS: Final[Sequence[Mapping[str, str]]] = (
    {"gate_proj": "_gate", "up_proj": "_up", "down_proj": "_down"},
    {"linear_fc1": "_gate", "linear_fc2": "_down"},
)
"""Linear layers of an MLP with a gate and of one without, and their names in a fused block."""

_ACTIVATIONS: Final[Mapping[str, Any]] = {
    "SiLU": swiglu,
    "SiLUActivation": swiglu,
    "GELUActivation": gelu,
    "GELUTanh": gelu_tanh,
}
"""Kernels of activations, by their types in torch and transformers: an import of transformers takes seconds."""


def fuse_blocks(tower: Any, threads: int, *, deterministic: bool = False) -> bool:
    """Fuse the blocks of a tower with packed linear layers; return False if they cannot be fused.

    With `deterministic`, the result for an image does not depend on the others.
    """
    if not can_fuse(tower):
        return False
    attend = patch_kernel(deterministic=deterministic)
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = FusedBlock(block, threads, attend)
    return True


def can_fuse(tower: Any) -> bool:
    """Return True if the blocks of a tower have the architecture that can be fused."""
    return bool(getattr(tower, "blocks", ())) and all(map(_is_known, tower.blocks))


def _is_known(block: Any) -> bool:
    return (
        all(hasattr(each, "variance_epsilon") for each in (block.norm1, block.norm2))
        or all(map(has_bias, (block.norm1, block.norm2)))
    ) and (
        bool(_linears_of(block.mlp))
        and all(hasattr(block.attn, name) for name in ("qkv", "proj", "num_heads", "scaling"))
        and activation_of(block.mlp.act_fn) is not None
    )


def has_bias(norm: Any) -> bool:
    """Return True for a LayerNorm with a bias."""
    return type(norm) is nn.LayerNorm and isinstance(norm.bias, torch.Tensor)


def _linears_of(mlp: Any) -> Mapping[str, str]:
    found = (names for names in _MLPS if all(hasattr(mlp, name) for name in names))
    return next(found, {})


def activation_of(module: Any) -> Any:
    """Return the kernel of an activation module; None for another."""
    module = module.activation if isinstance(module, BlockedActivation) else module
    if type(module) is nn.GELU:
        return gelu_tanh if module.approximate == "tanh" else gelu
    return _ACTIVATIONS.get(type(module).__name__)


def mlp_parts(mlp: nn.Module) -> tuple[Any, Any, Any] | None:
    """Return the linear layers of an MLP without a gate, and its activation's kernel; None for other modules."""
    children = list(mlp.children())
    linears: list[Any] = [each for each in children if isinstance(each, nn.Linear | PackedLinear)]
    kernels = [kernel for each in children if (kernel := activation_of(each)) is not None]
    if (len(children), len(linears), len(kernels)) != (3, 2, 1):
        return None
    first, second = linears
    fits = (first.in_features, first.out_features) == (second.out_features, second.in_features)
    return (first, second, kernels[0]) if fits else None


@torch.inference_mode()
def fuse_mlps(model: nn.Module, threads: int) -> None:
    """Run MLPs below a model by blocks of rows, whose intermediate results stay in the cache.

    A module that computes something else with such layers is left as it is.
    """
    for mlp in model.modules():
        parts = mlp_parts(mlp)
        if parts is None or len(inspect.signature(mlp.forward).parameters) != 1:
            continue
        run = functools.partial(_run_mlp, pool_of(threads), *parts)
        sample = torch.linspace(-2, 2, 3 * parts[0].in_features).view(3, -1).bfloat16()
        expected = mlp(sample)
        if (run(sample) - expected).abs().max() <= 0.05 * expected.abs().max():
            mlp.forward = run


def _run_mlp(
    pool: int, first: nn.Module, second: Any, activate: Any, hidden_states: torch.Tensor
) -> torch.Tensor:
    rows = hidden_states.flatten(0, -2)
    result = room_for(rows, len(rows), second.out_features)
    for part in block_slices(len(rows)):
        inner = first(rows[part])
        activate(pool, inner.data_ptr(), 0, *inner.shape)
        result[part] = second(inner)
    return result.view(hidden_states.shape)


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
        self._gate: Product
        self._up: Product | None = None
        self._down: Product
        for name, own in _linears_of(block.mlp).items():
            setattr(self, own, product_of(getattr(block.mlp, name)))
        self._activate = activation_of(block.mlp.act_fn)
        norm = add_normed if has_bias(block.norm1) else add_norm
        for kernel in (norm, self._activate, rope_patches):
            kernel.address_of()

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> torch.Tensor:
        """Run the block over patches [patches, hidden], which are overwritten."""
        assert hidden_states.is_contiguous(), "`hidden_states` must be contiguous"
        attended = self._attend(hidden_states, cu_seqlens, position_embeddings)
        for part in block_slices(len(hidden_states)):
            rows = hidden_states[part]
            normed = torch.empty_like(rows)
            added, hidden_at = self._proj(attended[part].flatten(1)), rows.data_ptr()
            self._norms[1].add(self._pool, hidden_at, added, len(rows), normed.data_ptr())
            gate = self._gate(normed)
            up = None if self._up is None else self._up(normed)
            up_at = 0 if up is None else up.data_ptr()
            self._activate(self._pool, gate.data_ptr(), up_at, *gate.shape)
            rows += self._down(gate)
        return hidden_states

    def adapter_places(self, within: str, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
        """Return the positions of adapters; see `module_places`."""
        attention, mlp = self.block.attn, self.block.mlp
        return held_places(
            self,
            within,
            cuts,
            {"attn.qkv": ("_qkv", attention.qkv), "attn.proj": ("_proj", attention.proj)}
            | {f"mlp.{name}": (own, getattr(mlp, name)) for name, own in _linears_of(mlp).items()},
        )

    def _attend(
        self,
        hidden: torch.Tensor,
        cu_seqlens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the input of the output projection, [patches, heads, head_dim]."""
        heads = self.block.attn.num_heads
        count = len(hidden)
        half = angles[0].shape[1] // 2
        padded = whole_vectors(2 * half)
        # Both halves of a head are rotated by the same angles.
        cos, sin = (each[:, :half].float().contiguous().numpy() for each in angles)
        heads_buffer = hidden.new_empty(3 * heads, count, padded)
        for part in block_slices(len(hidden)):
            rows = hidden[part]
            normed = torch.empty_like(rows)
            hidden_at, normed_at = rows.data_ptr(), normed.data_ptr()
            self._norms[0].add(self._pool, hidden_at, None, len(rows), normed_at)
            qkv = self._qkv(normed)
            start_at = qkv.data_ptr() - part.start * qkv.shape[1] * qkv.itemsize
            stop = part.start + len(rows)
            into = padded, heads_buffer.data_ptr()
            rope_patches(self._pool, start_at, part.start, stop, heads, cos, sin, *into)
        query, key, value = heads_buffer.split(heads)
        attended = hidden.new_empty(count, heads, padded)
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
        return attended[..., : 2 * half]
