"""Tests that need a GPU: captured steps, kernels on real hardware, and whole models in float32; skipped without one."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.parity.compare import compare
from tests.parity.vision_compare import compare_own, compare_vision
from tests.workers.adapters.random_adapters import add_adapters, random_adapter
from tests.workers.backends.paged import chunk_of, filled_cache
from tests.workers.batching.special_rows import OPTIONS, special
from tests.workers.batching.test_kv_cache import NOTHING, blocks_of, make_cache, pairs, same
from tests.workers.driver import BLOCK_SIZE, BLOCKS, Checkpoints, Driver, Question, Stage, outputs
from tests.workers.quantized.test_published import published
from tests.workers.test_language import mixed_questions
from vsched.types import SamplingParams
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda import fused_tower, graphs
from vsched_workers.backends.cuda.attention import DirectFlashPrefill, FlashPrefill
from vsched_workers.backends.cuda.device import CudaSwapArea, RowCopies
from vsched_workers.backends.cuda.graphs import CudaGraphStream
from vsched_workers.backends.reference.attention import prefill_by_gather
from vsched_workers.batching.paged_attention import PrefillKernel, ScoreRule, prefill_by_rule
from vsched_workers.batching.sampling import draw_in_torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
    pytest.mark.slow,
    # Warnings of torch on a new machine are not a failure of the tested code.
    pytest.mark.filterwarnings("default"),
]
DEVICE = "cuda:0"
load = functools.partial(Stage.load, attention="auto", device=DEVICE)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_own_paths_on_a_gpu_equal_transformers(name: str) -> None:
    """Images, chunks that split them, captured decode steps."""
    assert not compare_own(name, device=DEVICE).unequal


@pytest.mark.parametrize("options", [{}, {"arrivals": 2}, {"preempts": 5}])
def test_captured_steps_equal_eager_ones(checkpoints: Checkpoints, options: dict[str, int]) -> None:
    """The same worker without its graphs; float32, so that padding changes no token."""
    stage = load(checkpoints("tiny25"))
    questions = [dataclasses.replace(each, count=40) for each in mixed_questions()]
    captured = outputs(Driver(stage, chunk=48, seed=1).run(questions, **options))
    graphs = stage.generator._captured  # type: ignore[attr-defined]
    assert graphs is not None, "no kernel that can be captured was right on this device"
    assert graphs._captured, "the capture failed: see the log"
    stage.generator.drop_graphs()
    assert outputs(Driver(stage, chunk=48, seed=1).run(questions, **options)) == captured


@pytest.mark.parametrize("name", ["stablelm", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_generic_models_on_a_gpu_equal_transformers(name: str) -> None:
    """Sliding windows, states, and latent attention; `python -m tests.parity --device cuda:0` compares all of them."""
    assert not compare(name, device=DEVICE).unequal


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_generic_towers_on_a_gpu_equal_transformers(name: str) -> None:
    assert not compare_vision(name, device=DEVICE).unequal


def test_adapters_on_a_gpu_equal_those_on_a_cpu(checkpoints: Checkpoints) -> None:
    """Rows with an adapter, rows with another, and rows without one in the same steps."""
    tiny, places = checkpoints("tiny25"), dict[str, Any](adapters=2, adapter_rank_max=4)
    config = AutoConfig.from_pretrained(tiny).text_config
    prefix = "model.language_model."
    adapters = [random_adapter(config, rank=4, seed=seed, prefix=prefix) for seed in (1, 2)]
    text = mixed_questions()[1]
    questions = [dataclasses.replace(text, adapter=number) for number in (1, 2, 0)]
    questions += mixed_questions()[2:]
    found = []
    for device, attention in (("cpu", "exact"), (DEVICE, "auto")):
        stage = Stage.load(tiny, attention=attention, device=device, **places)
        add_adapters(stage, adapters)
        found.append(outputs(Driver(stage, chunk=48, seed=1).run(questions, arrivals=2)))
    assert found[0] == found[1]


def test_swapped_blocks_come_back() -> None:
    """From pinned memory, over every layer, while the blocks are overwritten."""
    cache = make_cache(torch.bfloat16, device=DEVICE)
    before = [blocks_of(cache, block) for block in range(9)]
    area = CudaSwapArea(cache, 4, device=DEVICE)
    area.copy(pairs((7, 0), (2, 1), (3, 3)), NOTHING)
    for layer in (*cache.keys, *cache.values):
        layer.fill_(torch.nan)
    area.copy(NOTHING, pairs((0, 7), (1, 2), (3, 3)))
    for block, held in enumerate(before):
        assert same(blocks_of(cache, block), held) is (block in {7, 2, 3})


def test_memory_of_graphs_comes_back(checkpoints: Checkpoints) -> None:
    """Captured steps keep neither the cache nor memory of their own."""
    stage = load(checkpoints("tiny25"), dtype="bfloat16")
    generator, memory = stage.generator, stage.generator.device_memory()
    Driver(stage, chunk=48).run(mixed_questions())
    generator.drop_graphs()
    generator.drop_kv()
    memory.release()
    before = memory.allocated(), memory.reserved()
    for _ in range(3):
        generator.build_kv(blocks=BLOCKS, block_size=BLOCK_SIZE)
        Driver(stage, chunk=48).run(mixed_questions())
        generator.drop_graphs()
        generator.drop_kv()
        memory.release()
    assert memory.allocated() <= before[0] + (1 << 20)
    assert memory.reserved() <= before[1] + (32 << 20)


@pytest.mark.parametrize(("first", "rows"), [(0, 700), (1000, 37), (999, 1), (2048, 512)])
@pytest.mark.parametrize("window", [1, 128, 600, 5000])
def test_flash_prefill_equals_torch_also_in_a_window(first: int, rows: int, window: int) -> None:
    _, step = filled_cache(
        torch.bfloat16, 2, 128, contexts=[first + rows], block_size=16, device=DEVICE
    )
    segment, own = chunk_of(step, 0, first, rows, heads=16)
    kernels: list[PrefillKernel] = [prefill_by_gather, FlashPrefill(), DirectFlashPrefill()]
    plain, *found = (one(*own, 1, segment, step, 128**-0.5) for one in kernels)
    for each in found:
        assert (each.float() - plain.float()).abs().max() < 4e-2
    rule = ScoreRule(128**-0.5, window)
    within = FlashPrefill().in_window(own[0], 1, segment, step, rule)
    wanted = prefill_by_rule(own[0], step.cache.layers[1], segment.slots(), rule).transpose(0, 1)
    assert (within.float() - wanted.float()).abs().max() < 4e-2


def test_vision_attention_runs_in_one_call() -> None:
    assert fused_tower.runs(DEVICE, torch.bfloat16)


def test_rows_are_right_when_copies_overlap_with_computing() -> None:
    """A buffer is not overwritten while it is read, even if the device is busy."""
    copies = RowCopies(DEVICE)
    source = np.random.default_rng(0).integers(0, 255, (4096, 4096), dtype=np.uint8)
    heavy = torch.randn(4096, 4096, device=DEVICE)
    found = []
    for turn in range(12):
        heavy = heavy @ heavy
        found.append((turn, copies.fetch(source, np.arange(turn, 4096, 3)).sum(dtype=torch.int64)))
    for turn, total in found:
        assert int(total) == int(source[turn::3].sum(dtype=np.int64))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_draws_on_a_gpu_equal_those_on_a_cpu(options: dict[str, Any]) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((6, 50_000)) * 3).bfloat16()
    rows = [
        special(row, SamplingParams(seed=row, **options), [1, 9], [5, 9, 9]) for row in range(6)
    ]
    backend = choose_backend(WorkerSettings(device=DEVICE), torch.bfloat16)
    found = backend.draw(logits.to(DEVICE), rows).tolist()
    assert found == draw_in_torch(logits, rows).tolist()


@pytest.mark.parametrize(
    ("architecture", "name"), [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"), ("glm4_moe", "awq")]
)
def test_published_experts_answer_as_their_dequantized_twins(
    tmp_path: Path, architecture: str, name: str
) -> None:
    """Experts are dequantized, linear layers are not."""
    folders = published(tmp_path, name, architecture, initializer_range=0.1)
    questions = [Question(range(3, 3 + length), count=8) for length in (5, 40)]
    found, wanted = (outputs(Driver(load(each), chunk=48).run(questions)) for each in folders)
    assert found == wanted


def test_capture_that_fails_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is not the current one; its pool, and memory that several streams have used, are freed."""
    ones, copies = torch.ones(4, device=DEVICE), RowCopies(DEVICE)
    source, rows = np.zeros((64, 1 << 20), np.uint8), np.arange(64)

    def active_bytes() -> int:
        torch.cuda.synchronize(DEVICE)
        torch.ones(1, device=DEVICE)  # the allocator looks for memory that is no longer used
        return int(torch.cuda.memory_stats(DEVICE)["active_bytes.all.current"])

    def failing() -> torch.Tensor:
        torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
        return ones * ones.sum().item()

    stream, current = CudaGraphStream(DEVICE), torch.cuda.current_stream(DEVICE)
    with pytest.raises(RuntimeError, match="synchronizing"):
        stream.capture(failing)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(DEVICE)
    monkeypatch.setattr(graphs, "_without_waits", nullcontext)
    with pytest.raises(RuntimeError):
        stream.capture(failing)
    assert torch.cuda.current_stream(DEVICE) == current
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) < reserved + (64 << 20), "the pool is freed"
    before = active_bytes()
    for _ in range(4):
        copies.fetch(source, rows).sum()
    assert active_bytes() <= before + (1 << 20)
