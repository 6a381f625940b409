"""Attention of bfloat16 vision towers without fused blocks, through transformers' attention interface.

torch's attention multiplies bfloat16 in float32: it takes twice as long (two Zen 4 cores, 256 to 4,096 patches).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from vsched_workers.backends.cpu.attention import attend_patches, warm_up, whole_vectors

NAME: Final = "vsched_patches"


def use_patch_kernel(model: Any) -> None:
    """Compile the patch kernel, and make it the attention implementation of a tower of transformers."""
    if not hasattr(model, "set_attn_implementation"):
        return  # modules of another origin, such as `own_modules` with an activation that has no kernel
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    warm_up()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' `sdpa`, which serves masks that hide a key, and other shapes and types.

    Shape: query, key, value [images, heads, rows, head dim]; returns [images, rows, heads, head dim].
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and hides_nothing(attention_mask):
        attention_mask, causal = None, False
    images, heads, rows, head_dim = query.shape
    alike = key.shape == value.shape and key.shape[2:] == query.shape[2:]
    others = any(given.get(each) is not None for each in ("position_bias", "cache", "softcap"))
    known = alike and not others and query.dtype == torch.bfloat16
    if attention_mask is not None or causal or not known:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            *(query, key, value, attention_mask),
            scaling=scaling,
            is_causal=causal,
            **given,
        )
    # Zeros change no score, and their values are cut off.
    padded = whole_vectors(head_dim)
    q, k, v = (
        functional.pad(each.transpose(0, 1), (0, padded - head_dim)).contiguous()
        for each in (query, key, value)
    )
    out = query.new_empty(images, rows, heads, padded)
    attend_patches(q, k, v, head_dim**-0.5 if scaling is None else scaling, out)
    return out[..., :head_dim].contiguous(), None


def hides_nothing(mask: torch.Tensor) -> bool:
    """Return whether a mask, of booleans or of values added to scores, leaves all scores as they are."""
    return bool(mask.all()) if mask.dtype == torch.bool else not mask.any()
