"""Swapping of KV blocks to host memory."""

from __future__ import annotations

import torch

from vsched_workers.backends.base import Backend
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.swap_area import SWAP_REMEDY, Pairs, SwapArea
from vsched_workers.memory.out_of_memory import typed_out_of_memory
from vsched_workers.parallel.rank_group import RankGroup


class SwappingWorker:
    """Mixin of workers whose KV blocks can be swapped; a subclass drops `_swap_area` with `_cache`."""

    _backend: Backend
    _group: RankGroup
    _cache: KvCache | None = None
    _swap_area: SwapArea | None = None

    def build_swap(self, blocks: int) -> None:
        """Allocate host memory for `blocks` blocks of the present KV cache.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        assert self._cache is not None, "build_kv comes before"
        setting = typed_out_of_memory("allocating host memory for blocks", remedy=SWAP_REMEDY)
        with self._group.watched(), setting:
            self._swap_area = self._backend.swap_area(self._cache, blocks)

    @torch.inference_mode()
    def swap(self, out: Pairs, back: Pairs) -> None:
        """Copy KV blocks to host memory, and back.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        assert self._swap_area is not None, "build_swap comes before"
        with self._group.watched(), typed_out_of_memory("swapping KV blocks", remedy=SWAP_REMEDY):
            self._swap_area.copy(out, back)
