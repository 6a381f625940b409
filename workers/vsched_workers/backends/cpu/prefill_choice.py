"""Which kernel attends for many rows of bfloat16: the custom one, or oneDNN's products by tiles."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from vsched_workers.backends.cpu import operand_choice, prefill_attention, tiled_attention
from vsched_workers.backends.cpu.kernels import prefill_attention as custom_kernel
from vsched_workers.backends.cpu.kernels import softmax
from vsched_workers.batching.paged_attention import PatchKernel, PrefillKernel
from vsched_workers.batching.ruled_attention import ScoreRule, prefill_by_rule

if TYPE_CHECKING:
    import torch

    from vsched_workers.batching.paged_attention import PagedStep, Segment

SHORT_ROWS = tiled_attention.WINDOW_ROWS[-1]
"""Most rows of a sequence that the custom kernel attends for where a processor has AMX, too."""


class RuledPrefillKernel(Protocol):
    """Attention of the rows of one chunk, whose keys and values are in the cache already, by a rule."""

    def __call__(
        self,
        query: torch.Tensor,
        layer: int,
        segment: Segment,
        step: PagedStep,
        rule: ScoreRule,
        /,
    ) -> torch.Tensor:
        """Return [heads, rows, head dim] for a query of the same shape."""
        ...


def choose_prefill(threads: int) -> PrefillKernel:
    """Return the kernel for the chunks of prompts."""
    if _custom_pays(threads):
        return prefill_attention.prefill
    if not operand_choice.runs_here():
        return tiled_attention.prefill
    custom_kernel.warm_up(operand_choice.operand(), threads=threads)
    return _short_chunks_by_custom_kernel


def _short_chunks_by_custom_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend beside AMX: for few rows the custom kernel takes 0.3 to 1.1 of oneDNN's time, and compiles nothing."""
    short = query.shape[1] <= SHORT_ROWS
    attend = prefill_attention.prefill if short else tiled_attention.prefill
    return attend(query, key, value, layer, segment, step, scaling)


def choose_ruled_prefill(threads: int, head_dim: int) -> RuledPrefillKernel:
    """Return the kernel for the chunks of prompts in layers with windows or bent scores, for heads of this size."""
    if _custom_pays(threads) and prefill_attention.fits(head_dim):
        return prefill_attention.prefill_by_rule
    return _prefill_by_torch


def _prefill_by_torch(
    query: torch.Tensor, layer: int, segment: Segment, step: PagedStep, rule: ScoreRule
) -> torch.Tensor:
    kept = step.cache.layers[layer]
    return prefill_by_rule(query, kept, segment.slots(), rule).transpose(0, 1)


def choose_patches(
    threads: int, heads: int, head_dim: int, *, deterministic: bool = False
) -> PatchKernel:
    """Return the kernel for the patches of images; compile all that it needs for heads of this number and size.

    With `deterministic`, it is one whose result for a sequence does not depend on the others.
    """
    if deterministic:
        custom_kernel.warm_up(operand_choice.operand(), threads=threads)
        return functools.partial(prefill_attention.attend_patches, parallel=threads > 1)
    fits = prefill_attention.fits(head_dim)
    if fits and _custom_pays(threads):
        return prefill_attention.attend_patches
    custom = fits and operand_choice.runs_here()
    softmax.warm_up(threads=threads)
    tiled_attention.warm_up_patches(heads, head_dim, windows=not custom)
    if not custom:
        return tiled_attention.attend_patches
    # Windows are too small for AMX: the custom kernel takes 0.3 to 1.0 of oneDNN's time for them.
    custom_kernel.warm_up(operand_choice.operand(), threads=threads)
    return _windows_by_custom_kernel


def _windows_by_custom_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, out: torch.Tensor
) -> None:
    short = query.shape[2] <= SHORT_ROWS
    attend = prefill_attention.attend_patches if short else tiled_attention.attend_patches
    attend(query, key, value, scaling, out)


def _custom_pays(threads: int) -> bool:
    """Return whether the custom kernel attends for many rows of bfloat16 here, or oneDNN; compile the one that does.

    For chunks it leaves heads of odd sizes to oneDNN; the profiling run compiles for them.
    """
    if not operand_choice.attends_here():
        softmax.warm_up(threads=threads)
        return False
    custom_kernel.warm_up(operand_choice.operand(), threads=threads)
    return True
