"""int8 KV caches: kernels against attention over the dequantized cache, and models against their unquantized cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests.parity.architectures import make_checkpoint
from tests.workers.backends.cpu.kernels.operands import bits
from tests.workers.backends.cpu.twins import run_both
from tests.workers.backends.paged import chunk_of, dequantized, filled_cache
from tests.workers.driver import Checkpoints, Driver, Question, Stage, outputs
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks
from tests.workers.properties import thorough, usually
from tests.workers.test_language import mixed_questions
from vsched_workers.backends.cpu import attention
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of, rope_prefill
from vsched_workers.backends.reference.attention import prefill_by_gather
from vsched_workers.batching.kv_cache import from_int8, to_int8
from vsched_workers.batching.paged_attention import ScoreRule

CONTEXTS = [1, 4, 5, 37]


@pytest.mark.parametrize(
    "attend", [prefill_by_gather, attention.prefill, attention.prefill_by_rule]
)
@pytest.mark.parametrize(("first", "rows"), [(0, 9), (31, 6), (36, 1)])
def test_prefill_over_int8_equals_that_over_the_dequantised_cache(
    attend: Any, first: int, rows: int
) -> None:
    """A chunk's own keys and values are passed as read back from the cache."""
    heads, kv_heads, head_dim = 4, 2, 16
    _, step = filled_cache(torch.int8, kv_heads, head_dim, contexts=CONTEXTS, block_size=4)
    plain = dequantized(step, torch.bfloat16)
    segment, (query, key, value) = chunk_of(plain, 3, first, rows, heads=heads)

    def attended(step: Any) -> torch.Tensor:
        if attend is not attention.prefill_by_rule:
            found: torch.Tensor = attend(query, key, value, 1, segment, step, 0.3)
        else:
            found = query.new_empty(rows, heads, head_dim)
            attend(query, 1, segment, step, ScoreRule(0.3, window=20), found)
        return found

    assert torch.equal(attended(step), attended(plain))


@pytest.mark.parametrize("dim", [16, 64, 80])
def test_kernels_keep_heads_as_torch_does(dim: int) -> None:
    """Same bits for prefill and decode rows; the prefill buffer has the cached values, rounded to bfloat16."""
    rows, heads, kv_heads = 37, 4, 2
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim) * 10.0 ** torch.randint(-3, 4, (rows, 1, 1))
    qkv[5] = 0.0
    qkv = qkv.bfloat16()
    one, zero = (torch.full((rows, dim // 2), each).bfloat16() for each in (1.0, 0.0))
    slots = torch.randperm(48)[:rows].numpy()
    turned = RopeRows(bits(one), bits(zero), slots)
    record = heads_of(heads, 0, 0, 0.0, 1.0)
    kept = [to_int8(qkv[:, heads + first : heads + first + kv_heads]) for first in (0, kv_heads)]
    room = torch.zeros(heads + 2 * kv_heads, rows, dim, dtype=torch.bfloat16)
    caches = [np.zeros((48, kv_heads, dim + 2), dtype=np.int8) for _ in range(4)]
    rope_prefill(0, qkv.data_ptr(), room.data_ptr(), rows, record, turned, *caches[:2])
    for cached, wanted in zip(caches[:2], kept, strict=True):
        assert (cached[slots] == wanted.numpy()).all()
    assert torch.equal(room[:heads], qkv[:, :heads].transpose(0, 1))
    of_keys, of_values = room[heads:].split(kv_heads)
    for found, wanted in zip((of_keys, of_values), kept, strict=True):
        assert torch.equal(found.transpose(0, 1), from_int8(wanted, torch.bfloat16))
    out = torch.zeros(rows, heads, dim, dtype=torch.bfloat16)
    tables = (slots // 4).astype(np.int32)[:, None]
    contexts = (slots % 4 + 1).astype(np.int32)
    arguments = (record, turned, *caches[2:], tables, contexts, 4, 1)
    decode(0, qkv.data_ptr(), out.data_ptr(), *arguments)
    for cached, wanted in zip(caches[2:], kept, strict=True):
        assert (cached[slots] == wanted.numpy()).all()


def load(path: Path, dtype: str = "float32", attention: str = "auto", **given: Any) -> Stage:
    return Stage.load(path, attention=attention, dtype=dtype, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "attention"),
    [("nano25", "auto"), *thorough(("nano3", "auto"), ("nano25", "exact"), ("nano3", "exact"))],
)
def test_int8_answers_do_not_depend_on_how_prompts_are_cut(
    checkpoints: Checkpoints, size: str, attention: str
) -> None:
    """Chunks, large batches and preemptions: in float32 the context is independent of the writer and of the time."""
    stage = load(checkpoints(size), attention=attention, kv_dtype="int8")
    wanted = outputs(Driver(stage, chunk=1000).run(mixed_questions()))
    for chunk, more in ((5, {"arrivals": 2}), (48, {"preempts": 5})):
        assert (
            outputs(Driver(stage, chunk=chunk, seed=chunk).run(mixed_questions(), **more)) == wanted
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *(("nano25", "bfloat16"), ("nano3", "bfloat16")),
        *thorough(("nano25", "float32"), ("nano3", "float32")),
    ],
)
def test_int8_kernels_and_modules_agree(checkpoints: Checkpoints, size: str, dtype: str) -> None:
    exact, fused = (
        load(checkpoints(size), dtype, kind, kv_dtype="int8") for kind in ("exact", "auto")
    )
    run_both(exact, fused, mixed_questions(), arrivals=2, preempts=7).check()


FEW = ("qwen2_5_vl", "gemma3_text", "deepseek_v3")
FURTHER = ("qwen3_vl", "qwen3_next", "llama", "gpt2", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", usually(*FEW, of=FURTHER))
def test_int8_moves_logits_a_little(tmp_path: Path, name: str) -> None:
    """Equal logits would mean that the cache is not int8.

    Generic path too: values of other sizes than keys, sliding windows, and recurrent states, left unquantized.
    """
    make_checkpoint(name, tmp_path)
    pair = plain, small = [load(tmp_path, kv_dtype=kind) for kind in ("auto", "int8")]
    texts = [Question(range(3, 3 + length), count=4) for length in (5, 21)]
    questions = mixed_questions() if plain.info.takes_images else texts
    within = 0.03 if plain.info.takes_images else 0.05
    assert 1e-5 < run_both(plain, small, questions).apart < within
    caches: list[Any] = [each.generator._cache.keys for each in pair]  # type: ignore[attr-defined]
    large, few = (sum(layer.nbytes for layer in keys) for keys in caches)
    assert 2 * few < large


@pytest.mark.slow
@pytest.mark.parametrize("size", ["nano25", *thorough("nano3")])
def test_ranks_keep_int8_heads_as_one_rank_does(
    ranks: Ranks, checkpoints: Checkpoints, size: str
) -> None:
    """A scale belongs to a head, and a head to a rank."""
    stage = load(checkpoints(size), kv_dtype="int8")
    wanted = outputs(Driver(stage, chunk=40, seed=40).run(mixed_questions()))
    path = str(checkpoints(size))
    found = ranks.run(on_rank.answer, path, mixed_questions(), "float32", "int8")
    assert [tokens for tokens, _, _ in found] == [wanted, wanted]
