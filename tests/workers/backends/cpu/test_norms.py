"""RMS norms of transformers' modules by the kernel, against the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

pytest.importorskip("numba")
from vsched_workers.backends.cpu.norms import KernelNorm, use_norm_kernel

WIDTH = 96


class DoublingRMSNorm(Glm4RMSNorm):
    """Another computation under such a name."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("kind", [Gemma4RMSNorm, Glm4RMSNorm, Qwen3_5RMSNorm])
def test_norms_equal_the_modules_but_for_the_order_of_a_sum(kind: Any) -> None:
    """Also for rows that are not contiguous, with the weights of the module."""
    model = nn.ModuleList([kind(WIDTH), kind(WIDTH)]).bfloat16().requires_grad_(requires_grad=False)
    first: Any = model[0]
    first.weight.copy_(drawn(WIDTH, seed=1))
    rows = drawn(2, 3, 7, WIDTH, seed=2).transpose(1, 2)
    expected = first(rows)
    use_norm_kernel(model, 1)
    assert all(isinstance(vars(each)["forward"], KernelNorm) for each in model)
    assert first(rows).shape == expected.shape
    assert (first(rows) == expected).float().mean() > 0.99


def test_other_computations_stay_as_they_are() -> None:
    norms = [DoublingRMSNorm(WIDTH), Qwen3_5RMSNormGated(WIDTH), nn.LayerNorm(WIDTH)]
    model = nn.ModuleList([*norms, Gemma4RMSNorm(WIDTH, with_scale=False)]).bfloat16()
    use_norm_kernel(model, 1)
    assert not any("forward" in vars(each) for each in model)
