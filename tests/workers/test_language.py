"""The generate worker: sampled rows, log-probabilities, drafts, and what it refuses."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.parity.architectures import make_checkpoint
from tests.unit.worker.test_drafts import Received, run_drafted
from tests.workers.batching.special_rows import sequence
from tests.workers.driver import (
    BLOCK_SIZE,
    BLOCKS,
    SLOTS,
    Checkpoints,
    Driver,
    Question,
    Stage,
    Stages,
    drawn_image,
    inspect,
    load_generator,
    outputs,
)
from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.kernel.decisions import DraftGrant
from vsched.types import SamplingParams
from vsched.worker import generate_rank
from vsched.worker.contract import SequenceState, WorkerSettings
from vsched.worker.drafts import SlotDraft
from vsched.worker.generate_rank import GenerateRank
from vsched_workers.plugin import plugin


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


PLAIN = SamplingParams(seed=7)
NUCLEUS = SamplingParams(seed=8, temperature=0.7, top_p=0.9, frequency_penalty=0.5)
TOP_K = SamplingParams(seed=9, top_k=20, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3)


@pytest.mark.parametrize(
    ("size", "sampling"),
    [("nano25", PLAIN), ("nano25", NUCLEUS), ("nano3", TOP_K)],
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


def test_prepare_reports_out_of_memory(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are computed outside of a step, and may fail as well."""
    generator = stages("nano25").generator

    def positions(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    language = generator._language  # type: ignore[attr-defined]
    monkeypatch.setattr(generator, "_language", dataclasses.replace(language, positions=positions))
    with pytest.raises(DeviceOutOfMemory, match="preparing a request"):
        generator.prepare(sequence(SamplingParams(), [1] * 4, []))


def test_build_kv_refuses_input_that_cannot_fit(checkpoints: Checkpoints) -> None:
    """Value, limit and remedy; nothing is allocated."""
    worker = load_generator(inspect(checkpoints("nano25")))
    with pytest.raises(DeviceOutOfMemory, match=r"value \d+, limit \d+. Remedy: "):
        worker.build_kv(blocks=1 << 34, block_size=BLOCK_SIZE)


def test_load_refuses_an_unknown_kernel(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="'fastest'.*auto, exact"):
        load_generator(inspect(checkpoints("nano25")), attention="fastest")


def test_load_reports_progress_and_holds_no_vision_weights(
    checkpoints: Checkpoints, size: str
) -> None:
    info = inspect(checkpoints(size))
    received: list[tuple[str, float]] = []
    worker = plugin.load_generator(
        info, WorkerSettings(), lambda label, fraction: received.append((label, fraction))
    )
    fractions = [fraction for _, fraction in received]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    names = [name for name, _ in worker.module.named_parameters()]  # type: ignore[attr-defined]
    assert not any("visual" in name or "merger" in name for name in names)


CONTEXT = 96
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], list(range(10, 40)), [9, 9, 9, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=1.1,
        top_p=0.9,
        seed=5,
        max_tokens=40,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_tokens=6,
        bad_words=((11, 12), (13,)),
        logprobs=0,
    ),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.01, seed=6, max_tokens=33),
]
DECODERS = [(name, "auto") for name in ("llama", "stablelm", "gemma3_text", "mixtral")]
"""A decoder-only model, one on the generic path, one with sliding windows, one with experts."""


class Oracle:
    """Drafts the actual next tokens, with random errors, so that drafts are rejected at every position."""

    def __init__(self, answers: list[Received]) -> None:
        self._answers = answers
        self._rng = random.Random(7)

    def draft(
        self, sequence: SequenceState, length: int, grant: DraftGrant, room: int
    ) -> SlotDraft | None:
        answer = self._answers[sequence.number - 1].tokens
        done = length - sequence.prompt_length
        coming = answer[done : done + min(grant.tokens, room)]
        tokens = [one if self._rng.random() < 0.8 else one ^ 1 for one in coming]
        return SlotDraft(tokens) if tokens else None


def rank_of(stage: Stage) -> GenerateRank:
    embeddings = np.zeros((1, 1, 1), np.uint8)
    return GenerateRank(
        stage.generator, embeddings, slots=SLOTS, context_tokens=CONTEXT, block_size=BLOCK_SIZE
    )


def blocks_of(slot: int) -> list[int]:
    count = CONTEXT // BLOCK_SIZE
    shuffled = random.Random(slot).sample(range(BLOCKS), BLOCKS)
    taken = sorted(shuffled, key=lambda block: (block % 3 != slot, shuffled.index(block)))
    return taken[:count]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), [("nano25", "exact"), ("nano3", "auto"), *DECODERS])
def test_drafts_give_what_single_rows_give(
    stages: Stages, tmp_path: Path, name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("nano"):
        stage = stages(name, attention)
    else:
        make_checkpoint(name, tmp_path)
        stage = Stage.load(tmp_path, attention=attention)
    plain, _ = run_drafted(rank_of(stage), PROMPTS, PARAMS, None, blocks=blocks_of)
    monkeypatch.setattr(generate_rank, "draft", Oracle(plain).draft)
    rng = random.Random(1)
    found, drafted = run_drafted(rank_of(stage), PROMPTS, PARAMS, rng, blocks=blocks_of)
    assert [(one.tokens, one.reason) for one in found] == [
        (one.tokens, one.reason) for one in plain
    ]
    for one, other in zip(found, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    right = sum(len(one.tokens) for one in drafted)
    assert right > 20
    assert sum(one.drafts > len(one.tokens) for one in drafted) > 5, "drafts that prove wrong"


def test_plugin_verifies_no_drafts_on_a_gpu_or_with_a_state(checkpoints: Checkpoints) -> None:
    info = inspect(checkpoints("nano25"))
    assert plugin.verifies_drafts(info, device="cpu")
    assert not plugin.verifies_drafts(info, device="cuda:0")
    keeps = msgspec.structs.replace(info, state_bytes=64)
    assert not plugin.verifies_drafts(keeps, device="cpu")
