"""Fused layers of a bfloat16 vision tower on a CPU, similar to the layers of `language_layers.py`.

Rows go through the products in blocks, so that the result of one product is still in the cache for the next. Windows
of equal size are attended to in one call: a single one is too small to be worth a call. Towers of other architectures
keep transformers' modules.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vsched_workers.adapters.places import LayerPlace, held_places
from vsched_workers.backends.cpu.attention import fits, patch_kernel
from vsched_workers.backends.cpu.kernels.activation import swiglu
from vsched_workers.backends.cpu.kernels.norm import add_norm
from vsched_workers.backends.cpu.kernels.rope import rope_patches
from vsched_workers.backends.cpu.language_layers import product_of
from vsched_workers.backends.cpu.layer_parts import Norm, block_slices
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.batching.paged_attention import PatchKernel
from vsched_workers.memory.sparse_runs import is_left_out
from vsched_workers.parallel.slicing import Cut


def fuse_blocks(tower: Any, threads: int, *, deterministic: bool = False) -> bool:
    """Fuse the blocks of a tower with packed linear layers; return False if they cannot be fused.

    With `deterministic`, the result for an image does not depend on the others.
    """
    if not can_fuse(tower):
        return False
    for kernel in (add_norm, swiglu, rope_patches):
        kernel.address_of()
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
            added, hidden_at = self._proj(attended[part]), rows.data_ptr()
            self._norms[1].add(self._pool, hidden_at, added, len(rows), normed.data_ptr())
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
            hidden_at, normed_at = rows.data_ptr(), normed.data_ptr()
            self._norms[0].add(self._pool, hidden_at, None, len(rows), normed_at)
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
