"""Adapters of whole models, on one rank and on several: each request has the same output as PEFT's own model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, prompts, tokens_of
from tests.workers.adapters.peft_adapters import expected_tokens, make_adapter, make_whole_adapter
from tests.workers.driver import Checkpoints, Question, Stage, drawn_image
from tests.workers.parallel.ranks import Ranks, driver_of
from tests.workers.properties import usually
from tests.workers.reference import Reference
from vsched.worker.contract import WorkerSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

ASKED = (0, 1, 2, 1)
SOME_LAYERS = {
    "mixtral": {"target_modules": ["q_proj", "k_proj", "o_proj"]},
    "deepseek_v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]},
}
"""Exceptions from all linear layers: experts are not linear layers."""
ALONE = WorkerSettings(threads=1)


def load(settings: WorkerSettings, path: str, adapters: Sequence[str]) -> Stage:
    """Load a model that has these adapters, numbered from 1."""
    settings = dataclasses.replace(settings, adapters=len(adapters), adapter_rank_max=4)
    stage = Stage.load(path, settings=settings)
    workers = [stage.generator, *([stage.vision] if stage.vision is not None else [])]
    for worker in workers:
        for number, adapter in enumerate(adapters, start=1):
            worker.add_adapter(number, adapter)
    return stage


def answer(
    settings: WorkerSettings,
    path: str,
    adapters: Sequence[str],
    questions: Sequence[Question],
    chunk: int = 7,
) -> tuple[list[list[int]], int]:
    """Run questions; return the tokens, and the bytes that were allocated for the language model's adapters."""
    stage = load(settings, path, adapters)
    running = driver_of(settings, stage, chunk).run(questions, arrivals=2, preempts=7)
    return tokens_of(running), stage.generator.adapter_bytes


@pytest.mark.parametrize(
    "name", usually("llama", of=(*SOME_LAYERS, "cohere", "phi3", "starcoder2"))
)
def test_two_ranks_answer_as_peft(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The first is split by vsched's table, the others by transformers' plan; each rank keeps a part of an adapter."""
    base = tmp_path / "base"
    base.mkdir()
    make_checkpoint(name, base)
    adapters = [str(tmp_path / each) for each in ("one", "two")]
    for seed, adapter in enumerate(adapters):
        make_adapter(base, Path(adapter), seed, **SOME_LAYERS.get(name, {}))
    prompt = prompts()[1]
    found = [
        expected_tokens(base, Path(adapters[each - 1]) if each else None, prompt) for each in ASKED
    ]
    assert len({tuple(each) for each in found}) == 3, "each changes the answer"
    questions = [Question(prompt, count=OUTPUTS, adapter=each) for each in ASKED]
    first, second = ranks.run(answer, str(base), adapters, questions)
    assert first == second
    assert first[0] == found
    assert first[1] < answer(ALONE, str(base), adapters, questions)[1]


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
    assert answer(ALONE, str(base), adapters, questions, 40)[0] == tokens
    found = ranks.run(answer, str(base), adapters, questions, 40)
    assert [each for each, _ in found] == [tokens, tokens]
