"""LoRA products of bfloat16 rows on a CPU: all adapters in one call of a compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vsched_workers.adapters.rows import CallRows
from vsched_workers.adapters.sums import Part, Room
from vsched_workers.backends.cpu.low_rank import kernel
from vsched_workers.backends.cpu.low_rank.kernel import PART, RANKS, add_low_rank
from vsched_workers.backends.cpu.threads import pool_of

PARALLEL_VALUES_MIN = 1 << 18
"""Products of fewer values run on one thread: waking the others takes longer."""


class KernelSums:
    """`Sums` by the compiled kernel."""

    def __init__(self, threads: int) -> None:
        self._pool = pool_of(threads)
        self._parts: dict[int, Sequence[Part]] = {}
        self._table = np.zeros((0, 0), dtype=PART)
        self._values = 0

    def place(self, parts: Sequence[Part], room: Room) -> Sequence[Part]:
        placed = []
        for first, down, up, scaling in parts:
            rank = len(down)
            padded = -(-rank // RANKS) * RANKS
            kept, across = (
                room((padded, width), torch.float32) for width in (down.shape[1], len(up))
            )
            kept[rank:], across[rank:] = 0, 0
            kept[:rank] = down
            across[:rank] = up.T.float() * scaling
            placed.append(Part(first, kept, across, 1.0))
        return placed

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        self._parts[owner] = parts
        self._lay_out()

    def drop(self, owner: int) -> None:
        if self._parts.pop(owner, None) is not None:
            self._lay_out()

    def _lay_out(self) -> None:
        """Rebuild the table of the parts of each adapter; missing parts have rank 0."""
        widest = max(map(len, self._parts.values()), default=0)
        self._table = np.zeros((max(self._parts, default=-1) + 1, widest), dtype=PART)
        for owner, parts in self._parts.items():
            for number, (first, down, up, _) in enumerate(parts):
                rank, outputs = up.shape
                self._table[owner, number] = down.data_ptr(), up.data_ptr(), rank, first, outputs
        sizes = [
            down.numel() + up.numel() for parts in self._parts.values() for _, down, up, _ in parts
        ]
        self._values = max(sizes, default=0)

    def add(self, rows: torch.Tensor, made: torch.Tensor, call: CallRows) -> None:
        assert made.is_contiguous(), "`made` must be contiguous"
        order, owners = call.order, call.owners
        if owners[-1] >= len(self._table):  # adapters loaded later have no part here
            known = owners < len(self._table)
            order, owners = order[known], owners[known]
        rows = rows.contiguous()
        many = len(order) * self._values >= PARALLEL_VALUES_MIN
        add_low_rank(
            self._pool if many else 0,
            rows.data_ptr(),
            rows.shape[1],
            made.data_ptr(),
            made.shape[1],
            order,
            owners,
            self._table,
        )


def warm_up() -> None:
    """Compile the kernel."""
    kernel.warm_up()
