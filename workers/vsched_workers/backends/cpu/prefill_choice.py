"""Choice of the attention kernel for many bfloat16 rows: a custom kernel, or oneDNN (`tiled_attention.py`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from vsched_workers.backends.cpu import operand_choice, prefill_attention, tiled_attention
from vsched_workers.backends.cpu.kernels import softmax
from vsched_workers.batching.paged_attention import PatchKernel, PrefillKernel
from vsched_workers.batching.ruled_attention import ScoreRule, prefill_by_rule

if TYPE_CHECKING:
    import torch

    from vsched_workers.batching.paged_attention import PagedStep, Segment


class RuledPrefillKernel(Protocol):
    """Attention of the rows of one chunk by a score rule; keys and values are already in the cache."""

    def __call__(
        self,
        query: torch.Tensor,
        layer: int,
        segment: Segment,
        step: PagedStep,
        rule: ScoreRule,
        out: torch.Tensor,
        /,
    ) -> None:
        """Write to `out` [rows, heads, head_dim] for a query [heads, rows, head_dim]."""
        ...


def choose_prefill() -> PrefillKernel:
    """Return the kernel for prefill chunks."""
    return prefill_attention.prefill if _uses_custom_kernel() else tiled_attention.prefill


def choose_ruled_prefill(head_dim: int) -> tuple[RuledPrefillKernel, bool]:
    """Return the kernel for prefill chunks by a score rule, for this head dimension.

    Also returns True if the kernel serves all layers, False if only layers with sliding windows or soft-capping.
    """
    if _uses_custom_kernel() and prefill_attention.fits(head_dim):
        return prefill_attention.prefill_by_rule, True
    return _prefill_by_torch, False


def _prefill_by_torch(
    query: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    rule: ScoreRule,
    out: torch.Tensor,
) -> None:
    out.copy_(prefill_by_rule(query, step.cache.layers[layer], segment.slots(), rule))


def choose_patches(heads: int, head_dim: int, *, deterministic: bool = False) -> PatchKernel:
    """Return the kernel for image patches, and compile it for this number of heads and head dimension.

    With `deterministic`, the result for a sequence does not depend on the others.
    """
    if deterministic:
        prefill_attention.warm_up(tiles=False)
        attend = prefill_attention.attend_patches
        return functools.partial(attend, tiles=False)
    if prefill_attention.fits(head_dim) and _uses_custom_kernel():
        return prefill_attention.attend_patches
    softmax.warm_up()
    tiled_attention.warm_up_patches(heads, head_dim)
    return tiled_attention.attend_patches


def _uses_custom_kernel() -> bool:
    """Return True if the custom kernel is used for many bfloat16 rows, False for oneDNN; compile the chosen one.

    The custom kernel leaves chunks with other head dimensions to oneDNN; the profiling run compiles for them.
    """
    if not operand_choice.supports_attention():
        softmax.warm_up()
        return False
    prefill_attention.warm_up()
    return True
