"""Swap space: KV blocks of preempted requests in host memory.

Each rank of a group has *places* in host memory for a block each. When a request is preempted by swapping, its blocks
are copied to places; when it joins again, they are copied to its new blocks, and it continues. Copies are the first
part of a decision. Steps run in order, so a copy sees the writes of earlier steps, and comes before any later write to
its block or place.

Blocks that other requests hold as well are not copied, since the prefix cache has them. If they are evicted before the
request joins again, its places are useless, and it is recomputed, as after a loss of its group.

Rejected: copying evicted blocks, as a second prefix cache. Under pressure that copies all cached blocks, also of
requests that never come back, and adds a check to every allocation.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vsched.kernel.decisions import SwapCopies
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.probes import probe


class SwappedOut(msgspec.Struct):
    """The swapped-out blocks of a request.

    Attributes:
        tokens: Number of its tokens with KV.
        first: Index of its first swapped-out block; those before have other holders.
        places: The places of that block and the blocks after it.
    """

    tokens: int
    first: int
    places: list[int]


class SwapSpace(Restorable):
    """Places 0 to `limits.swap_blocks` - 1, each free or with a block of a request without a slot.

    Attributes:
        pending: Whether the next decision has copies.
    """

    _free: Saved[list[int]]
    _kept: Saved[dict[int, SwappedOut]]
    _out: Saved[list[int]]
    _back: Saved[list[int]]

    def __init__(self, limits: SchedulerLimits) -> None:
        self.count = limits.swap_blocks
        self.pending = False
        self._block_size = limits.block_size
        self._free = list(range(self.count - 1, -1, -1))
        self._kept = {}
        self._out = []
        self._back = []
        self._read: list[
            int
        ] = []  # places that the next decision reads, after it has written others

    def __len__(self) -> int:
        """Number of requests with swapped-out blocks."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Number of free places."""
        return len(self._free)

    def keep(self, state: RequestState, tokens: int, pool: BlockPool) -> bool:
        """Copy out the blocks of the first `tokens` tokens of a request; return False if there is no room.

        Called while it holds them. A request whose prompt log-probabilities are still due is not swapped, since only
        computing the prompt yields them.
        """
        if not tokens or state.tells_prompt:
            return False
        held = state.blocks[: -(-tokens // self._block_size)]
        first = pool.shared(held)
        if len(held) - first > len(self._free):
            probe("generate.no_room_to_swap")
            return False
        at = len(self._free) - (len(held) - first)
        places = self._free[at:]
        del self._free[at:]
        for block, place in zip(held[first:], places, strict=True):
            self._out += (block, place)
        self._kept[state.number] = SwappedOut(tokens, first, places)
        self.pending = self.pending or bool(places)
        return True

    def reach(self, state: RequestState, cached: int) -> int:
        """Number of tokens that the request can skip, given `cached` cached blocks."""
        reached = cached * self._block_size
        kept = self._kept.get(state.number) if self._kept else None
        if kept is None or cached < kept.first:
            return reached
        return max(reached, min(kept.tokens, len(state.tokens) - 1))

    def swap_in(self, state: RequestState, blocks: list[int], *, cached: int, computed: int) -> int:
        """Copy blocks of a joining request back, free its places, and return the number of copied blocks.

        The places are free after the next decision, which writes blocks of preempted requests first.
        `blocks` are its new blocks, the first `cached` of them found in the prefix cache; `computed` is from `reach`.
        """
        kept = self._kept.get(state.number) if self._kept else None
        if kept is None:
            return 0
        needed = range(cached, -(-computed // self._block_size))
        for index in needed:
            self._back += (kept.places[index - kept.first], blocks[index])
        del self._kept[state.number]
        if needed:
            self.pending = True
            self._read += reversed(kept.places)
        else:
            self._free += reversed(kept.places)
        return len(needed)

    def drop(self, number: int) -> bool:
        """Free the places of a request; return False if it had none."""
        kept = self._kept.pop(number, None) if self._kept else None
        if kept is None:
            return False
        self._free += reversed(kept.places)
        if self._out:  # its own copies are cancelled: its places may be reused in the same decision
            gone, out = set(kept.places), self._out
            pairs = zip(out[::2], out[1::2], strict=True)
            self._out = [one for pair in pairs if pair[1] not in gone for one in pair]
        return True

    def take_copies(self) -> SwapCopies:
        """Return the copies for the next decision."""
        copies = SwapCopies(self._out, self._back)
        self._free += self._read
        self._out, self._back, self._read, self.pending = [], [], [], False
        return copies

    def statistics(self) -> dict[str, int]:
        """Return gauges."""
        return {
            "swapped": len(self._kept),
            "swap_blocks_total": self.count,
            "swap_blocks_held": self.count - len(self._free),
        }

    def rebuild(self) -> None:
        self.pending = bool(self._out or self._back)

    def check(self, without_slot: Collection[int]) -> None:
        """Assert that no place is lost, and that only these requests have any."""
        kept = [place for one in self._kept.values() for place in one.places]
        assert sorted([*self._free, *kept]) == list(range(self.count)), (
            "a place for a block is lost"
        )
        assert self._kept.keys() <= set(without_slot), (
            "a request with a slot has swapped-out blocks"
        )
