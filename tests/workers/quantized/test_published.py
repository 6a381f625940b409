"""Published quantized checkpoints, written here in each format: dequantized weights, model outputs, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.architectures import make_checkpoint
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.workers.backends.cpu.twins import WITHIN, run_both
from tests.workers.driver import Checkpoints, Question, Stage, inspect
from tests.workers.edited import write
from tests.workers.properties import thorough
from vsched.errors import CheckpointError, ConfigError
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.checkpoint.facts import check_parallel
from vsched_workers.quantized.published import read_quantized, written_blocks
from vsched_workers.quantized.schemes import FOUR_BITS, scheme_of
from vsched_workers.quantized.weights import quantize

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


def _order(inputs: int, *, shuffled: bool) -> torch.Tensor:
    """Return the order in which inputs are quantized, the same for all layers with as many."""
    if not shuffled:
        return torch.arange(inputs)
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def _packed(
    weight: torch.Tensor, bits: int = 4, *, symmetric: bool = True, shuffled: bool = False
) -> Published:
    """Quantize groups of inputs in an order; values are stored in the layer's order."""
    order = _order(weight.shape[1], shuffled=shuffled)
    back = order.argsort()
    levels, scales, zeros, stands_for = _levels(weight[:, order], bits, GROUP, symmetric=symmetric)
    tensors = {
        "weight_packed": _words(levels[:, back], bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
    if shuffled:
        tensors["weight_g_idx"] = (back // GROUP).to(torch.int32)
    return Published(tensors, stands_for[:, back])


def _by_channel(
    weight: torch.Tensor, top: int, dtype: torch.dtype, *, whole: str = ""
) -> Published:
    """Quantize each output, or the whole weight with a scale of this name."""
    scales = (weight.abs().amax() if whole else weight.abs().amax(1, keepdim=True)) / top
    scales = scales.bfloat16()
    values = weight / scales.float()
    values = (values.round() if dtype == torch.int8 else values).clamp(-top, top).to(dtype)
    tensors = {"weight": values, whole or "weight_scale": scales}
    return Published(tensors, values.float() * scales.float())


def _fp8_blocks(weight: torch.Tensor) -> Published:
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) / 100 + 0.01
    spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return Published({"weight": values, "weight_scale_inv": scales}, values.float() * spread)


def _gptq(
    weight: torch.Tensor, bits: int = 4, *, less: int = 1, shuffled: bool = False
) -> Published:
    """Quantize groups of inputs in an order; values are stored in the layer's order."""
    order = _order(weight.shape[1], shuffled=shuffled)
    back = order.argsort()
    levels, scales, zeros, _ = _levels(weight[:, order], bits, GROUP, symmetric=False)
    zeros = zeros.clamp(min=less)
    stands_for = (levels.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]
    tensors = {
        "qweight": _words(levels[:, back], bits).T.contiguous(),
        "qzeros": _words((zeros - less).T, bits),
        "scales": scales.half().T.contiguous(),
        "g_idx": (back // GROUP).to(torch.int32),
    }
    return Published(tensors, stands_for.flatten(1)[:, back])


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


def _fp4(weight: torch.Tensor, form: str = "") -> Published:
    """Write stacked blocks, or another form of compressed-tensors."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    groups = weight.unflatten(1, (-1, 16 if form == "nvfp4" else 32))
    largest = groups.abs().amax(-1) / 6
    exponents, factor = largest.log2().ceil(), 448 / largest.max()
    scales, stored = exponents.exp2(), (exponents + 127).to(torch.uint8)
    if form == "nvfp4":
        stored = (largest * factor).to(torch.float8_e4m3fn)
        scales = stored.float() / factor
    codes = (groups[..., None] / scales[..., None, None] - values).abs().argmin(-1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    tensors = {"weight_blocks": packed, "weight_scales": stored}
    if form:
        tensors = {"weight_packed": packed.flatten(1), "weight_scale": stored}
    if form == "nvfp4":
        tensors["weight_global_scale"] = factor[None]
    return Published(tensors, (values[codes] * scales[..., None]).flatten(1))


def _of_gguf(weight: torch.Tensor) -> Published:
    """Quantize a layer with fewer outputs than inputs to int8, another one to int4 with offsets."""
    made = quantize(weight, "int8" if len(weight) < weight.shape[1] else "int4", group=GROUP)
    if made.kind == "int4":
        made = dataclasses.replace(made, offsets=made.scales / 4)
    return Published(written_blocks("weight", made), made.dequantized())


def _compressed(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
    groups = {
        part: {"targets": [f"re:.*{part}.*"], "weights": weights | {"observer": part}}
        for part in ("attn", "mlp")
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "sparsity_config": {"format": "dense"},
    }


_IN_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
_PACKED = functools.partial(_compressed, "pack-quantized", kind="int", **_IN_GROUPS)
_FP8_VALUES = functools.partial(_by_channel, top=448, dtype=torch.float8_e4m3fn)
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
_AUTO_ROUND = _GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
Make = Callable[[torch.Tensor], Published]


FORMATS: Mapping[str, tuple[dict[str, Any], Make]] = {
    "compressed int4": (_PACKED(bits=4), _packed),
    "compressed int4 with zeros": (
        _PACKED(bits=4, symmetric=False),
        functools.partial(_packed, symmetric=False),
    ),
    "compressed int8 packed": (_PACKED(bits=8), functools.partial(_packed, bits=8)),
    "compressed int8": (
        _compressed("int-quantized", 8, "int", "channel"),
        functools.partial(_by_channel, top=127, dtype=torch.int8),
    ),
    "compressed fp8": (
        _compressed("float-quantized", 8, "float", "channel"),
        _FP8_VALUES,
    ),
    "fp8 with a scale for each weight": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        functools.partial(_FP8_VALUES, whole="weight_scale_inv"),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        functools.partial(_FP8_VALUES, whole="weight_scale"),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, _fp8_blocks),
    "gptq": (_GPTQ, _gptq),
    "gptq in order of activations": (
        _GPTQ | {"desc_act": True},
        functools.partial(_gptq, shuffled=True),
    ),
    "compressed int4 in order of activations": (
        _PACKED(bits=4, actorder="group"),
        functools.partial(_packed, shuffled=True),
    ),
    "gptq without attention": (_GPTQ | {"dynamic": {"-:.*attn.*": {}, "lm_head": {}}}, _gptq),
    "auto-round": (_AUTO_ROUND | {"extra_config": {"mlp.gate": {"bits": 16}}}, _gptq),
    "gptq of 8 bits": (_GPTQ | {"bits": 8}, functools.partial(_gptq, bits=8)),
    "gptq_v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, functools.partial(_gptq, less=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "mxfp4": ({"quant_method": "mxfp4"}, _fp4),
    "compressed mxfp4": (
        _compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
        functools.partial(_fp4, form="mxfp4"),
    ),
    "compressed nvfp4": (
        _compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
        functools.partial(_fp4, form="nvfp4"),
    ),
    "gguf": ({"quant_method": "gguf"}, _of_gguf),
}
"""The entries of `config.json`, and the writer of a layer."""


_QUANTIZED = re.compile(r"_proj$|\.experts\.")


def publish(source: Path, quantized: Path, twin: Path, name: str) -> None:
    """Write a quantized checkpoint, and one in float32 with its dequantized weights.

    Experts in one tensor stay stacked, with outputs before inputs.
    """
    said, make = FORMATS[name]
    config = json.loads((source / "config.json").read_text())
    swap = config["model_type"] == "gpt_oss"
    for target in (quantized, twin):
        shutil.copytree(source, target)
    for file in source.glob("*.safetensors"):
        published: Tensors = {}
        plain: Tensors = {}
        for full, tensor in load_file(file).items():
            layer, _, end = full.rpartition(".")
            if tensor.dim() == 3 and layer.endswith(".experts"):
                experts = [make(one.float()) for one in (tensor.mT if swap else tensor)]
                for key in experts[0].tensors:
                    stacked = torch.stack([each.tensors[key] for each in experts])
                    published[full + key.removeprefix("weight")] = stacked
                weight = torch.stack([each.weight for each in experts])
                plain[full] = (weight.mT if swap else weight).contiguous()
            elif end == "weight" and tensor.dim() == 2 and _QUANTIZED.search(layer):
                made = make(tensor.float())
                published |= {f"{layer}.{key}": value for key, value in made.tensors.items()}
                plain[full] = made.weight.contiguous()
            else:
                published[full] = plain[full] = tensor
        save_file(published, quantized / file.name, metadata={"format": "pt"})
        save_file(plain, twin / file.name, metadata={"format": "pt"})
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


pytest.importorskip("numba")


def published(
    folder: Path, name: str, architecture: str = "llama", **changes: Any
) -> tuple[Path, Path]:
    """Return the folders of a quantized checkpoint and of its dequantized twin."""
    make_checkpoint(architecture, folder / "source", **changes)
    quantized, twin = folder / "quantized", folder / "twin"
    publish(folder / "source", quantized, twin, name)
    return quantized, twin


def drawn(outputs: int = 64, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FORMATS)
def test_published_weight_has_the_values_of_its_format(name: str) -> None:
    said, make = FORMATS[name]
    scheme = scheme_of({"quantization_config": said})
    assert scheme is not None
    made = make(drawn())
    found = read_quantized(scheme, made.tensors.get, (64, 96), torch.bfloat16, name="")
    torch.testing.assert_close(found.dequantized(), made.weight, rtol=1e-6, atol=1e-6)
    assert found.nbytes < 64 * 96 * (0.82 if found.kind in FOUR_BITS else 1.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name", "dtype"),
    [
        ("llama", "compressed int8", "bfloat16"),
        ("llama", "awq", "float32"),
        ("qwen3_moe", "compressed int4 with zeros", "float32"),
        ("gpt_oss", "mxfp4", "float32"),
        *thorough(
            ("llama", "compressed int4 with zeros", "float32"),
            ("llama", "fp8", "float32"),
            ("ministral3", "fp8 with a scale for each weight", "float32"),
            ("llama", "gptq in order of activations", "bfloat16"),
            ("llama", "gguf", "bfloat16"),
            ("llama", "compressed nvfp4", "bfloat16"),
            ("qwen3_5_moe_text", "fp8", "float32"),
            ("glm4_moe", "gptq in order of activations", "float32"),
            ("mixtral", "fp8", "float32"),
            ("gpt_oss", "gguf", "bfloat16"),
            ("phi3", "gptq", "float32"),
            ("modernbert-decoder", "compressed int8", "float32"),
            ("nanochat", "compressed int8", "float32"),
        ),
    ],
)
def test_published_models_answer_as_their_dequantized_twins(
    tmp_path: Path, architecture: str, name: str, dtype: str
) -> None:
    """In bfloat16 activations are rounded; layers of decoder-only models are fused."""
    quantized, twin = published(tmp_path, name, architecture, initializer_range=0.1)
    wanted = Stage.load(twin, attention="auto")
    found = Stage.load(quantized, attention="auto", dtype=dtype)
    questions = [Question(range(3, 3 + length), count=8) for length in (5, 40, 70)]
    within = WITHIN if dtype == "bfloat16" else 1e-4
    assert run_both(found, wanted, questions, arrivals=2).apart < within
    assert found.generator.weights_bytes < wanted.generator.weights_bytes


def test_experts_of_qwen3_vl_may_be_quantized_in_separate_tensors(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """As quantizers write them, although the model's own tensors are stacked."""
    source, quantized = tmp_path / "source", tmp_path / "quantized"
    shutil.copytree(checkpoints("nano3moe"), source)
    separate = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base, _, end = name.rpartition(".experts.")
        if not base:
            separate[name] = tensor
            continue
        parts = ["down_proj"] if end == "down_proj" else ["gate_proj", "up_proj"]
        for number, expert in enumerate(tensor):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                separate[f"{base}.experts.{number}.{part}.weight"] = weight.contiguous()
    save_file(separate, source / "model.safetensors", metadata={"format": "pt"})
    publish(source, quantized, tmp_path / "twin", "fp8")
    plain = Stage.load(checkpoints("nano3moe"), attention="auto")
    found = Stage.load(quantized, attention="auto")
    questions = [Question(range(300, 300 + length), count=8) for length in (5, 40)]
    assert 0 < run_both(plain, found, questions).apart < 0.15
    assert found.generator.weights_bytes < 0.6 * plain.generator.weights_bytes


EXPERTS = "model.language_model.layers.0.mlp.experts.gate_up_proj"
TOWER = "visual.blocks.0.mlp.gate_proj.weight"

REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq of 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 8}, "groups of 8 inputs"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the layout 'gemv'"),
    (_GPTQ | {"checkpoint_format": "marlin"}, "gptq in the layout 'marlin'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt with quant_algo 'NVFP4'"),
    (_AUTO_ROUND | {"packing_format": "auto_round:fp8"}, "packing_format 'auto_round:fp8'"),
    (_AUTO_ROUND | {"extra_config": {"q_proj": {"bits": 8}}}, "for the layers 'q_proj'"),
    (_GPTQ | {"dynamic": {"+:.*up.*": {"group_size": 64}}}, "for the layers '.*up"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "in several formats"),
    (_GPTQ | {"dynamic": ["+:.*up.*"]}, "quantization_config holds a value of the wrong type"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED)
def test_unsupported_schemes_are_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{message}.*Remedy: "):
        scheme_of({"text_config": {"quantization_config": said}})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gptq", {"g_idx": torch.zeros(96, dtype=torch.int32)}),
        ("gptq", {"g_idx": torch.arange(48, dtype=torch.int32) // 16}),
        ("gptq", {"qweight": torch.zeros(4, 4, dtype=torch.int32)}),
        ("gptq", {"scales": torch.ones(2, 64)}),
        ("gptq", {"scales": torch.ones(3, 32), "qzeros": torch.zeros(3, 4, dtype=torch.int32)}),
        ("gptq in one group", {}),
        ("mxfp4", {"weight_scales": torch.zeros(32, 3, dtype=torch.uint8)}),
        ("fp8", {"weight_scale_inv": torch.ones(1)}),
        ("modelopt", {"weight_scale": torch.ones(2, 3)}),
        ("compressed int8", {"weight_scale": torch.ones(3)}),
    ],
)
def test_tensors_foreign_to_the_scheme_are_reported(
    name: str, wrong: dict[str, torch.Tensor]
) -> None:
    said, make = FORMATS.get(name) or (_GPTQ | {"group_size": -1}, _gptq)
    scheme = scheme_of({"quantization_config": said})
    assert scheme is not None
    tensors = make(drawn()).tensors | wrong
    with pytest.raises(CheckpointError, match=r"of a quantized weight: .* Remedy"):
        read_quantized(scheme, tensors.get, (64, 96), torch.bfloat16, name="")


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("fp8", "scale", r"layers.1.mlp.up_proj.weight of type F8_E4M3 has no scale"),
        ("compressed int8", "scale", r"layers.1.mlp.up_proj.weight of type I8 has no scale"),
        ("fp8", "config", r"_proj.weight is quantized, and config.json has no quantization_config"),
        ("gptq", "config", r"qweight is quantized, and config.json has no quantization_config"),
        ("gptq", "qzeros", r"layers.1.mlp.up_proj: qzeros of a quantized weight: found nothing"),
    ],
)
def test_quantized_tensors_without_scale_or_settings_are_reported(
    tmp_path: Path, name: str, missing: str, message: str
) -> None:
    """Read without them, they are other weights."""
    path, _ = published(tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    for key in [key for key in tensors if f"layers.1.mlp.up_proj.weight_{missing}" in key]:
        del tensors[key]
    tensors.pop(f"model.layers.1.mlp.up_proj.{missing}", None)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if missing == "config":
        write(path / "config.json", {"quantization_config": None})
    with pytest.raises(CheckpointError, match=f"{message}.*Remedy"):
        Stage.load(path, attention="auto")


@pytest.mark.parametrize("given", [{"attention": "exact"}, {"dtype": "float16"}])
def test_published_weights_are_refused_if_there_is_no_product(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    quantized, _ = published(tmp_path, "gptq")
    options: dict[str, Any] = {"attention": "auto", "dtype": "bfloat16"} | given
    with pytest.raises(ConfigError, match=r"config.json: gptq is not possible on"):
        Stage.load(quantized, **options)


@pytest.mark.parametrize(
    ("size", "tensor", "name"),
    [
        ("llama", "lm_head.weight", "compressed fp8"),
        ("llama", "lm_head.weight", "compressed int4"),
        ("nano25", TOWER, "fp8"),
        ("nano25", "model.embed_tokens.weight", "compressed int8"),
        ("nano3moe", EXPERTS, "fp8"),
        ("llava", "vision_tower.encoder.layers.0.self_attn.q_proj.weight", "fp8"),
        ("qwen3_moe", "lm_head.weight", "fp8"),
        ("qwen3_moe", "model.layers.0.mlp.experts.1.up_proj.weight", "fp8"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "compressed int8"),
    ],
)
def test_quantized_tensors_of_other_parts_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, size: str, tensor: str, name: str
) -> None:
    """Their values without scales are other weights."""
    path = tmp_path / "copy"
    if size == "llava":
        make_vision_checkpoint(size, path)
    elif size in {"llama", "qwen3_moe"}:
        make_checkpoint(size, path)
    else:
        shutil.copytree(checkpoints(size), path)
    said, make = FORMATS[name]
    tensors = load_file(path / "model.safetensors")
    plain = tensors.pop(tensor)
    layer = tensor.removesuffix("weight")
    for end, value in make(plain.flatten(0, -2).float()).tensors.items():
        full = layer + (end if layer != tensor else end.removeprefix("weight"))
        tensors[full] = value.view(plain.shape) if full == tensor else value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write(path / "config.json", {"quantization_config": said})
    with pytest.raises(CheckpointError, match=f"tensor {tensor} is quantized.*Remedy"):
        Stage.load(path, attention="auto")


@pytest.mark.parametrize(("name", "kind"), [("gptq", "int4"), ("mxfp4", "fp4")])
def test_description_reports_formats_and_memory(tmp_path: Path, name: str, kind: str) -> None:
    quantized, plain = map(describe_checkpoint, map(str, published(tmp_path, name)))
    reported, parameters = plain.weights_bytes["language"], plain.parameters["language"]
    assert {"int8", "int4", "int8/32", "int4/64"} <= set(reported)
    assert parameters < reported["int8"] < 1.1 * parameters
    assert 0.5 * parameters < reported["int4"] < reported["int8"]
    assert {*quantized.dtypes} == {kind, "float32"}
    size = quantized.weights_bytes["language"]["auto"]
    assert 0.95 * quantized.file_bytes < size + 8192 < 1.1 * quantized.file_bytes + 8192
    assert size < 0.5 * plain.file_bytes


def test_ranks_share_quantized_layers_but_no_experts(tmp_path: Path) -> None:
    for name in ("llama", "qwen3_moe"):
        quantized, _ = published(tmp_path / name, "fp8", name)
        info = inspect(quantized)
        with nullcontext() if name == "llama" else pytest.raises(CheckpointError, match="2 ranks"):
            check_parallel(info, stage="generate", ranks=2)
