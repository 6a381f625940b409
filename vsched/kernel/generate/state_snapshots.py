"""Snapshots of recurrent states at the ends of KV blocks, for models whose layers have one.

Such a model can use cached blocks only up to a *snapshot*: the state of the sequence at the end of a block. Each rank
has a number of places for snapshots. The kernel decides which chunk writes its state to which place, and which request
begins with which snapshot; a snapshot has the hash of the block at its end.

Two block ends get a snapshot: the last one of a prompt, where the next turn of a conversation continues, and the end of
the cached blocks when a request joined, where other requests with the same prefix continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vsched.kernel.decisions import StateWrite
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.policy import CachePolicy
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.snapshot import Restorable, Saved


class StateSnapshots(Restorable):
    """Places 0 to `limits.state_snapshots` - 1, each free or with a snapshot; none for models without a state.

    A step reads snapshots before it writes any. So it may write to the place of a snapshot that it reads, and a request
    cannot begin with a snapshot in the step that writes it.
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
        self.written: dict[bytes, int] = {}  # by the step that is being planned

    def usable(self, hashes: Sequence[bytes], blocks: int) -> int:
        """Return the number of leading cached blocks, up to `blocks`, at whose end there is a snapshot."""
        if self._order is not None:
            while blocks and hashes[blocks - 1] not in self._places:
                blocks -= 1
        return blocks

    def read(self, state: RequestState, *, found: int, used: int) -> int | None:
        """Return the place of the snapshot for a joining request; None if it begins without one.

        It found `found` cached blocks, and uses the first `used` of them.
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
        """Return the snapshots that a chunk from `state.computed` to `stop` writes."""
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
        """Return a place for a new snapshot; None if it exists already, or no place is available."""
        if block_hash in self._places or block_hash in self.written:
            return None
        if not self._free:
            if not len(order):
                return None
            (victim,) = order.take_victims(1)
            self._free.append(self._places.pop(victim))
        place = self.written[block_hash] = self._free.pop()
        return place

    def replace_order(self, policy: CachePolicy) -> None:
        """Hand the snapshots to another eviction policy, and drop those that it does not keep."""
        if self._order is not None:
            refused = self._order.replace(policy, lambda _: 1)
            self._free += map(self._places.pop, refused)

    def publish(self) -> None:
        """Make the snapshots of a decided step available to later requests."""
        assert self._order is not None, "states were written without places"
        for block_hash in self._order.add_all(list(self.written)):
            self._free.append(self.written.pop(block_hash))
        self._places |= self.written
        self.written = {}

    def check(self) -> None:
        """Assert that no place is lost, and that the eviction order has the available snapshots."""
        assert not self.written, "a step was not published"
        taken = sorted([*self._free, *self._places.values()])
        assert taken == list(range(self.count)), "a place for a state is lost"
        assert sorted(self._order or ()) == sorted(self._places), "snapshots and order disagree"
