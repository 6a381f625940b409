"""Several ranks, in separate processes, compared with one: the same tokens and rows, each with its share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.architectures import make_checkpoint as make_text
from tests.parity.compare import OUTPUTS, generated, prompts
from tests.workers.driver import Driver, Question, Stage, drawn_image
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks
from vsched.types import SamplingParams
from vsched_workers.checkpoint.random_init import SIZES, make_checkpoint

pytestmark = pytest.mark.slow

QUESTIONS = [
    Question("What is in the image?", [drawn_image(1, 90, 60)]),
    Question("How many objects are there?", sampling=SamplingParams(seed=7, temperature=0.8)),
    Question("Compare.", [drawn_image(2, 64, 64), drawn_image(3, 200, 70)], count=8),
]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a checkpoint like one of the named sizes, with four KV heads and four vision heads.

    Its vocabulary is not divisible by four, so every rank has the whole head. It has biases.
    """
    root = tmp_path_factory.mktemp("four-heads")

    def make(size: str) -> Path:
        known = SIZES[size]
        text = known.text | {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
        if size == "nano25":
            text |= {"hidden_size": 128}
        vision = known.vision | {"num_heads": 4, "out_hidden_size": text["hidden_size"]}
        if size == "nano25":
            vision |= {"hidden_size": 64}
        patch = pytest.MonkeyPatch()
        with patch.context() as patched:
            patched.setitem(
                SIZES, "four", dataclasses.replace(known, vocab=390, text=text, vision=vision)
            )
            if not (root / size).exists():
                make_checkpoint(str(root / size), "four", dtype="float32")
                draw_biases(root / size / "model.safetensors")
        return root / size

    return make


def draw_biases(path: Path) -> None:
    """Make the biases random: errors in slicing and summing zeros would not be seen."""
    weights = load_file(path)
    torch.manual_seed(0)
    for name in [name for name in weights if name.endswith(".bias")]:
        weights[name] = torch.randn_like(weights[name]) / 4
    save_file(weights, path)


def one_rank(path: Path) -> tuple[list[list[int]], Any, Stage]:
    stage = Stage.load(str(path), attention="exact", dtype="float32")
    driver = Driver(stage, chunk=40, seed=40)
    running = driver.run(QUESTIONS, arrivals=2, preempts=7)
    return [each.output for each in running], driver.embeddings, stage


def check_equal(ranks: Ranks, path: Path, size: int) -> None:
    tokens, embeddings, stage = one_rank(path)
    found = ranks.run(on_rank.answer, str(path), QUESTIONS, size=size)
    for rank_tokens, rank_embeddings, _ in found:
        assert rank_tokens == tokens
        np.testing.assert_allclose(
            rank_embeddings.view(np.float32), embeddings.view(np.float32), rtol=1e-3, atol=1e-4
        )
    assert stage.info.embedding_levels == 1 or "3" in stage.info.family


def test_two_ranks_equal_one(ranks: Ranks, checkpoints: Callable[[str], Path], size: str) -> None:
    """Chunked prefill and decode in one step, images, deepstack, preemption, a seeded request: the same tokens."""
    check_equal(ranks, checkpoints(size), 2)


def test_four_ranks_equal_one(ranks: Ranks, four_heads: Callable[[str], Path], size: str) -> None:
    check_equal(ranks, four_heads(size), 4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_ranks_of_a_decoder_only_model_equal_one(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """A text model with a decoder description: chunks, preemption, biases, tied and untied heads."""
    tied = name == "qwen3"
    make_text(name, tmp_path, attention_bias=True, tie_word_embeddings=tied, sliding_window=None)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = ranks.run(on_rank.answer_text, str(tmp_path), questions)
    assert found[0] == found[1] == generated(tmp_path, prompts())


@pytest.mark.parametrize("fails", ["", "early", "at the end"])
def test_ranks_pause_in_a_batch(
    ranks: Ranks, checkpoints: Callable[[str], Path], size: str, fails: str
) -> None:
    """All ranks pause at the same layer, with steps in between; a failure of one fails all."""
    found = ranks.run(on_rank.encode_in_parts, str(checkpoints(size)), QUESTIONS[0], fails)
    errors = ["ValueError", "PeerFailed"] if fails else ["", ""]
    assert [error.partition(":")[0] for error, _ in found] == errors
    assert all(same for _, same in found)


def test_ranks_agree_in_bfloat16(
    ranks: Ranks, checkpoints: Callable[[str], Path], size: str
) -> None:
    """Packed layers are split like the others; every rank draws the same tokens."""
    first, second = ranks.run(on_rank.answer, str(checkpoints(size)), QUESTIONS, "bfloat16")
    assert first[0] == second[0]
    assert [len(each) for each in first[0]] == [12, 12, 8]
