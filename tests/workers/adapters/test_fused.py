"""Adapters on fused layers in bfloat16: the same logits as with transformers' modules, up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import prompts
from tests.workers import driver
from tests.workers.adapters.random_adapters import add_adapters, random_adapter
from tests.workers.backends.cpu.twins import run_both
from tests.workers.driver import Driver, Question, Stage, outputs, reported
from tests.workers.properties import thorough
from vsched.types import SamplingParams
from vsched_workers.adapters.places import CallRows, Part, TorchSums, own_memory
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.language_layers import FusedLanguage
from vsched_workers.backends.cpu.low_rank import KernelSums

ADAPTERS: Sequence[Mapping[str, Any]] = (
    {"rank": 6, "seed": 1},
    {"rank": 3, "seed": 2, "only": ("q_proj", "v_proj", "o_proj", "qkv_proj")},
    {"rank": 8, "seed": 3, "only": ("down_proj",)},
)
ASKED = (1, 0, 2, 3, 1, 2)


def load(path: Path, kind: str, **changes: Any) -> Stage:
    """Load a model with these adapters, and kernels or transformers' modules."""
    places = {"adapters": 3, "adapter_rank_max": 8, **changes}
    stage = Stage.load(path, attention=kind, dtype="bfloat16", **places)
    config = AutoConfig.from_pretrained(path)
    add_adapters(stage, [random_adapter(config, **settings) for settings in ADAPTERS])
    return stage


def questions(requested: Sequence[Sequence[int]]) -> list[Question]:
    return [
        Question(prompt, count=9, adapter=adapter)
        for prompt, adapter in zip(requested, ASKED, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"), [("llama", 11), ("phi3", 1000), *thorough(("qwen3", 11), ("gemma2", 1000))]
)
def test_fused_layers_with_adapters_equal_the_modules(
    name: str, chunk: int, tmp_path: Path
) -> None:
    """Mixed steps, preempted, of several adapters and none; long steps are several blocks of rows."""
    make_checkpoint(name, tmp_path, initializer_range=0.1)
    exact, fused = (load(tmp_path, kind) for kind in ("exact", "auto"))
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    longer = prompts()[2] * (6 if chunk == 1000 else 1)
    asked = questions([longer, longer, *prompts()])
    run_both(exact, fused, asked, chunk=chunk, preempts=7).check()


def test_adapters_change_fused_answers_and_leave_no_trace(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, initializer_range=0.1)
    stage = load(tmp_path, "auto")

    def answers(requested: Sequence[int]) -> list[list[int]]:
        same = [Question(prompts()[0], count=12, adapter=each) for each in requested]
        return outputs(Driver(stage, chunk=40).run(same))

    plain = Stage.load(tmp_path, attention="auto", dtype="bfloat16")
    (alone,) = Driver(plain, chunk=40).run([Question(prompts()[0])])
    found = answers([0, 1, 2, 3])
    assert found[0] == alone.output
    assert len({tuple(each) for each in found}) == 4, "each changes the answer"
    for number in (1, 2, 3):
        stage.generator.remove_adapter(number)
    assert answers([0]) == found[:1]


@pytest.mark.skipif(not has_bf16_dot(), reason="needs avx512_bf16")
def test_deterministic_answers_have_the_same_bits_alone_and_next_to_other_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "BLOCK_SIZE", 16)
    make_checkpoint("llama", tmp_path, initializer_range=0.1)
    stage = load(tmp_path, "auto", deterministic=True)
    sampling = SamplingParams(temperature=0.0, logprobs=4)
    requested = [
        dataclasses.replace(each, sampling=sampling)
        for each in questions([prompts()[1], prompts()[2], *prompts()])
    ]

    together = reported(Driver(stage, chunk=9).run(requested, arrivals=1))
    alone = [reported(Driver(stage, chunk=100).run([each]))[0] for each in requested]
    assert alone == together


def sums_of(kind: Any, seed: int, inputs: int, sizes: Sequence[int]) -> Any:
    """Return an object with the parts of three adapters; the second one has fewer parts."""
    chance = torch.Generator().manual_seed(seed)
    for owner, rank in enumerate((4, 7, 16)):
        parts, first = [], 0
        for size in sizes:
            down = torch.randn(rank, inputs, generator=chance) / inputs**0.5
            up = torch.randn(size, rank, generator=chance)
            if owner != 1 or not first:
                parts.append(Part(first, down, up, 0.5 + owner))
            first += size
        kind.put_parts(owner, kind.place_parts(parts, own_memory))
    return kind


@pytest.mark.parametrize(
    ("threads", "inputs", "sizes"), [(1, 40, (33, 7, 8)), (1, 257, (64,)), (2, 257, (33, 7, 8))]
)
def test_the_kernel_adds_like_torch_and_each_row_has_its_bits_alone(
    threads: int, inputs: int, sizes: Sequence[int]
) -> None:
    kernel = sums_of(KernelSums(threads), 0, inputs, sizes)
    plain = sums_of(TorchSums(torch.float32, torch.device("cpu")), 0, inputs, sizes)
    owners = np.array([2, -1, 0, 1, 1, 0, 2, -1, 1, 0])
    rows = torch.randn(10, inputs, generator=torch.Generator().manual_seed(4)).bfloat16()
    base = torch.randn(10, sum(sizes), generator=torch.Generator().manual_seed(5)).bfloat16()
    found, wanted = base.clone(), base.float()
    kernel.add_products(rows, found, CallRows(owners, 10))
    plain.add_products(rows.float(), wanted, CallRows(owners, 10))
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
    assert (found == wanted.bfloat16()).float().mean() > 0.98, "one rounding, of the sum"
    assert torch.equal(found[owners < 0], base[owners < 0])
    for row, owner in enumerate(owners):
        alone = base[row : row + 1].clone()
        if owner >= 0:
            kernel.add_products(rows[row : row + 1], alone, CallRows(owners[row : row + 1], 1))
        assert torch.equal(alone[0], found[row])
