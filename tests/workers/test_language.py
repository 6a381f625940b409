"""The generate worker compared with transformers' own generate, on checkpoints of both families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.driver import BLOCK_SIZE, Driver, Question, Running, Stage, drawn_image
from tests.workers.reference import Reference
from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.types import SamplingParams
from vsched.worker.contract import SequenceState, WorkerSettings
from vsched_workers.families.qwen_image import grid_of
from vsched_workers.plugin import plugin

Stages = Callable[..., Stage]
References = Callable[[str], Reference]


def mixed_questions(sampling: SamplingParams | None = None) -> list[Question]:
    """Return questions with none to three images of different sizes."""
    chosen = sampling or SamplingParams(temperature=0.0)
    return [
        Question("What is in the image?", [drawn_image(1, 90, 60)], sampling=chosen),
        Question("How many objects are there? Answer with a single word.", sampling=chosen),
        Question(
            "Compare the two images.",
            [drawn_image(2, 64, 64), drawn_image(3, 200, 70), drawn_image(4, 31, 150)],
            sampling=chosen,
        ),
        Question("", [drawn_image(5, 140, 140)], sampling=chosen),
    ]


def expected(stage: Stage, reference: Reference, questions: list[Question]) -> list[list[int]]:
    return [
        reference.generate(stage.prompt(question)[0], question.images, question.count)
        for question in questions
    ]


def outputs(running: list[Running]) -> list[list[int]]:
    return [each.output for each in running]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [5, 48, 1000])
@pytest.mark.parametrize("attention", ["exact", "auto"])
def test_step_equals_generate(
    stages: Stages, references: References, size: str, chunk: int, attention: str
) -> None:
    """Chunks that split images, packed and mixed with decode, give the tokens of `generate`."""
    stage = stages(size, attention)
    questions = mixed_questions()
    found = Driver(stage, chunk=chunk, seed=chunk).run(questions, arrivals=2)
    assert outputs(found) == expected(stage, references(size), questions)


@pytest.mark.slow
def test_step_equals_generate_after_preemption(
    stages: Stages, references: References, size: str
) -> None:
    """A request that is recomputed, including its output, continues unchanged."""
    stage = stages(size)
    questions = mixed_questions()
    found = Driver(stage, chunk=40).run(questions, preempts=5)
    assert outputs(found) == expected(stage, references(size), questions)


def test_step_answers_depend_on_the_images(stages: Stages, size: str) -> None:
    """Different images give different outputs: otherwise comparisons with `generate` would prove little."""
    questions = [Question("What is it?", [drawn_image(seed, 90, 60)]) for seed in range(4)]
    found = outputs(Driver(stages(size), chunk=64).run(questions))
    assert len({tuple(each) for each in found}) == len(found)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=7),
        SamplingParams(seed=8, temperature=0.7, top_p=0.9, frequency_penalty=0.5),
        SamplingParams(seed=9, top_k=20, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3),
    ],
    ids=["plain", "nucleus", "top-k"],
)
def test_step_samples_the_same_alone_and_in_a_crowd(
    stages: Stages, size: str, sampling: SamplingParams
) -> None:
    """A seeded request draws the same tokens in any batch, even with preemption."""
    stage = stages(size)
    questions = mixed_questions(sampling)
    together = Driver(stage, chunk=40, seed=3).run(questions, arrivals=1, preempts=6)
    alone = [Driver(stage, chunk=1000).run([question])[0] for question in questions]
    assert outputs(together) == outputs(alone)


def test_step_draws_differ_by_seed(stages: Stages) -> None:
    stage = stages("nano25")
    questions = [
        dataclasses.replace(mixed_questions()[1], sampling=SamplingParams(seed=seed))
        for seed in range(3)
    ]
    found = outputs(Driver(stage, chunk=64).run(questions))
    assert len({tuple(each) for each in found}) == 3


@pytest.mark.slow
def test_step_repetition_penalty_equals_generate(
    stages: Stages, references: References, size: str
) -> None:
    stage = stages(size)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.4)
    questions = mixed_questions(sampling)
    found = Driver(stage, chunk=40).run(questions)
    reference = references(size)
    assert outputs(found) == [
        reference.generate(
            stage.prompt(question)[0], question.images, question.count, repetition_penalty=1.4
        )
        for question in questions
    ]


def test_step_reports_logprobs_for_the_rows_that_ask(stages: Stages) -> None:
    stage = stages("nano25")
    asking = SamplingParams(temperature=0.0, logprobs=3)
    questions = [mixed_questions()[1], dataclasses.replace(mixed_questions()[0], sampling=asking)]
    plain, reporting = Driver(stage, chunk=64).run(questions)
    assert plain.logprobs == []
    assert len(reporting.logprobs) == len(reporting.output)
    for token, entry in zip(reporting.output, reporting.logprobs, strict=True):
        values = [value for _, value in entry.top]
        assert entry.top[0] == (token, entry.logprob)
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) <= 1.0


def test_step_without_a_sampling_chunk_returns_no_tokens(stages: Stages) -> None:
    stage = stages("nano25")
    driver = Driver(stage, chunk=4)
    running = driver.start(0, mixed_questions()[1])
    driver.step([running])
    assert running.output == []
    assert running.computed == 4


@pytest.mark.parametrize("attention", ["exact", "numba"])
def test_step_runs_in_bfloat16(stages: Stages, size: str, attention: str) -> None:
    stage = stages(size, attention, "bfloat16")
    found = Driver(stage, chunk=48).run(mixed_questions())
    assert [len(each.output) for each in found] == [12] * 4


def test_weights_bytes_counts_tied_weights_once(stages: Stages, size: str) -> None:
    stage = stages(size)
    model = stage.generator.module  # type: ignore[attr-defined]
    assert stage.generator.weights_bytes == sum(each.numel() * 4 for each in model.parameters())
    memory = stage.generator.device_memory()
    assert 0 < memory.available() <= memory.total()


def test_first_layers_run_and_come_back(stages: Stages, size: str) -> None:
    """A profiling run uses a few layers; afterwards all are run."""
    stage = stages(size)
    model = stage.generator.module  # type: ignore[attr-defined]
    layers = len(model.layers)
    with stage.generator.first_layers(1):
        assert len(model.layers) == 1
    assert len(model.layers) == layers > 1


def test_prepare_reports_out_of_memory(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are computed outside of a step, and may fail as well."""
    generator = stages("nano25").generator

    def positions(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    language = generator._language  # type: ignore[attr-defined]
    monkeypatch.setattr(generator, "_language", dataclasses.replace(language, positions=positions))
    sequence = SequenceState(
        number=1,
        tokens=np.ones(4, np.int32),
        length=4,
        prompt_length=4,
        items=[],
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )
    with pytest.raises(DeviceOutOfMemory, match="preparing a request"):
        generator.prepare(sequence)


def test_build_kv_refuses_input_that_cannot_fit(checkpoints: Callable[[str], Path]) -> None:
    """Value, limit and remedy; nothing is allocated."""
    info = plugin.inspect(str(checkpoints("nano25")), dtype="auto", item_tokens_max=0)
    worker = plugin.load_generator(info, WorkerSettings(), lambda _label, _fraction: None)
    with pytest.raises(DeviceOutOfMemory, match=r"value \d+, limit \d+. Remedy: "):
        worker.build_kv(blocks=1 << 34, block_size=BLOCK_SIZE)


def test_load_refuses_an_unknown_kernel(checkpoints: Callable[[str], Path]) -> None:
    info = plugin.inspect(str(checkpoints("nano25")), dtype="auto", item_tokens_max=0)
    settings = WorkerSettings(attention="fastest")
    with pytest.raises(ConfigError, match="'fastest'.*auto, exact, numba, triton, varlen"):
        plugin.load_generator(info, settings, lambda _label, _fraction: None)


def test_load_reports_progress_and_holds_no_vision_weights(
    checkpoints: Callable[[str], Path], size: str
) -> None:
    info = plugin.inspect(str(checkpoints(size)), dtype="auto", item_tokens_max=0)
    received: list[tuple[str, float]] = []
    worker = plugin.load_generator(
        info, WorkerSettings(), lambda label, fraction: received.append((label, fraction))
    )
    fractions = [fraction for _, fraction in received]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    names = [name for name, _ in worker.module.named_parameters()]  # type: ignore[attr-defined]
    assert not any("visual" in name or "merger" in name for name in names)


def test_positions_equal_those_of_the_model(
    stages: Stages, references: References, size: str
) -> None:
    """The stand-in computes the same positions as the whole model, for several images of different sizes."""
    stage = stages(size)
    running = Driver(stage, chunk=64).start(0, mixed_questions()[2])
    sequence = running.sequence
    ids = torch.from_numpy(sequence.tokens[: sequence.prompt_length][None].astype(np.int64))
    grids = torch.tensor([grid_of(place.metadata) for place in sequence.items])
    model = references(size).model.model
    kinds = (ids == stage.info.placeholder).int()
    positions, delta = model.get_rope_index(ids, kinds, image_grid_thw=grids)
    assert np.array_equal(sequence.state.positions, positions[:, 0].numpy())
    assert sequence.state.delta == int(delta)
