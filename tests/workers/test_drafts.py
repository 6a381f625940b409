"""Speculative decoding with real models: the same tokens and log-probabilities as with one row per step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.parity.architectures import make_checkpoint
from tests.unit.worker.test_drafts import Received, run_drafted
from tests.workers.driver import BLOCK_SIZE, BLOCKS, SLOTS, Stage
from vsched.kernel.decisions import DraftGrant
from vsched.types import SamplingParams
from vsched.worker import generate_rank
from vsched.worker.contract import SequenceState
from vsched.worker.drafts import SlotDraft
from vsched.worker.generate_rank import GenerateRank
from vsched_workers.plugin import plugin

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
ARCHITECTURES = ("llama", "stablelm", "gemma3_text", "mixtral")
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


def check(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["exact", "auto"])
@pytest.mark.parametrize("size", ["nano25", "nano3"])
def test_drafts_give_what_single_rows_give(
    stages: Callable[..., Stage], size: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(stages(size, attention), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_drafts_give_what_single_rows_give_in_any_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(name, tmp_path)
    stage = Stage.load(str(tmp_path), attention="auto", dtype="auto")
    check(stage, monkeypatch)


def test_plugin_verifies_no_drafts_on_a_gpu_or_with_a_state(
    checkpoints: Callable[[str], Path],
) -> None:
    info = plugin.inspect(str(checkpoints("nano25")), dtype="auto", item_tokens_max=0)
    assert plugin.verifies_drafts(info, device="cpu")
    assert not plugin.verifies_drafts(info, device="cuda:0")
    keeps = msgspec.structs.replace(info, state_bytes=64)
    assert not plugin.verifies_drafts(keeps, device="cpu")
