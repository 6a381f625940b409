"""Which kernel attends for many rows of bfloat16: the custom one, or oneDNN's products by tiles."""

from __future__ import annotations

import functools

from vsched_workers.backends.cpu import operand_choice, prefill_attention, tiled_attention
from vsched_workers.backends.cpu.kernels import prefill_attention as custom_kernel
from vsched_workers.backends.cpu.kernels import softmax
from vsched_workers.batching.paged_attention import PatchKernel, PrefillKernel


def choose_prefill(threads: int) -> PrefillKernel:
    """Return the kernel for the chunks of prompts."""
    return prefill_attention.prefill if _custom_pays(threads) else tiled_attention.prefill


def choose_patches(threads: int, *, deterministic: bool = False) -> PatchKernel:
    """Return the kernel for the patches of images.

    With `deterministic`, it is one whose result for a sequence does not depend on the others.
    """
    if deterministic:
        custom_kernel.warm_up(operand_choice.operand(), threads=threads)
        return functools.partial(prefill_attention.attend_patches, parallel=threads > 1)
    if _custom_pays(threads):
        return prefill_attention.attend_patches
    return tiled_attention.attend_patches


def _custom_pays(threads: int) -> bool:
    """Return whether the custom kernel attends for many rows of bfloat16 here, or oneDNN; compile the one that does.

    The custom kernel leaves heads of odd sizes to oneDNN; the profiling run compiles for them.
    """
    if not operand_choice.pays_here():
        softmax.warm_up(threads=threads)
        return False
    custom_kernel.warm_up(operand_choice.operand(), threads=threads)
    return True
