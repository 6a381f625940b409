"""Models quantized on loading against the same models with dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from tests.parity.architectures import make_checkpoint
from tests.workers.backends.cpu.twins import WITHIN, run_both
from tests.workers.driver import Checkpoints, Driver, Question, Stage, outputs
from tests.workers.properties import thorough
from tests.workers.quantized.test_weights import dequantized_twin
from tests.workers.test_language import mixed_questions

pytestmark = pytest.mark.slow


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
    source, given = checkpoints(size), {"weights": kind, "weights_group": group}
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


@pytest.mark.parametrize("name", ["qwen3_moe", *thorough("gpt2", "gemma3_text", "llama")])
def test_quantized_models_of_any_architecture_answer_as_their_twins(
    tmp_path: Path, name: str
) -> None:
    """On the generic path and for decoder-only models; experts stay unquantized."""
    source = tmp_path / name
    make_checkpoint(name, source)
    stage = Stage.load(source, attention="auto", weights="int8", weights_group=32)
    plain = Stage.load(source)
    questions = [Question(range(3, 3 + length), count=4) for length in (5, 21)]
    assert 0 < run_both(plain, stage, questions).apart < 0.1
    assert stage.generator.weights_bytes < plain.generator.weights_bytes
