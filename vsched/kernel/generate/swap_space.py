"""KV blocks of preempted requests, kept in host memory until they go on.

Each rank of a group has *places* in host memory, of a block each. When a request is preempted by swapping, its blocks
are copied to places; when it joins again, back to the blocks that it is given then, and it goes on where it was. The
copies are part of decisions, before anything else in them: steps run in order, so a copy sees what the steps before
wrote, and nothing is written to its block before. Places need no announcement of their own for the same reason.

What others hold, too, is not copied: the prefix cache has it. If it is evicted nevertheless before the request is back,
what lies behind it in places is of no use, and the request is recomputed, as it is after a loss of its group.

Rejected: copying blocks when they are evicted, as a second prefix cache. Under pressure that copies all that was ever
cached, of requests that will not come back, and every allocation would have to look.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vsched.kernel.decisions import SwapCopies
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.kernel.snapshot import Restorable, Saved
from vsched.probes import probe


class SwappedOut(msgspec.Struct):
    """What is kept of a request.

    Attributes:
        tokens: Its KV is there up to this position, less what a step in flight did not write.
        first: The first of its blocks that is kept; those before have other holders.
        places: Where that block lies, and those behind it.
    """

    tokens: int
    first: int
    places: list[int]


class SwapSpace(Restorable):
    """Places 0 to `limits.swap_blocks` - 1, each free or with a block of a request that has no slot.

    Attributes:
        pending: Whether there are copies for the next decision.
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

    def __len__(self) -> int:
        """Return of how many requests something is kept."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Places that are free."""
        return len(self._free)

    def keep(self, state: RequestState, tokens: int, pool: BlockPool) -> bool:
        """Copy out the blocks of a request that leaves its slot, for its first `tokens` tokens; False without room.

        Called while it still holds them. A request that must tell of its prompt is not kept before it has: computing it
        is what tells.
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
        """Return how many tokens of a request need not be computed, of whose first blocks so many are cached."""
        reached = cached * self._block_size
        kept = self._kept.get(state.number) if self._kept else None
        if kept is None or cached < kept.first:
            return reached
        return max(reached, min(kept.tokens, len(state.tokens) - 1))

    def swap_in(self, state: RequestState, blocks: list[int], *, cached: int, computed: int) -> int:
        """Copy blocks of a joining request back, free its places, and return the number of copied blocks.

        `blocks` are its new blocks, the first `cached` of them found in the prefix cache; `computed` is from `reach`.
        """
        kept = self._kept.get(state.number) if self._kept else None
        if kept is None:
            return 0
        needed = range(cached, -(-computed // self._block_size))
        for index in needed:
            self._back += (kept.places[index - kept.first], blocks[index])
        self.pending = self.pending or bool(needed)
        del self._kept[state.number]
        self._free += reversed(kept.places)
        return len(needed)

    def drop(self, number: int) -> bool:
        """Keep nothing of a request any more; return whether anything was kept."""
        kept = self._kept.pop(number, None) if self._kept else None
        if kept is None:
            return False
        self._free += reversed(kept.places)
        if self._out:  # perhaps its own, and its places may be another's in the same decision
            gone, out = set(kept.places), self._out
            pairs = zip(out[::2], out[1::2], strict=True)
            self._out = [one for pair in pairs if pair[1] not in gone for one in pair]
        return True

    def take_copies(self) -> SwapCopies:
        """Return the copies that the next decision orders."""
        copies = SwapCopies(self._out, self._back)
        self._out, self._back, self.pending = [], [], False
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
        """Assert that every place is in exactly one place, and that nothing is kept of others than these requests."""
        kept = [place for one in self._kept.values() for place in one.places]
        assert sorted([*self._free, *kept]) == list(range(self.count)), (
            "a place for a block is lost"
        )
        assert self._kept.keys() <= set(without_slot), "KV is kept of a request that does not wait"
