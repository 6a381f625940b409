"""Swapping on a separate stream, with a fake `torch.cuda` that records waits."""

from __future__ import annotations

import numpy as np
import torch

from tests.workers.backends.cuda.test_copies import Log, NotedCuda
from tests.workers.batching.test_swap_area import NOTHING, blocks_of, make_cache, pairs, same
from vsched_workers.backends.cuda.device import CudaSwapArea
from vsched_workers.batching.kv_cache import SwapArea


def pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_swap_waits_for_the_steps_before_and_the_steps_after_for_it() -> None:
    """Copies see all earlier writes, and no later step overwrites a block that is still read; no host wait."""
    log: Log = []
    area = CudaSwapArea(make_cache(), 4, device="cpu", cuda=NotedCuda(log), allocate=pinned)
    area.copy(pairs((3, 0)), NOTHING)
    assert log == [("recorded", 0), ("stream waits", 0), ("recorded", 1), ("stream waits", 1)]


def test_swap_copies_what_the_host_would() -> None:
    """Out before back, over every layer."""
    ours, theirs = make_cache(), make_cache()
    area = CudaSwapArea(ours, 4, device="cpu", cuda=NotedCuda([]), allocate=pinned)
    host = SwapArea(theirs, 4)
    rng = np.random.default_rng(0)
    for _ in range(20):
        blocks, places = rng.permutation(9), rng.permutation(4)
        out = pairs(*zip(blocks[:3].tolist(), places[:3].tolist(), strict=True))
        back = pairs(*zip(places[1:3].tolist(), blocks[4:6].tolist(), strict=True))
        area.copy(out, back)
        host.copy(out, back)
        assert all(same(blocks_of(ours, one), blocks_of(theirs, one)) for one in range(9))
