"""Requests with different adapters share the steps of a generate worker, with the same output as in PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, prompts, tokens_of
from tests.workers.adapters.peft_adapters import expected_tokens, make_adapter
from tests.workers.driver import Driver, Question, Stage, inspect, load_generator
from tests.workers.properties import usually
from tests.workers.quantized.test_published import published_llama
from vsched.errors import CheckpointError
from vsched.wire import SizeKv
from vsched.worker.contract import WorkerSettings
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SETTINGS = WorkerSettings(threads=1, adapters=2, adapter_rank_max=4)
ASKED = (0, 1, 2, 1)
"""The adapter of each prompt; 0 for the base model."""

ATTENTION = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
ADAPTERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "llama": [
        {"use_rslora": True, "lora_alpha": 6},
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 24},
        },
    ],
    "stablelm": [{}, {}],
    "qwen3_moe": [ATTENTION, ATTENTION],  # experts are not linear layers
}
"""Settings of two adapters by architecture."""
QUANTIZED = ("gptq", "awq", "compressed int8", "fp8")


def make_all(name: str, folder: Path) -> tuple[Path, Path]:
    """Write adapters by number, and a checkpoint; return its path, and that of one for PEFT, without quantization."""
    base = twin = folder / "base"
    if name in ADAPTERS:
        base.mkdir()
        make_checkpoint(name, base)
    else:
        pytest.importorskip("numba")
        base, twin = published_llama(folder, name)
    for number, settings in enumerate(ADAPTERS.get(name, ({}, {})), start=1):
        make_adapter(twin, folder / str(number), number, **settings)
    return base, twin


@pytest.mark.parametrize(
    "name", usually("llama", "gptq in order of activations", of=(*ADAPTERS, *QUANTIZED))
)
def test_chunks_decodes_and_preemptions_keep_to_the_adapters_of_their_requests(
    name: str, tmp_path: Path
) -> None:
    """Also on quantized layers, compared with PEFT on the dequantized weights."""
    base, twin = make_all(name, tmp_path)
    prompt = prompts()[1]
    found = {
        each: expected_tokens(twin, tmp_path / str(each) if each else None, prompt)
        for each in ASKED
    }
    assert len({tuple(tokens) for tokens in found.values()}) == 3, "each changes the answer"
    attention = "exact" if name in ADAPTERS else "auto"
    stage = Stage.load(base, attention=attention, settings=SETTINGS)
    worker = stage.generator
    for number in (1, 2):
        worker.add_adapter(number, str(tmp_path / str(number)))

    def answers(requested: tuple[int, ...]) -> list[list[int]]:
        questions = [Question(prompt, count=OUTPUTS, adapter=each) for each in requested]
        return tokens_of(Driver(stage, chunk=7, seed=1).run(questions, arrivals=2, preempts=5))

    assert answers(ASKED) == [found[each] for each in ASKED]
    # The memory of a removed adapter is used for the next; other adapters and the base model are unaffected.
    worker.remove_adapter(1)
    worker.add_adapter(3, str(tmp_path / "2"))
    assert answers((3, 0, 2)) == [found[2], found[0], found[2]]


def test_memory_for_adapters_is_taken_once_and_is_enough_for_the_highest_rank(
    tmp_path: Path,
) -> None:
    make_all("llama", tmp_path)
    stage = Stage.load(tmp_path / "base", settings=SETTINGS)
    worker = stage.generator
    taken = worker.adapter_bytes
    assert taken > 0
    prompt = [Question(prompts()[1], count=2, adapter=1)]
    worker.add_trial_adapter(1)
    alone = [Question(prompts()[1], count=2)]
    trial = tokens_of(Driver(stage, chunk=7).run(prompt))
    assert trial == tokens_of(Driver(stage, chunk=7).run(alone)), "it is of zeros"
    worker.remove_adapter(1)
    for number in (2, 3):
        worker.add_adapter(number, str(tmp_path / "1"))
    assert worker.adapter_bytes == taken


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "qwen3_moe",
            {**ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj"]},
            "target_parameters is .*not served. Remedy",
        ),
        # A Mamba mixer is called with the rows of one sequence at a time.
        ("bamba", {}, r"mamba\.\w+, a Linear here; only linear.*Remedy"),
    ],
)
def test_layers_that_see_other_rows_than_a_step_are_refused_by_name(
    tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "1"
    make_checkpoint(name, base)
    make_adapter(base, adapter, 1, **settings)
    with pytest.raises(CheckpointError, match=message):
        load_generator(inspect(base), SETTINGS).add_adapter(1, str(adapter))


def test_the_profiling_run_proves_steps_with_an_adapter_in_all_rows(tmp_path: Path) -> None:
    """Also if a worker's peak is measured with a few layers only; afterwards all places are free."""
    make_all("llama", tmp_path)
    stage = Stage.load(tmp_path / "base", settings=SETTINGS)
    limits = StepLimits(slots=2, batch_tokens=32, chunk_tokens=16, context_tokens=64, block_size=4)
    sizing = KvBuilder(stage.generator, stage.info, limits)
    sized = sizing.carry_out(SizeKv(256, profile=True, headroom_bytes=0))
    assert sized.outcome == "fits", sized.message
    worker = stage.generator
    assert sized.memory.adapter_bytes == worker.adapter_bytes
    for number in (1, 2):
        worker.add_adapter(number, str(tmp_path / str(number)))
