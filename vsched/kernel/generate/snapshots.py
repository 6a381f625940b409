"""States at the ends of KV blocks, for models whose layers keep a state beside keys and values.

Blocks of an earlier request are of use to such a model only as far as there is a *snapshot*: the state that a sequence
had just there. A rank has a number of places for them. The kernel says which chunk puts its state where, and which
request begins with which; a snapshot is known by the hash of the block that it ends, as the block is.

Two ends are worth a place: the last one of a prompt, where the next turn of its conversation goes on, and the last one
up to which blocks were found when a request joined, where others with the same beginning go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vsched.kernel.decisions import StateWrite
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.policy_calls import GuardedOrder
from vsched.kernel.request import RequestState
from vsched.kernel.snapshot import Restorable, Saved


class StateSnapshots(Restorable):
    """Places 0 to `limits.state_snapshots` - 1, each free or with a snapshot; for a model without a state, nothing.

    A snapshot is read when the step begins in which a request joins, and written in the course of a step. So one that a
    step reads may give its place to one that the same step writes, and is never found in the step that writes it.
    """

    _order: Saved[GuardedOrder[bytes] | None]
    _free: Saved[list[int]]
    _places: Saved[dict[bytes, int]]

    def __init__(
        self, limits: SchedulerLimits, make_order: Callable[[], GuardedOrder[bytes]]
    ) -> None:
        self.count = limits.state_snapshots or 0
        self._block_size = limits.block_size
        self._order = make_order() if limits.state_snapshots is not None else None
        self._free = list(range(self.count - 1, -1, -1))
        self._places = {}
        self.written: dict[bytes, int] = {}  # by the step that is being decided

    def usable(self, hashes: Sequence[bytes], blocks: int) -> int:
        """Return how many of the first `blocks` blocks, which are cached, a request can go on from."""
        if self._order is not None:
            while blocks and hashes[blocks - 1] not in self._places:
                blocks -= 1
        return blocks

    def read(self, state: RequestState, *, found: int, used: int) -> int | None:
        """A request joins that found so many cached blocks, and uses the first of them; return where its state is.

        None where it begins without one.
        """
        state.branch = found * self._block_size
        if self._order is None or not used:
            return None
        block_hash = state.hashes[used - 1]
        place = self._places[block_hash]
        self._order.reuse(block_hash)
        if not self._order.add(block_hash, 1):
            self._free.append(self._places.pop(block_hash))
        return place

    def write(self, state: RequestState, stop: int) -> list[StateWrite]:
        """Return the snapshots that a chunk from `state.computed` to `stop` leaves behind."""
        if self._order is None or not state.hashes:
            return []
        size, writes = self._block_size, []
        last = (len(state.tokens) - 1) // size * size
        for end in sorted({state.branch, last}):
            if state.computed < end <= stop:
                place = self._place_for(state.hashes[end // size - 1], self._order)
                if place is not None:
                    writes.append(StateWrite(end, place))
        return writes

    def _place_for(self, block_hash: bytes, order: GuardedOrder[bytes]) -> int | None:
        """Return the place for a new snapshot; None where it is there already, or no place can be had."""
        if block_hash in self._places or block_hash in self.written:
            return None
        if not self._free:
            if not len(order):
                return None
            (victim,) = order.take_victims(1)
            self._free.append(self._places.pop(victim))
        place = self.written[block_hash] = self._free.pop()
        return place

    def publish(self) -> None:
        """The step is decided: what it writes can be found by those that join later."""
        assert self._order is not None, "states were written, and there are no places for them"
        for block_hash in self._order.add_all(list(self.written)):
            self._free.append(self.written.pop(block_hash))
        self._places |= self.written
        self.written = {}

    def check(self) -> None:
        """Assert that every place is in exactly one place, and that the order knows just what can be found."""
        assert not self.written, "a step was not published"
        taken = sorted([*self._free, *self._places.values()])
        assert taken == list(range(self.count)), "a place for a state is lost"
        assert sorted(self._order or ()) == sorted(self._places), "snapshots and order disagree"
