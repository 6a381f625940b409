"""Requests with different adapters share steps, on one rank and on two: each has the same output as in PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, prompts
from tests.workers.adapters.peft_adapters import expected_tokens, make_adapter, make_whole_adapter
from tests.workers.driver import (
    DEFAULTS,
    Checkpoints,
    Question,
    Stage,
    drawn_image,
    inspect,
    load_generator,
    outputs,
)
from tests.workers.parallel.ranks import Ranks, driver_of
from tests.workers.properties import usually
from tests.workers.quantized.test_published import FORMATS, published
from tests.workers.reference import Reference
from vsched.errors import CheckpointError
from vsched.wire import SizeKv
from vsched.worker.contract import WorkerSettings
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

PLACES: dict[str, Any] = {"adapters": 2, "adapter_rank_max": 4}
ASKED = (0, 1, 2, 1)
"""The adapter of each prompt; 0 for the base model."""

ATTENTION = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
LATENT = {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}
ADAPTERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "llama": [
        {"use_rslora": True, "lora_alpha": 6},
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 24},
        },
    ],
    "qwen3_moe": [ATTENTION, ATTENTION],
    "mixtral": [ATTENTION, ATTENTION],
    "deepseek_v3": [LATENT, LATENT],
}
"""Settings of two adapters by architecture; all linear layers for others. Experts are not linear layers."""
ONE_RANK = ("stablelm", "qwen3_moe", "gptq", "awq", "compressed int8", "fp8")
TWO_RANKS = ("mixtral", "deepseek_v3", "cohere", "phi3", "starcoder2")


def make_all(name: str, folder: Path) -> tuple[Path, Path, list[str]]:
    """Write a checkpoint and two adapters; return its path, that without quantization for PEFT, and theirs."""
    base = twin = folder / "base"
    if name in FORMATS:
        pytest.importorskip("numba")
        base, twin = published(folder, name)
    else:
        base.mkdir()
        make_checkpoint(name, base)
    adapters = [str(folder / each) for each in ("one", "two")]
    for seed, settings in enumerate(ADAPTERS.get(name, ({}, {}))):
        make_adapter(twin, Path(adapters[seed]), seed, **settings)
    return base, twin, adapters


def expected(base: Path, adapters: Sequence[str], prompt: list[int]) -> list[list[int]]:
    """Return PEFT's answers to a prompt: of the base model, and with each adapter."""
    paths = [None, *map(Path, adapters)]
    found = [expected_tokens(base, path, prompt) for path in paths]
    assert len({tuple(tokens) for tokens in found}) == 3, "each changes the answer"
    return found


def load(settings: WorkerSettings, path: str, adapters: Sequence[str], **changes: Any) -> Stage:
    """Load a model that has these adapters, numbered from 1."""
    stage = Stage.load(path, settings=settings, **PLACES, **changes)
    for worker in (stage.generator, *filter(None, [stage.vision])):
        for number, adapter in enumerate(adapters, start=1):
            worker.add_adapter(number, adapter)
    return stage


def answers(
    settings: WorkerSettings, stage: Stage, questions: Sequence[Question], chunk: int = 7
) -> list[list[int]]:
    return outputs(driver_of(settings, stage, chunk).run(questions, arrivals=2, preempts=5))


def answer(
    settings: WorkerSettings,
    path: str,
    adapters: Sequence[str],
    questions: Sequence[Question],
    chunk: int = 7,
) -> tuple[list[list[int]], int]:
    """Run questions; return the tokens, and the bytes that were allocated for the language model's adapters."""
    stage = load(settings, path, adapters)
    return answers(settings, stage, questions, chunk), stage.generator.adapter_bytes


def asking(prompt: list[int], adapters: Sequence[int] = ASKED) -> list[Question]:
    return [Question(prompt, count=OUTPUTS, adapter=each) for each in adapters]


@pytest.mark.parametrize("name", usually("llama", "gptq in order of activations", of=ONE_RANK))
def test_chunks_decodes_and_preemptions_keep_to_the_adapters_of_their_requests(
    name: str, tmp_path: Path
) -> None:
    """Also on quantized layers, compared with PEFT on the dequantized weights."""
    base, twin, adapters = make_all(name, tmp_path)
    prompt = prompts()[1]
    wanted = expected(twin, adapters, prompt)
    attention = "auto" if name in FORMATS else "exact"
    stage = load(DEFAULTS, str(base), adapters, attention=attention)
    assert answers(DEFAULTS, stage, asking(prompt)) == [wanted[each] for each in ASKED]
    # The memory of a removed adapter is used for the next; other adapters and the base model are unaffected.
    stage.generator.remove_adapter(1)
    stage.generator.add_adapter(3, adapters[1])
    found = answers(DEFAULTS, stage, asking(prompt, (3, 0, 2)))
    assert found == [wanted[2], wanted[0], wanted[2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", usually("llama", of=TWO_RANKS))
def test_two_ranks_answer_as_peft(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The first is split by vsched's table, the others by transformers' plan; each rank keeps a part of an adapter."""
    base, _, adapters = make_all(name, tmp_path)
    questions = asking(prompts()[1])
    wanted = expected(base, adapters, prompts()[1])
    first, second = ranks.run(answer, str(base), adapters, questions)
    assert first == second
    assert first[0] == [wanted[each] for each in ASKED]
    assert first[1] < answer(DEFAULTS, str(base), adapters, questions)[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", usually("nano3", of=["nano25"]))
def test_images_and_text_answer_as_peft_on_one_rank_and_on_two(
    ranks: Ranks, checkpoints: Checkpoints, tmp_path: Path, size: str
) -> None:
    """Tower and language model each get their part of one file, with concurrent requests without an adapter."""
    base = checkpoints(size)
    reference = Reference(base)
    stage = Stage.load(base)
    adapters = [str(tmp_path / each) for each in ("one", "two")]
    models = [reference.model]
    models += [make_whole_adapter(base, Path(path), seed) for seed, path in enumerate(adapters)]
    image = drawn_image(1, 90, 60)
    questions = [Question("What is it?", [image], count=8, adapter=each) for each in ASKED]
    prompt, _ = stage.prompt(questions[0])
    wanted = []
    for model in models:
        reference.model = model
        wanted.append(reference.generate(prompt, [image], 8))
    assert len({tuple(each) for each in wanted}) == 3, "each changes the answer"
    tokens = [wanted[each] for each in ASKED]
    assert answer(DEFAULTS, str(base), adapters, questions, 40)[0] == tokens
    found = ranks.run(answer, str(base), adapters, questions, 40)
    assert [each for each, _ in found] == [tokens, tokens]


def test_memory_for_adapters_is_taken_once_and_is_enough_for_the_highest_rank(
    tmp_path: Path,
) -> None:
    base, _, (adapter, _) = make_all("llama", tmp_path)
    stage = Stage.load(base, **PLACES)
    worker = stage.generator
    taken = worker.adapter_bytes
    assert taken > 0
    worker.add_trial_adapter(1)
    plain, trial = answers(DEFAULTS, stage, asking(prompts()[1], (0, 1)))
    assert trial == plain, "it is of zeros"
    worker.remove_adapter(1)
    for number in (2, 3):
        worker.add_adapter(number, adapter)
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
        load_generator(inspect(base), **PLACES).add_adapter(1, str(adapter))


def test_the_profiling_run_proves_steps_with_an_adapter_in_all_rows(tmp_path: Path) -> None:
    """Also if a worker's peak is measured with a few layers only; afterwards all places are free."""
    base, _, adapters = make_all("llama", tmp_path)
    stage = Stage.load(base, **PLACES)
    limits = StepLimits(slots=2, batch_tokens=32, chunk_tokens=16, context_tokens=64, block_size=4)
    sizing = KvBuilder(stage.generator, stage.info, limits)
    sized = sizing.carry_out(SizeKv(256, profile=True, headroom_bytes=0))
    assert sized.outcome == "fits", sized.message
    worker = stage.generator
    assert sized.memory.adapter_bytes == worker.adapter_bytes
    for number, adapter in enumerate(adapters, start=1):
        worker.add_adapter(number, adapter)
