"""Attention of the vision tower on CUDA: every window and every image of a batch in one call per layer.

With ordinary attention, transformers calls it once for every window, which for Qwen2.5-VL means hundreds of kernels of
a few microseconds per layer. For implementations with `flash` in their name it passes the arguments of flash attention
for variable-length sequences instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cuda.attention import varlen_kernel

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)
FLASH = "vsched_vision_flash"

_TRIAL_HEADS, _TRIAL_DIM, _TRIAL_LENGTHS = 2, 80, (64, 16, 200)
_WITHIN = 4e-2


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend within each of the concatenated sequences.

    Shape: query, key and value [1, heads, rows, head dim]; cu_seq_lens_q int32 [sequences + 1]; returns [1, rows,
    heads, head dim].
    """
    if cu_seq_lens_q is None or max_length_q is None:
        # This version of transformers has split the row into its sequences.
        seen = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        return seen.transpose(1, 2), None
    packed = [each[0].transpose(0, 1) for each in (query, key, value)]
    return varlen(packed, cu_seq_lens_q, int(max_length_q), scaling)[None], None


def varlen(
    packed: Sequence[torch.Tensor], bounds: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """Attend with queries, keys and values [rows, heads, head dim] each."""
    kernel, options = varlen_kernel("scale")
    bounds = bounds.int()
    out: torch.Tensor = kernel(*packed, bounds, bounds, longest, longest, scale=scaling, **options)
    return out


def use_flash(tower: nn.Module, settings: WorkerSettings, dtype: torch.dtype) -> bool:
    """Have a tower attend with one call per layer, if the kernel is correct on the device; return whether it does."""
    if dtype == torch.float32 or settings.attention == "exact" or not runs(settings.device, dtype):
        return False
    register()
    switch(tower)
    return True


def switch(tower: nn.Module) -> None:
    """Switch a tower, built with another implementation, to the one registered as `FLASH`."""
    # Not earlier: while building, transformers tries to import a package for names with `flash`.
    config: Any = tower.config
    config._attn_implementation = FLASH  # noqa: SLF001  # as transformers sets it


def register() -> None:
    """Register `attend` with transformers as `FLASH`."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLASH, attend)


def runs(device: str, dtype: torch.dtype) -> bool:
    """Return whether the kernel's results are correct on the device, by a trial."""
    chance = torch.Generator().manual_seed(0)
    shape = (3, sum(_TRIAL_LENGTHS), _TRIAL_HEADS, _TRIAL_DIM)
    inputs: Any = torch.randn(shape, generator=chance).to(device=device, dtype=dtype)
    ends = torch.tensor([0, *_TRIAL_LENGTHS]).cumsum(0)
    parts = [
        functional.scaled_dot_product_attention(*part.transpose(1, 2)).transpose(0, 1)
        for part in inputs.split(_TRIAL_LENGTHS, dim=1)
    ]
    try:
        found = varlen(inputs.unbind(0), ends.to(device), max(_TRIAL_LENGTHS), _TRIAL_DIM**-0.5)
        differs = float((found - torch.cat(parts)).abs().max())
    except Exception as error:  # noqa: BLE001  # kernels may raise anything
        logger.info("vision: attention runs window by window, which is slower: %s", error)
        return False
    if not differs <= _WITHIN:
        logger.warning("vision: torch's varlen_attn is wrong by %g here; not used", differs)
        return False
    return True
