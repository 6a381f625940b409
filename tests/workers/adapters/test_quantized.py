"""Adapters of quantized checkpoints: each request has the same output as PEFT with the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numba")

from tests.parity.compare import OUTPUTS, prompts, tokens_of
from tests.workers.adapters.peft_adapters import expected_tokens, make_adapter
from tests.workers.driver import Driver, Question, Stage
from tests.workers.properties import thorough
from tests.workers.quantized.test_published import published_llama
from vsched.worker.contract import WorkerSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.mark.parametrize(
    "name", ["gptq in order of activations", *thorough("gptq", "awq", "compressed int8", "fp8")]
)
def test_published_models_with_adapters_answer_as_peft(tmp_path: Path, name: str) -> None:
    quantized, twin = published_llama(tmp_path, name)
    adapters = [tmp_path / each for each in ("one", "two")]
    for seed, adapter in enumerate(adapters):
        make_adapter(twin, adapter, seed)
    settings = WorkerSettings(threads=1, adapters=2, adapter_rank_max=4)
    stage = Stage.load(quantized, attention="auto", dtype="float32", settings=settings)
    for number, adapter in enumerate(adapters, start=1):
        stage.generator.add_adapter(number, str(adapter))
    prompt, requested = prompts()[1], (0, 1, 2, 1)
    wanted = [
        expected_tokens(twin, adapters[each - 1] if each else None, prompt) for each in requested
    ]
    assert len({*map(tuple, wanted)}) == 3, "each changes the answer"
    questions = [Question(prompt, count=OUTPUTS, adapter=each) for each in requested]
    found = tokens_of(Driver(stage, chunk=7, seed=7).run(questions, arrivals=2, preempts=7))
    assert found == wanted
