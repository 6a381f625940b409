"""Quantized weights: dequantization, slicing and merging, also as dequantized checkpoints for comparison."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vsched.errors import CheckpointError
from vsched_workers.parallel.slicing import cut_of
from vsched_workers.quantized.layers import QuantizedLinear, merged_quantized, plain_weight
from vsched_workers.quantized.weights import QuantizedWeight, merged_weights, quantize

KINDS = [("int8", 0), ("int8", 32), ("int4", 32), ("int4", 48)]


def drawn(outputs: int = 24, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_quantize_keeps_each_value_within_half_a_step() -> None:
    weight = drawn()
    found = quantize(weight, "int8", group=32)
    steps = found.scales.float().repeat_interleave(32, 1)
    assert ((found.dequantized() - weight.float()).abs() <= 0.501 * steps).all()


def test_quantize_int4_is_better_than_the_scale_that_holds_the_largest_value() -> None:
    weight = drawn(64, 256)
    groups = weight.float().unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / scales).round() * scales - groups).square().sum()
    found = (quantize(weight, "int4").dequantized() - weight.float()).square().sum()
    assert found < plain


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantize_of_zeros_and_of_tiny_values_is_finite(kind: str) -> None:
    weight = torch.zeros(4, 64)
    weight[1] = 1e-30
    weight[2, 3] = 1e-6
    found = quantize(weight, kind).dequantized()
    assert torch.isfinite(found).all()
    assert (found - weight).abs().max() < 1e-4


def test_quantize_fills_up_the_last_group() -> None:
    weight = drawn(8, 80)
    found = quantize(weight, "int4", group=32)
    assert found.scales.shape == (8, 3)
    assert found.dequantized().shape == (8, 80)
    assert torch.equal(found.dequantized()[:, :64], quantize(weight[:, :64], "int4").dequantized())


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("dimension", [0, 1])
def test_part_is_the_part_of_what_it_stands_for(kind: str, group: int, dimension: int) -> None:
    whole = quantize(drawn(), kind, group=group)
    for rank in range(2):
        if dimension and group == 32:
            cut = cut_of(96, ranks=3, rank=rank, dimension=1)
        else:
            cut = cut_of((24, 96)[dimension], ranks=2, rank=rank, dimension=dimension)
        part = whole.part(cut)
        assert torch.equal(part.dequantized(), cut.read(whole.dequantized()))
        assert part.shape == tuple(part.dequantized().shape)


def test_part_within_a_group_is_refused() -> None:
    whole = quantize(drawn(), "int4", group=64)
    with pytest.raises(
        CheckpointError, match=r"at 48, within a group: 64 inputs .*generate.tensor_parallel"
    ):
        whole.part(cut_of(96, ranks=2, rank=0, dimension=1))


def ordered(seed: int, order_seed: int = 0) -> QuantizedWeight:
    """Return a weight with groups of inputs that are not adjacent."""
    generator = torch.Generator().manual_seed(order_seed)
    order = torch.randperm(96, generator=generator).to(torch.int32)
    return dataclasses.replace(quantize(drawn(8, seed=seed), "int4", group=32), order=order)


def test_ordered_weight_is_cut_by_outputs_alone() -> None:
    whole = ordered(0)
    cut = cut_of(8, ranks=2, rank=1)
    assert torch.equal(whole.part(cut).dequantized(), whole.dequantized()[4:])
    with pytest.raises(CheckpointError, match=r"96 inputs .*desc_act.*tensor_parallel to 1"):
        whole.part(cut_of(96, ranks=2, rank=0, dimension=1))


def test_layers_are_merged_if_their_inputs_have_one_order() -> None:
    shape = nn.Linear(96, 8, bias=False, device="meta")
    one, same, other = (QuantizedLinear(shape, ordered(seed, seed // 2)) for seed in range(3))
    merged = merged_quantized([one, same])
    assert merged is not None
    wanted = torch.cat([plain_weight(one), plain_weight(same)])
    assert torch.equal(plain_weight(merged), wanted)
    assert merged_quantized([one, other]) is None


def test_merged_weights_stand_for_the_weights_above_each_other() -> None:
    parts = [quantize(drawn(8, seed=seed), "int4") for seed in range(3)]
    merged = merged_weights(parts)
    assert torch.equal(merged.dequantized(), torch.cat([each.dequantized() for each in parts]))
    for chunk, part in zip(merged.chunks(3), parts, strict=True):
        assert torch.equal(chunk.dequantized(), part.dequantized())


def test_merged_weights_with_and_without_offsets() -> None:
    one, other = (quantize(drawn(8, seed=seed), "int8", group=32) for seed in range(2))
    shifts = torch.full_like(one.scales, 0.5)
    merged = merged_weights([dataclasses.replace(one, offsets=shifts), other])
    wanted = torch.cat([one.dequantized() + 0.5, other.dequantized()])
    torch.testing.assert_close(merged.dequantized(), wanted)
    assert merged.nbytes == merged.values.nbytes + 2 * merged.scales.nbytes


EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "wte.weight")


def as_quantized(name: str, tensor: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """Return a checkpoint's tensor after quantization and dequantization."""
    if tensor.dim() != 2 or "pos_embed" in name:
        return tensor
    if name.endswith(EMBEDDINGS):
        kind, group = "int8", group if kind == "int8" else 0
    return quantize(tensor, kind, group=group).dequantized()


def dequantized_twin(source: Path, target: Path, dtype: torch.dtype, kind: str, group: int) -> Path:
    """Write a float32 checkpoint with the dequantized weights of another."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        made = {
            name: as_quantized(name, tensor.to(dtype), kind, group).float().contiguous()
            for name, tensor in tensors.items()
        }
        save_file(made, file, metadata={"format": "pt"})
    return target
