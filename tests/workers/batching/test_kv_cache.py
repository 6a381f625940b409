"""The int8 KV cache, swap space in host memory, and attention by rules (windows, soft-capping, sinks)."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.bench.swap.__main__ import main
from tests.workers.backends.paged import filled_cache, row_written_out, segment_of
from tests.workers.driver import Checkpoints
from vsched.errors import DeviceOutOfMemory
from vsched.worker.memory import status_bytes
from vsched_workers.batching import kv_cache, paged_attention
from vsched_workers.batching.kv_cache import (
    LEVELS,
    KvCache,
    KvShape,
    LayerKv,
    Pairs,
    SwapArea,
    from_int8,
    shared_pages,
    to_int8,
)
from vsched_workers.batching.paged_attention import (
    PagedStep,
    ScoreRule,
    attend_by_rule,
    context_slots,
    decode_by_rule,
    prefill_by_rule,
)
from vsched_workers.memory.sparse_runs import sparsely


def heads(*shape: int) -> torch.Tensor:
    """Return random heads of different magnitudes."""
    chance = torch.Generator().manual_seed(sum(shape))
    sizes = 10.0 ** torch.randint(-6, 5, (*shape[:-1], 1), generator=chance)
    return torch.randn(shape, generator=chance) * sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_head_is_half_a_level_off_at_most(dtype: torch.dtype) -> None:
    """Plus the effect of rounding the scale to bfloat16 on the largest value, and of rounding the result."""
    given = heads(40, 3, 64).to(dtype)
    kept = to_int8(given)
    assert kept.shape == (40, 3, 66)
    found = from_int8(kept, dtype)
    assert found.dtype == dtype
    largest = given.float().abs().amax(-1, keepdim=True)
    share = 1.01 / 2 / LEVELS + (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((found.float() - given.float()).abs() <= largest * share).all()
    assert (found != given).any()


def test_int8_heads_of_next_to_nothing_are_zeros_and_those_of_no_numbers_stay_so() -> None:
    """NaNs and infinities of a model are not hidden."""
    given = torch.ones(4, 8)
    given[0], given[1], given[2, 3], given[3, 5] = 0.0, 1e-38, torch.nan, torch.inf
    found = from_int8(to_int8(given), torch.float32)
    assert not found[:2].any()
    assert found[2:].isnan().any(-1).all()


@pytest.mark.parametrize("kept", [torch.float32, torch.int8])
def test_cache_keeps_the_values_that_it_reports(kept: torch.dtype) -> None:
    """Keys and values of different sizes, on arbitrary slots; all else stays zero."""
    shapes = [KvShape(2, 8, 8), KvShape(3, 16, 4)]
    make = functools.partial(KvCache, shapes, blocks=5, block_size=4, allocate=torch.zeros)
    cache = make(dtype=kept)
    slots = torch.tensor([7, 0, 19, 3])
    key, value = heads(3, 4, 16), heads(3, 4, 4)
    found = cache.layers[1].put(slots, key, value)
    read = cache.layers[1].read(slots, torch.float32)
    for one, other, given in zip(found, read, (key, value), strict=True):
        assert one.shape == given.shape
        assert torch.equal(one, other.transpose(0, 1))
        assert torch.equal(one, given) == (kept == torch.float32)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert not any(each[others].any() for each in (*cache.keys, *cache.values))
    assert not cache.keys[0].any()
    several = cache.layers[1].read(slots.view(2, 2), torch.float32)
    assert torch.equal(several[0].flatten(0, 1), read[0])


SHAPES = (KvShape(2, 4, 4), KvShape(1, 8, 2))
"""Two layers that keep keys and values of different sizes."""


def make_cache(dtype: torch.dtype = torch.float32, *, device: str = "cpu") -> KvCache:
    """Return a cache of nine blocks with distinct values."""
    allocate = functools.partial(torch.zeros, device=device)
    cache = KvCache(SHAPES, blocks=9, block_size=4, dtype=dtype, allocate=allocate)
    for index, part in enumerate((*cache.keys, *cache.values)):
        part.copy_(torch.arange(part.numel()).view(part.shape) % 251 + index)
    return cache


def pairs(*found: tuple[int, int]) -> Pairs:
    return np.array(found, np.int32).reshape(-1, 2)


NOTHING = pairs()


def blocks_of(cache: KvCache, block: int) -> list[torch.Tensor]:
    rows = slice(block * cache.block_size, (block + 1) * cache.block_size)
    return [part[rows].clone() for part in (*cache.keys, *cache.values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*both) for both in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swap_area_restores_swapped_blocks(dtype: torch.dtype) -> None:
    """Every layer, keys and values, for any order of blocks and places; all other blocks are unchanged."""
    cache = make_cache(dtype)
    before = [blocks_of(cache, block) for block in range(9)]
    area = SwapArea(cache, 5)
    area.copy(pairs((3, 4), (0, 2), (8, 3)), NOTHING)
    for part in (*cache.keys, *cache.values):
        part[12:16] = part[0:4] = part[32:36] = 0
    area.copy(NOTHING, pairs((4, 5), (3, 0), (2, 8)))
    assert same(blocks_of(cache, 5), before[3])
    assert same(blocks_of(cache, 0), before[8])
    assert same(blocks_of(cache, 8), before[0])
    assert all(same(blocks_of(cache, block), before[block]) for block in (1, 2, 4, 6, 7))


def test_swap_area_copies_out_before_it_copies_back() -> None:
    """A block that is swapped out and reused in one step has the restored contents."""
    cache = make_cache()
    before = [blocks_of(cache, block) for block in range(9)]
    area = SwapArea(cache, 2)
    area.copy(pairs((6, 0)), NOTHING)
    area.copy(pairs((1, 1)), pairs((0, 1)))
    assert same(blocks_of(cache, 1), before[6])
    area.copy(NOTHING, pairs((1, 2)))
    assert same(blocks_of(cache, 2), before[1])


def test_swap_area_is_no_memory_of_the_process() -> None:
    """It is a shared mapping: the limit on the process does not count it, and the host allocates pages on write."""
    before = status_bytes("VmData"), status_bytes("RssShmem")
    pages = shared_pages(256 << 20)
    assert status_bytes("VmData") - before[0] < 64 << 20
    assert status_bytes("RssShmem") - before[1] < 64 << 20
    pages[:: mmap.PAGESIZE] = 1
    assert status_bytes("RssShmem") - before[1] >= 256 << 20


def test_swap_area_is_refused_if_the_host_has_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "host_available", lambda: 4096)
    with pytest.raises(DeviceOutOfMemory, match=r"generate\.swap_memory.*4096 bytes.*lower"):
        SwapArea(make_cache(), 1000)


@pytest.mark.slow
def test_swap_bench_has_a_row_for_each_length(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoints("nano25")), "--dtype", "float32", "--rounds", "1"]
    rows = main([*words, "--lengths", "20", "48", "--chunk", "16"])
    assert [row.tokens for row in rows] == [20, 48]
    assert [row.mib for row in rows] == [rows[0].mib, 1.5 * rows[0].mib]
    assert all(min(row) > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4


HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK = 4, 2, 8, 6, 4
CONTEXTS = (1, 9, 30, 17)
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
RULES = [
    ScoreRule(0.5, window, softcap, sinks)
    for window, softcap, sinks in (
        *((None, None, None), (None, 2.0, None), (None, None, SINKS), (1, 2.0, SINKS)),
        *((7, None, None), (7, 2.0, SINKS), (100, None, SINKS)),
    )
]


@pytest.fixture(params=[paged_attention.PART_BYTES, 1], ids=["whole", "row by row"])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "PART_BYTES", request.param)


@pytest.fixture
def step() -> PagedStep:
    """Return a step over a cache with random contents, and values that are shorter than keys."""
    _, made = filled_cache(
        torch.float32, KV_HEADS, KEY_DIM, contexts=CONTEXTS, block_size=BLOCK, value_dim=VALUE_DIM
    )
    return made


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decode_is_the_rule_written_out(step: PagedStep, rule: ScoreRule) -> None:
    cache = step.cache
    query = torch.randn(len(CONTEXTS), HEADS, KEY_DIM, generator=torch.Generator().manual_seed(1))
    index = step.context_index(rule.window, query.device)
    if rule.window is not None:
        assert index.slots.shape[1] <= rule.window, "what lies before the window is not read"
    found = decode_by_rule(query, cache.layers[1], index, rule)
    for row, context in enumerate(CONTEXTS):
        slots = torch.from_numpy(context_slots(step.tables[row], context, BLOCK))
        wanted = row_written_out(query[row], step, 1, slots, rule).float()
        torch.testing.assert_close(found[row], wanted)


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_prefill_is_the_rule_written_out(step: PagedStep, rule: ScoreRule, rows: int) -> None:
    query = torch.randn(HEADS, rows, KEY_DIM, generator=torch.Generator().manual_seed(1))
    slots = torch.from_numpy(context_slots(step.tables[2], 30, BLOCK))
    found = prefill_by_rule(query, step.cache.layers[0], slots, rule)
    for row in range(rows):
        seen = slots[: 30 - rows + row + 1]
        wanted = row_written_out(query[:, row], step, 0, seen, rule).float()
        torch.testing.assert_close(found[row], wanted)


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_prefill_in_bfloat16_multiplies_in_float32_if_that_is_faster(
    step: PagedStep, rule: ScoreRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU without AVX512, where torch takes 30 times as long for bfloat16."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    kept = LayerKv(*(each.bfloat16() for each in (step.cache.keys[0], step.cache.values[0])))
    query = torch.randn(HEADS, 30, KEY_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.from_numpy(context_slots(step.tables[2], 30, BLOCK))
    found = prefill_by_rule(query, kept, slots, rule)
    wide = LayerKv(kept.keys.float(), kept.values.float())
    wanted = prefill_by_rule(query.float(), wide, slots, rule).bfloat16()
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


def test_attention_by_rule_reads_a_chunk_once_and_skips_parts_of_sparse_runs(
    step: PagedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step of a start, with sinks and 128k tokens of context, took minutes."""
    monkeypatch.setattr(paged_attention, "PART_BYTES", 1)
    read = Mock(wraps=step.cache.layers[0].read)
    monkeypatch.setattr(LayerKv, "read", read)
    kept, rule = step.cache.layers[0], ScoreRule(0.5, None, None, SINKS)
    query = torch.ones(HEADS, 30, KEY_DIM)
    slots = torch.from_numpy(context_slots(step.tables[2], 30, BLOCK))
    with sparsely():
        chunk = prefill_by_rule(query, kept, slots, rule)
        read.assert_called_once()
        index = step.context_index(None, query.device)
        rows = decode_by_rule(query.transpose(0, 1)[: len(CONTEXTS)], kept, index, rule)
    for found in (chunk, rows):
        assert not found[1:-1].any()
        assert found[0].any()
        assert found[-1].any()


def test_decoding_next_to_images_that_see_each_other_uses_the_kernel() -> None:
    _, step = filled_cache(torch.float32, KV_HEADS, KEY_DIM, contexts=CONTEXTS, block_size=BLOCK)
    rows = len(CONTEXTS)
    segment = segment_of(step, 2, 0, 30, start=rows)
    segment.bidirectional_spans = ((3, 9),)
    decode = Mock(spec=decode_by_rule, return_value=torch.full((rows, HEADS, KEY_DIM), 7.0))
    query = torch.randn(HEADS, rows + 30, KEY_DIM)
    for window in (None, 5):
        made = dataclasses.replace(step, decode=decode, segments=[segment])
        found = attend_by_rule(query, 0, made, ScoreRule(0.5, window))
        assert bool((found[:rows] == 7.0).all()) is (window is None)
    decode.assert_called_once()
