"""Calibration: correct statistics of layer inputs, smaller weighted errors, and refusal of wrong files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("numba")

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import CHUNK, OUTPUTS, prompts, tokens_of
from tests.workers.driver import Driver, Question, Stage, drawn_image
from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.parallel.slicing import cut_of
from vsched_workers.plugin import TransformersPlugin
from vsched_workers.quantized.calibration import (
    FORMAT,
    check_calibration,
    checkpoint_digest,
    read_calibration,
    write_calibration,
)
from vsched_workers.quantized.layers import importance_of, plain_weight, quantize_calibrated
from vsched_workers.quantized.weights import quantize

KINDS = [("int8", 0), ("int8", 32), ("int4", 32), ("int4", 48)]
TEXT = "The quick brown fox jumps over the lazy dog."
DEMO = Path(__file__).parents[3] / "workers" / "demo-model"


def drawn(outputs: int = 24, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()


def counts(inputs: int = 96, seed: int = 1) -> torch.Tensor:
    return torch.randn(inputs, generator=torch.Generator().manual_seed(seed)).exp().square()


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_scales_by_importance_make_less_of_the_error_that_counts(kind: str, group: int) -> None:
    weight, importance = drawn(64), counts()
    wrong = [
        ((quantize(weight, kind, group=group, importance=each).dequantized() - weight.float()) ** 2)
        @ importance
        for each in (importance, None)
    ]
    assert wrong[0].sum() < 0.97 * wrong[1].sum()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_output_and_a_group_are_searched_alone(kind: str) -> None:
    """So ranks with a part of them have the same values."""
    weight, importance = drawn(2000), counts()
    whole = quantize(weight, kind, group=32, importance=importance).dequantized()
    some = quantize(weight[5:9, 32:], kind, group=32, importance=importance[32:]).dequantized()
    assert torch.equal(some, whole[5:9, 32:])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_search_of_zeros_and_of_tiny_values_is_finite(kind: str) -> None:
    weight = torch.zeros(4, 64)
    weight[1], weight[2, 3] = 1e-30, 1e-6
    importance = torch.zeros(64)
    for each in (importance, importance + 1e-30, counts(64)):
        found = quantize(weight, kind, importance=each).dequantized()
        assert torch.isfinite(found).all()
        assert (found - weight).abs().max() < 1e-4


def test_inputs_that_were_not_seen_count_a_little() -> None:
    assert importance_of(torch.tensor([0.0, 2.0])).tolist() == pytest.approx([0.01, 2.01])
    assert importance_of(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def calibrated(path: Path, file: Path, **more: Any) -> int:
    plugin = TransformersPlugin()
    info = plugin.inspect(str(path), dtype="auto", item_tokens_max=0)
    options = {"texts": [TEXT], "images": []} | more
    settings = WorkerSettings(threads=1)
    return plugin.calibrate(info, settings, str(file), lambda _what, _done: None, **options)


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Path]:
    """Return a text checkpoint and its calibration file."""
    path, file = tmp_path / "llama", tmp_path / "calibration.safetensors"
    make_checkpoint("llama", path, initializer_range=0.1)
    calibrated(path, file)
    return path, file


@pytest.mark.slow
def test_mean_squares_are_those_of_transformers_layers(llama: tuple[Path, Path]) -> None:
    path, file = llama
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            seen[name] = given[0][0].square().mean(0)

        return hook

    for name, child in model.model.named_modules():
        if isinstance(child, nn.Linear):
            child.register_forward_pre_hook(watch(name))
    info = TransformersPlugin().inspect(str(path), dtype="auto", item_tokens_max=0)
    ids = TransformersPlugin().load_preprocessor(info).tokenize(TEXT)
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]))
    found = read_calibration(str(file), path, "language")
    assert set(found) == set(seen)
    for name, values in found.items():
        torch.testing.assert_close(torch.from_numpy(values), seen[name], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_calibrated_model_answers_as_its_dequantized_twin(
    llama: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    path, file = llama
    squares = read_calibration(str(file), path, "language")
    settings = WorkerSettings(
        threads=1, weights=kind, weights_group=32, calibration=str(file), activations="float"
    )
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        layer = name.removeprefix("model.").removesuffix(".weight")
        importance = None
        if layer in squares:
            importance = importance_of(torch.from_numpy(squares[layer]))
        elif tensor.dim() != 2:
            continue
        made = quantize(tensor, kind if layer in squares else "int8",
                        group=32 if layer in squares or kind == "int8" else 0,
                        importance=importance)  # fmt: skip
        tensors[name] = made.dequantized().contiguous()
    twin = tmp_path / "twin"
    twin.mkdir()
    for each in path.iterdir():
        (twin / each.name).write_bytes(each.read_bytes())
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    answers = []
    for where, given in ((path, settings), (twin, WorkerSettings(threads=1))):
        stage = Stage.load(str(where), attention="auto", dtype="float32", settings=given)
        questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
        answers.append(tokens_of(Driver(stage, chunk=CHUNK).run(questions, arrivals=2)))
    assert answers[0] == answers[1]
    plain = dataclasses.replace(settings, calibration="")
    stages = [
        Stage.load(str(path), attention="auto", dtype="bfloat16", settings=each)
        for each in (plain, settings)
    ]
    assert stages[0].generator.weights_bytes == stages[1].generator.weights_bytes


@pytest.mark.slow
def test_both_parts_of_a_model_that_sees_are_calibrated(tmp_path: Path) -> None:
    file = tmp_path / "calibration.safetensors"
    layers = calibrated(DEMO, file, images=[drawn_image(1, 90, 60), drawn_image(2, 64, 64)])
    for part in ("language", "vision"):
        check_calibration(str(file), DEMO, part)
    found = load_arrays(file)
    assert len(found) == layers
    assert all((values > 0).any() for values in found.values())
    settings = WorkerSettings(threads=1, weights="int4", calibration=str(file))
    stage = Stage.load(str(DEMO), attention="auto", dtype="bfloat16", settings=settings)
    question = Question("What is in the image?", [drawn_image(1, 90, 60)], count=3)
    assert len(Driver(stage, chunk=50).run([question])[0].output) == 3


class Pair(nn.Module):
    """Two layers, split by outputs and by inputs under tensor parallelism."""

    def __init__(self, middle: int) -> None:
        super().__init__()
        self.up = nn.Linear(32, middle, bias=False)
        self.down = nn.Linear(middle, 32, bias=False)


def test_a_ranks_part_has_the_values_of_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, file = Pair(96), tmp_path / "calibration.safetensors"
    squares = {"up": counts(32).numpy(), "down": counts(96, seed=2).numpy()}
    write_calibration(file, tmp_path, {"language": squares}, {})
    settings = WorkerSettings(weights="int4", weights_group=16, calibration=str(file))
    names = ["up.weight", "down.weight"]
    part = Pair(48)
    cuts = {
        f"{name}.weight": cut_of(96, ranks=2, rank=1, dimension=dimension)
        for dimension, name in enumerate(("up", "down"))
    }
    for name, cut in cuts.items():
        part.get_parameter(name).data = cut.read(whole.get_parameter(name).data).contiguous()
    quantize_calibrated(whole, names, settings, str(tmp_path), "language")
    quantize_calibrated(part, names, settings, str(tmp_path), "language", cuts)
    for name, cut in cuts.items():
        layer = name.removesuffix(".weight")
        one, other = (plain_weight(each.get_submodule(layer)) for each in (part, whole))  # type: ignore[arg-type]
        assert torch.equal(one, cut.read(other))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Return a checkpoint of two layers, and the contents of a valid file for it."""
    weights = {f"model.layers.{n}.up.weight": np.ones((4, 32), np.float32) for n in range(2)}
    save_arrays(weights, tmp_path / "model.safetensors")
    squares = {f"language.layers.{n}.up": np.ones(32, np.float32) for n in range(2)}
    said = {"format": FORMAT, "checkpoint": checkpoint_digest(tmp_path)}
    return tmp_path, squares, said


WRONG: list[tuple[str, Any, dict[str, str], str]] = [
    ("layers.1.up", None, {}, "says nothing of layers.1.up; expected: its 32 inputs"),
    ("layers.1.up", np.ones(16, np.float32), {}, "has 16 inputs of layers.1.up; expected: 32"),
    ("layers.0.up", np.full(32, np.nan, np.float32), {}, "has nan among .* layers.0.up"),
    ("layers.0.up", np.full(32, -1, np.float32), {}, "has -1.0 among .* layers.0.up"),
    ("layers.0.up", np.ones((2, 32), np.float32), {}, r"has float32 \[2, 32\] of layers.0.up"),
    ("layers.0.up", np.ones(32, np.float64), {}, "has float64 .*; expected: float32"),
    ("", None, {"checkpoint": "f00"}, "is of another checkpoint, f00; expected: that of"),
    ("", None, {"format": "gguf"}, "has the format 'gguf'; expected: 'vsched calibration 1'"),
]


@pytest.mark.parametrize(("name", "values", "said", "message"), WRONG)
def test_wrong_files_are_refused(
    stored: tuple[Path, dict[str, Any], dict[str, str]],
    name: str,
    values: Any,
    said: dict[str, str],
    message: str,
) -> None:
    path, squares, good = stored
    file = path / "file"
    save_arrays(squares, file, metadata=good)
    check_calibration(str(file), path, "language")
    changed = {key: each for key, each in squares.items() if key != f"language.{name}"}
    if values is not None:
        changed[f"language.{name}"] = values
    save_arrays(changed, file, metadata=good | said)
    with pytest.raises(CheckpointError, match=message) as reported:
        check_calibration(str(file), path, "language")
    assert str(reported.value).startswith("generate.calibration: ")
    assert "Remedy: " in str(reported.value)


def test_files_that_say_nothing_are_refused(
    stored: tuple[Path, dict[str, Any], dict[str, str]],
) -> None:
    path, squares, good = stored
    save_arrays(squares, path / "file", metadata=good)
    with pytest.raises(CheckpointError, match=r"encode.calibration: .*vision model .*--images"):
        check_calibration(str(path / "file"), path, "vision")
    with pytest.raises(CheckpointError, match="is not there"):
        check_calibration(str(path / "none"), path, "language")
    (path / "text").write_text("no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_calibration(str(path / "text"), path, "language")


def test_another_weight_makes_another_digest(tmp_path: Path) -> None:
    digests = set()
    for value in range(3):
        save_arrays({"a": np.full(8, value, np.float32)}, tmp_path / "model.safetensors")
        digests.add(checkpoint_digest(tmp_path))
    assert len(digests) == 3


def test_a_calibration_next_to_the_weights_is_none_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    make_checkpoint("llama", folder)
    before, digest = describe_checkpoint(str(folder)), checkpoint_digest(folder)
    write_calibration(
        folder / "calibration.safetensors",
        folder,
        {"language": {"layer": np.ones(8, np.float32)}},
        {},
    )
    assert describe_checkpoint(str(folder)) == before
    assert checkpoint_digest(folder) == digest
