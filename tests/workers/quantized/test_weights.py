"""Quantized weights: dequantization, slicing and merging; models of them against their dequantized twins."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from tests.parity.architectures import make_checkpoint
from tests.workers.backends.cpu.twins import WITHIN, run_both
from tests.workers.driver import Checkpoints, Driver, Question, Stage, outputs
from tests.workers.properties import thorough
from tests.workers.test_language import mixed_questions
from vsched.errors import CheckpointError
from vsched_workers.parallel.slicing import cut_of
from vsched_workers.quantized.layers import (
    QuantizedLinear,
    merged_quantized,
    plain_weight,
    tie_embedding,
)
from vsched_workers.quantized.weights import QuantizedWeight, merged_weights, quantize

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
KINDS = [("int8", 0), ("int8", 32), ("int4", 32), ("int4", 48), ("fp4", 32)]


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


@needs_numba
@pytest.mark.parametrize("group", [16, 32, 48])
def test_kernel_quantizes_to_int4_as_torch_does(group: int) -> None:
    """Also groups of zeros, of tiny values, filled up with zeros, and of two values of the largest magnitude."""
    from vsched_workers.backends.cpu.products import round_groups  # needs numba

    weight = drawn(40, 200)
    weight[1], weight[2] = 0, 1e-30
    weight[3, :200:2], weight[3, 1:200:2] = 2.5, 0.1
    known = quantize(weight, "int4", group=group)
    found = quantize(weight, "int4", group=group, int4=functools.partial(round_groups, 2))
    assert torch.equal(found.scales, known.scales)
    assert torch.equal(found.values, known.values)


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
def test_part_of_a_quantized_weight_is_the_part_of_its_values(
    kind: str, group: int, dimension: int
) -> None:
    whole = quantize(drawn(), kind.replace("fp", "int"), group=group)
    whole = dataclasses.replace(whole, kind=kind)
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


@pytest.mark.parametrize("kind", ["int4", "fp4"])
def test_layers_of_4_bits_and_int8_are_merged_without_rounding(kind: str) -> None:
    """As queries, keys and values of GGUF files, whose values have more bits in some layers."""
    shape = nn.Linear(96, 8, bias=False, device="meta")
    low, high = quantize(drawn(8), "int4", group=48), quantize(drawn(8, seed=1), "int8", group=32)
    low = dataclasses.replace(low, kind=kind)
    layers = [QuantizedLinear(shape, each) for each in (low, high)]
    merged = merged_quantized(layers)
    assert merged is not None
    assert torch.equal(plain_weight(merged), torch.cat([plain_weight(each) for each in layers]))
    assert merged.quantized is not None
    assert (merged.quantized.kind, merged.quantized.group) == ("int8", 16)


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


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * torch.tensor(3.0, dtype=self.weight.dtype)


class Indexed(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


@needs_numba
@pytest.mark.parametrize(("kind", "left"), [(nn.Embedding, 0), (Scaled, 0), (Indexed, 1)])
def test_tied_embedding_of_any_class_reads_rows_of_the_packed_head(
    kind: type[nn.Embedding], left: int
) -> None:
    """Models may read rows of its weight, too; one that computes with the weight itself keeps it."""
    from vsched_workers.backends.cpu.products import make_product  # needs numba

    embedding, ids = kind(24, 96).bfloat16(), torch.tensor([[3, 23]])
    weight, expected = embedding.weight.detach(), embedding(ids)
    tie_embedding(embedding, weight, make_product(weight, None, threads=1))
    assert torch.equal(embedding(ids), expected)
    assert torch.equal(embedding.weight[3, :], weight[3])
    assert len([*embedding.parameters()]) == left


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


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kind", "group"),
    [
        *(("nano25", "int8", 0), ("nano25", "int4", 16)),
        *thorough(("nano3", "int8", 32), ("nano3", "int4", 0)),
    ],
)
def test_quantized_model_equals_its_dequantized_twin(
    checkpoints: Checkpoints, tmp_path: Path, size: str, kind: str, group: int
) -> None:
    """In float32, including the tower, logits differ only by the order of sums; fused layers round to bfloat16."""
    source, given = checkpoints(size), dict[str, Any](weights=kind, weights_group=group)
    twin = dequantized_twin(source, tmp_path / "twin", torch.float32, kind, group)
    plain, quantized = Stage.load(twin), Stage.load(source, attention="auto", **given)
    twins = run_both(plain, quantized, mixed_questions(), arrivals=2)
    wanted, found = (torch.cat(each) for each in twins.logits)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    both = [outputs(Driver(each, chunk=30).run(mixed_questions())) for each in (plain, quantized)]
    assert both[0] == both[1]
    rounded = dequantized_twin(source, tmp_path / "rounded", torch.bfloat16, kind, group)
    plain = Stage.load(rounded, attention="auto")
    fused = Stage.load(source, attention="auto", dtype="bfloat16", threads=2, **given)
    questions = [Question(range(300, 300 + length), count=12) for length in (5, 40, 70)]
    assert run_both(fused, plain, questions, arrivals=2).apart < WITHIN


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("size", ["nano25", *thorough("nano3")])
def test_quantized_weights_weigh_less(checkpoints: Checkpoints, size: str) -> None:
    """The ledger counts quantized bytes: with tied weights, one copy serves as embedding and as head."""
    sizes: dict[str, list[int]] = {}
    for kind in ("auto", "int8", "int4"):
        stage = Stage.load(checkpoints(size), attention="auto", dtype="bfloat16", weights=kind)
        sizes[kind] = [stage.generator.weights_bytes, stage.encoder.weights_bytes]
    for plain, int8, int4 in zip(*sizes.values(), strict=True):
        assert int4 < int8 < plain
    assert sizes["int8"][0] < 0.75 * sizes["auto"][0]


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["longcat_flash", *thorough("qwen3_moe", "gpt2", "gemma3_text", "llama")]
)
def test_quantized_models_of_any_architecture_answer_as_their_twins(
    tmp_path: Path, name: str
) -> None:
    """On the generic path, with its experts, and for decoder-only models."""
    source = tmp_path / name
    make_checkpoint(name, source)
    stage = Stage.load(source, attention="auto", weights="int8", weights_group=32)
    plain = Stage.load(source)
    questions = [Question(range(3, 3 + length), count=4) for length in (5, 21)]
    assert 0 < run_both(plain, stage, questions).apart < 0.1
    share = 0.5 if name == "qwen3_moe" else 1
    assert stage.generator.weights_bytes < share * plain.generator.weights_bytes
