"""Published quantized checkpoints: dequantized weights, model outputs, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import CHUNK, OUTPUTS, generated, prompts, tokens_of
from tests.workers.backends.cpu.twins import WITHIN, Twins
from tests.workers.driver import Driver, Question, Stage
from tests.workers.quantized.published_checkpoints import FORMATS, publish
from vsched.errors import CheckpointError, ConfigError, VschedError
from vsched.worker.contract import WorkerSettings
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.plugin import TransformersPlugin
from vsched_workers.quantized.published import read_quantized
from vsched_workers.quantized.schemes import scheme_of


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
@pytest.mark.parametrize("name", FORMATS)
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
        Stage.load(str(path), attention="auto", dtype=kind, settings=settings)
        for path, kind in ((twin, "float32"), (quantized, dtype))
    )
    twins = Twins(found.generator, wanted.generator)
    questions = [Question(range(3, 3 + length), count=8) for length in (5, 40, 70)]
    Driver(dataclasses.replace(found, generator=twins), chunk=30).run(questions, arrivals=2)
    one, other = (torch.cat(each).float() for each in twins.logits)
    apart = (one - other).square().mean().sqrt() / other.square().mean().sqrt()
    assert apart < within
    assert found.generator.weights_bytes < wanted.generator.weights_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if "in order of" in name])
def test_published_models_in_order_of_activations_answer_as_transformers(
    tmp_path: Path, name: str
) -> None:
    """The same tokens as with the dequantized weights."""
    make_checkpoint("llama", tmp_path / "source")
    quantized, twin = tmp_path / "quantized", tmp_path / "twin"
    publish(tmp_path / "source", quantized, twin, name)
    settings = WorkerSettings(threads=1)
    stage = Stage.load(str(quantized), attention="auto", dtype="float32", settings=settings)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = tokens_of(Driver(stage, chunk=CHUNK).run(questions, arrivals=2, preempts=5))
    assert found == generated(twin, prompts())


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
        Stage.load(str(tmp_path / "quantized"), **options)


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
