"""Swap space in host memory: copies of KV blocks, without other changes."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from vsched.errors import DeviceOutOfMemory
from vsched.worker.memory import status_bytes
from vsched_workers.batching import kv_cache
from vsched_workers.batching.kv_cache import (
    RUN_MAX,
    KvCache,
    KvShape,
    Pairs,
    SwapArea,
    runs,
    shared_pages,
)

SHAPES = (KvShape(2, 4, 4), KvShape(1, 8, 2))
"""Two layers that keep keys and values of different sizes."""


def allocate(shape: tuple[int, ...], /, *, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def make_cache(dtype: torch.dtype = torch.float32, *, blocks: int = 9) -> KvCache:
    """Return a cache with distinct values."""
    cache = KvCache(SHAPES, blocks=blocks, block_size=4, dtype=dtype, allocate=allocate)
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
def test_swap_area_brings_back_what_went_out(dtype: torch.dtype) -> None:
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


def test_swap_area_is_refused_if_the_host_has_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the setting; nothing was allocated."""
    monkeypatch.setattr(kv_cache, "host_available", lambda: 4096)
    with pytest.raises(DeviceOutOfMemory, match=r"generate\.swap_memory.*4096 bytes.*lower"):
        SwapArea(make_cache(), 1000)


def test_runs_are_of_places_in_a_row() -> None:
    """Sorted, and not longer than the maximum that is gathered at a time."""
    found = [(place, blocks.tolist()) for place, blocks in runs(pairs((5, 1), (4, 7), (9, 2)))]
    assert found == [(4, [7, 1]), (9, [2])]
    many = pairs(*((place, place) for place in range(RUN_MAX + 3)))
    assert [(place, len(blocks)) for place, blocks in runs(many)] == [(0, RUN_MAX), (RUN_MAX, 3)]
    assert list(runs(NOTHING)) == []
