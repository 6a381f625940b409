"""Published quantized checkpoints, written here in each format: dequantized weights, model outputs, and refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.architectures import make_checkpoint
from tests.workers.backends.cpu.twins import WITHIN, Twins
from tests.workers.driver import Driver, Question, Stage
from vsched.errors import CheckpointError, ConfigError, VschedError
from vsched.worker.contract import WorkerSettings
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.plugin import TransformersPlugin
from vsched_workers.quantized.published import read_quantized
from vsched_workers.quantized.schemes import scheme_of

Tensors = dict[str, torch.Tensor]
GROUP = 32


class Published(NamedTuple):
    """One layer in a published format: its tensors by suffix, and the dequantized weight in float32."""

    tensors: Tensors
    weight: torch.Tensor


def _words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned values [rows, n] into int32, the lowest bits first."""
    count = 32 // bits
    words = torch.zeros(len(values), values.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        words |= values[:, place::count].to(torch.int64) << bits * place
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


def _levels(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned values [out, in], scales and zero points [out, groups], and the dequantized weight."""
    groups = weight.unflatten(1, (-1, group))
    top = (1 << bits) - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(0, top)
    if symmetric:
        scales = (groups.abs().amax(-1) / (top // 2)).half().float()
        zeros = torch.full_like(scales, 1 << bits - 1)
    levels = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    stands_for = (levels - zeros[..., None]) * scales[..., None]
    return levels.flatten(1).long(), scales, zeros.long(), stands_for.flatten(1)


def _packed(weight: torch.Tensor, bits: int, *, symmetric: bool) -> Published:
    levels, scales, zeros, stands_for = _levels(weight, bits, GROUP, symmetric=symmetric)
    tensors = {
        "weight_packed": _words(levels, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
    return Published(tensors, stands_for)


def _int8(weight: torch.Tensor) -> Published:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127)
    tensors = {"weight": values.to(torch.int8), "weight_scale": scales}
    return Published(tensors, values * scales.float())


def _fp8(weight: torch.Tensor) -> Published:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    return Published({"weight": values, "weight_scale": scales}, values.float() * scales)


def _fp8_blocks(weight: torch.Tensor) -> Published:
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) / 100 + 0.01
    spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return Published({"weight": values, "weight_scale_inv": scales}, values.float() * spread)


def _gptq(weight: torch.Tensor, bits: int, *, less: int = 1) -> Published:
    levels, scales, zeros, stands_for = _levels(weight, bits, GROUP, symmetric=False)
    zeros = zeros.clamp(min=less)
    stands_for = (levels.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]
    inputs = weight.shape[1]
    tensors = {
        "qweight": _words(levels, bits).T.contiguous(),
        "qzeros": _words((zeros - less).T, bits),
        "scales": scales.half().T.contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }
    return Published(tensors, stands_for.flatten(1))


def shuffled(inputs: int) -> torch.Tensor:
    """Return the order in which GPTQ quantizes inputs: the same for all layers with as many inputs."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def _ordered(
    weight: torch.Tensor, make: Callable[[torch.Tensor], Published], levels: str, groups: str
) -> Published:
    """Quantize groups of permuted inputs; values are stored in the layer's order."""
    order = shuffled(weight.shape[1])
    back = order.argsort()
    made = make(weight[:, order])
    words = made.tensors[levels]
    by_rows = words if levels == "weight_packed" else words.T
    bits = 32 * by_rows.shape[1] // weight.shape[1]
    places = torch.arange(32 // bits) * bits
    values = (by_rows[..., None].long() >> places & (1 << bits) - 1).flatten(1)[:, back]
    words = _words(values, bits)
    tensors = made.tensors | {
        levels: words if levels == "weight_packed" else words.T.contiguous(),
        groups: (back // GROUP).to(torch.int32),
    }
    return Published(tensors, made.weight[:, back])


def _awq(weight: torch.Tensor) -> Published:
    levels, scales, zeros, stands_for = _levels(weight, 4, GROUP, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def ordered(values: torch.Tensor) -> torch.Tensor:
        by_eight = values.T.reshape(len(values.T), -1, 8)
        return by_eight[:, :, order].flatten(1)

    tensors = {
        "qweight": _words(ordered(levels), 4),
        "qzeros": _words(ordered(zeros), 4),
        "scales": scales.half().T.contiguous(),
    }
    return Published(tensors, stands_for)


def _compressed(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_IN_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Published]]] = {
    "compressed int4": (
        _compressed("pack-quantized", 4, "int", **_IN_GROUPS),
        lambda weight: _packed(weight, 4, symmetric=True),
    ),
    "compressed int4 with zeros": (
        _compressed("pack-quantized", 4, "int", **_IN_GROUPS, symmetric=False),
        lambda weight: _packed(weight, 4, symmetric=False),
    ),
    "compressed int8 packed": (
        _compressed("pack-quantized", 8, "int", **_IN_GROUPS),
        lambda weight: _packed(weight, 8, symmetric=True),
    ),
    "compressed int8": (_compressed("int-quantized", 8, "int", "channel"), _int8),
    "compressed fp8": (_compressed("float-quantized", 8, "float", "channel"), _fp8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, _fp8_blocks),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        lambda weight: _gptq(weight, 4),
    ),
    "gptq in order of activations": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda weight: _ordered(weight, lambda each: _gptq(each, 4), "qweight", "g_idx"),
    ),
    "compressed int4 in order of activations": (
        _compressed("pack-quantized", 4, "int", **_IN_GROUPS, actorder="group"),
        lambda weight: _ordered(
            weight, lambda each: _packed(each, 4, symmetric=True), "weight_packed", "weight_g_idx"
        ),
    ),
    "gptq of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False},
        lambda weight: _gptq(weight, 8),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda weight: _gptq(weight, 4, less=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
}
"""The entries of `config.json`, and the writer of a layer."""


def publish(source: Path, quantized: Path, twin: Path, name: str) -> None:
    """Write a quantized checkpoint, and one in float32 with its dequantized weights."""
    said, make = FORMATS[name]
    for target in (quantized, twin):
        shutil.copytree(source, target)
    for file in source.glob("*.safetensors"):
        published: Tensors = {}
        plain: Tensors = {}
        for full, tensor in load_file(file).items():
            layer, _, end = full.rpartition(".")
            if end == "weight" and tensor.dim() == 2 and layer.endswith("_proj"):
                made = make(tensor.float())
                published |= {f"{layer}.{key}": value for key, value in made.tensors.items()}
                plain[full] = made.weight.contiguous()
            else:
                published[full] = plain[full] = tensor
        save_file(published, quantized / file.name, metadata={"format": "pt"})
        save_file(plain, twin / file.name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


pytest.importorskip("numba")


def drawn(outputs: int = 64, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FORMATS)
def test_published_weight_is_what_its_format_says(name: str) -> None:
    said, make = FORMATS[name]
    scheme = scheme_of({"quantization_config": said})
    assert scheme is not None
    made = make(drawn())
    found = read_quantized(scheme, made.tensors.get, (64, 96), torch.bfloat16)
    torch.testing.assert_close(found.dequantized(), made.weight, rtol=1e-6, atol=1e-6)
    assert found.nbytes < 64 * 96 * (0.82 if found.kind == "int4" else 1.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["compressed int4 with zeros", "compressed int8", "fp8", "gptq in order of activations", "awq"],
)
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", WITHIN)])
def test_published_models_answer_as_their_dequantized_twins(
    tmp_path: Path, name: str, dtype: str, within: float
) -> None:
    """In bfloat16 the layers are fused, and activations are rounded."""
    make_checkpoint("llama", tmp_path / "source", initializer_range=0.1)
    quantized, twin = tmp_path / "quantized", tmp_path / "twin"
    publish(tmp_path / "source", quantized, twin, name)
    settings = WorkerSettings(threads=1)
    wanted, found = (
        Stage.load(path, attention="auto", dtype=kind, settings=settings)
        for path, kind in ((twin, "float32"), (quantized, dtype))
    )
    twins = Twins(found.generator, wanted.generator)
    questions = [Question(range(3, 3 + length), count=8) for length in (5, 40, 70)]
    Driver(dataclasses.replace(found, generator=twins), chunk=30).run(questions, arrivals=2)
    one, other = (torch.cat(each).float() for each in twins.logits)
    apart = (one - other).square().mean().sqrt() / other.square().mean().sqrt()
    assert apart < within
    assert found.generator.weights_bytes < wanted.generator.weights_bytes


REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq of 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 8}, "groups of 8 inputs"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the layout 'gemv'"),
    ({"quant_method": "fp8"}, "fp8 without weight_block_size"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "several groups"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED)
def test_unsupported_schemes_are_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as reported:
        scheme_of({"text_config": {"quantization_config": said}})
    assert "Supported: " in str(reported.value)
    assert "Remedy: " in str(reported.value)


def test_unsupported_schemes_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(CheckpointError, match="hqq"):
        TransformersPlugin().inspect(str(tmp_path), dtype="auto", item_tokens_max=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"g_idx": torch.zeros(96, dtype=torch.int32)},
        {"g_idx": torch.arange(48, dtype=torch.int32) // 16},
        {"qweight": torch.zeros(4, 4, dtype=torch.int32)},
        {"scales": torch.ones(2, 64)},
        {"qzeros": None},
    ],
)
def test_tensors_foreign_to_the_scheme_are_reported(wrong: dict[str, torch.Tensor | None]) -> None:
    said, make = FORMATS["gptq"]
    scheme = scheme_of({"quantization_config": said})
    assert scheme is not None
    tensors = make(drawn()).tensors | wrong
    with pytest.raises(CheckpointError, match=r"of a quantised weight: .* Remedy"):
        read_quantized(scheme, tensors.get, (64, 96), torch.bfloat16)


@pytest.mark.parametrize("given", [{"attention": "exact"}, {"dtype": "float16"}])
def test_published_weights_are_refused_if_there_is_no_product(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    make_checkpoint("llama", tmp_path / "source")
    publish(tmp_path / "source", tmp_path / "quantized", tmp_path / "twin", "gptq")
    options: dict[str, Any] = {"attention": "auto", "dtype": "bfloat16"} | given
    with pytest.raises(ConfigError, match=r"config.json: gptq is not possible on"):
        Stage.load(tmp_path / "quantized", **options)


def test_description_reports_what_weights_take(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "source")
    publish(tmp_path / "source", tmp_path / "quantized", tmp_path / "twin", "gptq")
    plain, quantized = (describe_checkpoint(str(tmp_path / name)) for name in ("twin", "quantized"))
    reported, parameters = plain.weights_bytes["language"], plain.parameters["language"]
    assert {"int8", "int4", "int8/32", "int4/64"} <= set(reported)
    assert parameters < reported["int8"] < 1.1 * parameters
    assert 0.5 * parameters < reported["int4"] < reported["int8"]
    size = quantized.weights_bytes["language"]["auto"]
    assert 0.95 * quantized.file_bytes < size + 8192 < 1.1 * quantized.file_bytes + 8192
    assert size < 0.5 * plain.file_bytes


def test_published_weights_on_the_generic_path_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quantization_config": FORMATS["gptq"][0]}
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(VschedError, match="generic path"):
        TransformersPlugin().inspect(str(tmp_path), dtype="auto", item_tokens_max=0)
