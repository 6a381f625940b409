"""Which kernel attends for many rows of bfloat16: one of our own, or oneDNN's products (`tiled_attention.py`)."""

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
    """Attention of the rows of one chunk, whose keys and values are in the cache already, by a rule."""

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
        """Write to `out` [rows, heads, head dim] for a query [heads, rows, head dim]."""
        ...


def choose_prefill() -> PrefillKernel:
    """Return the kernel for the chunks of prompts."""
    return prefill_attention.prefill if _custom_pays() else tiled_attention.prefill


def choose_ruled_prefill(head_dim: int) -> tuple[RuledPrefillKernel, bool]:
    """Return the kernel for the chunks of prompts by a rule, for heads of this size.

    And whether it is for all layers: otherwise for those with windows or bent scores.
    """
    if _custom_pays() and prefill_attention.fits(head_dim):
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
    """Return the kernel for the patches of images; compile all that it needs for heads of this number and size.

    With `deterministic`, it is one whose result for a sequence does not depend on the others.
    """
    if deterministic:
        prefill_attention.warm_up(tiles=False)
        attend = prefill_attention.attend_patches
        return functools.partial(attend, tiles=False)
    if prefill_attention.fits(head_dim) and _custom_pays():
        return prefill_attention.attend_patches
    softmax.warm_up()
    tiled_attention.warm_up_patches(heads, head_dim)
    return tiled_attention.attend_patches


def _custom_pays() -> bool:
    """Return whether the custom kernel attends for many rows of bfloat16 here, or oneDNN; compile the one that does.

    For chunks it leaves heads of odd sizes to oneDNN; the profiling run compiles for them.
    """
    if not operand_choice.attends_here():
        softmax.warm_up()
        return False
    prefill_attention.warm_up()
    return True
