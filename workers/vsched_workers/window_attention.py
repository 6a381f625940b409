"""Attention of the vision tower over many short sequences at once.

A windowed vision layer attends within windows of a few dozen patches. Transformers calls the attention function once a
window unless the function's name contains `flash`; then it calls once and says where the windows begin. This function has
such a name and attends to all windows of one length in one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import nn

NAME = "vsched_flash_windows"


def attend_windows(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend within each window.

    Shape: query, key and value [1, heads, patches, head dim]; cu_seq_lens_q int32 [windows + 1], where each begins and
    the last ends; returns [1, patches, heads, head dim].
    """
    bounds = cu_seq_lens_q.tolist()
    by_length: dict[int, list[int]] = {}
    for start, stop in zip(bounds, bounds[1:], strict=False):
        by_length.setdefault(stop - start, []).append(start)
    _, heads, patches, head_dim = query.shape
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    out = torch.empty(patches, heads, head_dim, dtype=query.dtype, device=query.device)
    for length, starts in by_length.items():
        whole = len(by_length) == 1
        index = None
        if not whole:
            first = torch.tensor(starts, device=query.device)
            index = (first[:, None] + torch.arange(length, device=query.device)).reshape(-1)
        windows = [
            (tensor if index is None else tensor[index])
            .reshape(len(starts), length, heads, head_dim)
            .transpose(1, 2)
            for tensor in rows
        ]
        attended = functional.scaled_dot_product_attention(*windows, scale=scaling)
        flat = attended.transpose(1, 2).reshape(-1, heads, head_dim)
        if index is None:
            out = flat
        else:
            out[index] = flat
    return out[None], None


def use(tower: nn.Module) -> None:
    """Make a vision tower attend with `attend_windows`.

    The name is set on a tower that is already built: on the way there, transformers would look for a flash attention
    package that goes by this name.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend_windows)
    config: Any = tower.config
    config._attn_implementation_internal = NAME  # noqa: SLF001
