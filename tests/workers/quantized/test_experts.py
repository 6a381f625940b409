"""Mixtures of experts over packed weights, against transformers' forward pass of the same modules."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from vsched_workers.quantized.experts import (
    expert_names,
    pack_experts,
    parameters_of,
    take_parameter,
    use_dequantized,
    use_quantized,
)
from vsched_workers.quantized.weights import quantize

pytest.importorskip("numba")
from vsched_workers.backends.cpu.experts import experts_together
from vsched_workers.backends.cpu.products import QuantizedProduct, make_product

EXPERTS, CHOICES, HIDDEN, INNER = 5, 2, 48, 32
TRAITS = [
    {},
    {"has_gate": False},
    {"has_bias": True, "is_transposed": True},
    {"has_post_expert_norm": True},
]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def experts_with(dtype: torch.dtype, **traits: bool) -> Any:
    """Return an experts module as transformers declares them."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            outputs = 2 * INNER if traits.get("has_gate", True) else INNER
            name = "gate_up_proj" if traits.get("has_gate", True) else "up_proj"
            for seed, (each, rows, columns) in enumerate(
                [(name, outputs, HIDDEN), ("down_proj", HIDDEN, INNER)]
            ):
                weight = drawn(EXPERTS, rows, columns, seed=seed)
                weight = weight.transpose(1, 2) if traits.get("is_transposed") else weight
                setattr(self, each, nn.Parameter(weight.contiguous()))
                if traits.get("has_bias"):
                    bias = drawn(EXPERTS, rows, seed=7 + seed)
                    setattr(self, f"{each}_bias", nn.Parameter(bias))
            self.act_fn = nn.SiLU()
            self.post_expert_norm = nn.RMSNorm(HIDDEN)

    declare: Any = use_experts_implementation
    config = SimpleNamespace(_experts_implementation="grouped_mm")
    return declare(**traits)(Experts)(config).to(dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("traits", TRAITS)
def test_quantized_experts_compute_with_dequantized_weights(traits: dict[str, bool]) -> None:
    """Until they are packed, after that, and if they replace the parameters, as on a GPU."""
    experts, given = experts_with(torch.float32, **traits), drawn(6, HIDDEN, seed=3)
    chosen = torch.tensor([[0, 3], [3, 4], [4, 0]] * 2)
    routed = given, chosen, drawn(6, CHOICES, seed=4)
    quantized = {}
    for name in parameters_of(experts):
        weights = take_parameter(experts, name)
        outputs_first = weights.mT if experts.is_transposed else weights
        quantized[name] = [quantize(each, "int8", group=16) for each in outputs_first]
    use_quantized(experts, quantized)
    found = experts(*routed)
    pack_experts(experts, lambda weight, bias: QuantizedProduct(weight, bias, threads=1))
    torch.testing.assert_close(experts(*routed), found)
    del experts.forward
    use_dequantized(experts, quantized, "cpu")
    torch.testing.assert_close(experts(*routed), found)
    assert {*parameters_of(experts)} <= {name for name, _ in experts.named_parameters()}


@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize(
    ("dtype", "within", "threads"),
    [(torch.float32, 1e-5, 2), (torch.bfloat16, 0.02, 2), (torch.bfloat16, 0.02, 4)],
)
def test_packed_experts_compute_what_transformers_does(
    traits: dict[str, bool], dtype: torch.dtype, within: float, threads: int
) -> None:
    """In one call or one after the other, with the same bits, which do not depend on the other rows.

    Included are an expert without rows, and a call without rows.
    """
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts_with(dtype, **traits)})})
    experts: Any = model["mlp"]["experts"]  # type: ignore[index]
    rows = drawn(9, HIDDEN, seed=11).to(dtype)
    chosen = torch.tensor([[0, 3], [3, 4], [4, 0], [0, 3], [3, 0], [4, 3], [0, 4], [3, 4], [4, 3]])
    weights = drawn(9, CHOICES, seed=12).abs().to(dtype)
    expected = experts(rows, chosen, weights)
    names = expert_names(model)
    assert names == [name for name, one in model.named_parameters() if one.dim() == 3]
    apart = copy.deepcopy(model)
    make = functools.partial(make_product, threads=threads)
    pack_experts(apart, make)
    (packed,) = pack_experts(model, make, functools.partial(experts_together, threads))
    found = experts(rows, chosen, weights)
    assert torch.equal(apart["mlp"]["experts"](rows, chosen, weights), found)  # type: ignore[index]
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= within * expected.abs().max()
    for row in range(len(rows)):
        some = slice(row, row + 1)
        assert torch.equal(experts(rows[some], chosen[some], weights[some]), found[some])
    assert experts(rows[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)
    assert sum(each.size_bytes for each in packed.products) > 0
    assert not {*names} & {name for name, _ in model.named_parameters()}
