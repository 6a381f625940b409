"""The KV blocks of a generate group: the pool with the prefix cache, snapshots of recurrent states, and swap space.

A full block is published under a hash of its tokens, all tokens before, and the digests of their items, so equal
hashes mean equal KV. A published block without a holder stays cached until the pool needs it.

The keys of the eviction order are hashes, so a policy that remembers evicted keys remembers content.

A block may be published when the step that fills it is decided, before it runs: ranks execute decisions in order, so a
request that finds the block reads it in a later step.

A model whose layers have a recurrent state can use cached blocks only up to a *snapshot*: the state of the sequence at
the end of a block. Each rank has a number of *snapshot slots*. The kernel decides which chunk writes its state to
which one, and which request begins with which snapshot; a snapshot has the hash of the block at its end.

Two block ends get a snapshot: the last one of a prompt, where the next turn of a conversation continues, and the end of
the cached blocks when a request joined, where other requests with the same prefix continue.

Swap space has KV blocks of preempted requests. Each rank of a group has *swap slots* in host memory for a block each.
When a request is preempted by swapping, its blocks are copied to swap slots; when it joins again, they are copied to
its new blocks, and it continues. Copies are the first part of a decision. Steps run in order, so a copy sees the writes
of earlier steps, and comes before any later write to its block or slot. For a request with swap slots s0, s1:

    preempted      [b0 b1 | b2 b3]     out (b2 s0) (b3 s1); others hold b0 b1
    joins again    [b0 b1 | b7 b8]     b0 b1 are found in the prefix cache; back (s0 b7) (s1 b8)

Blocks that other requests hold as well are not copied, since the prefix cache has them. If they are evicted before the
request joins again, its slots are useless, and it is recomputed, as after a loss of its group.

Rejected: copying evicted blocks, as a second prefix cache. Under pressure that copies all cached blocks, also of
requests that never come back, and adds a check to every allocation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import eq

import msgspec

from vsched.kernel.decisions import StateWrite, SwapCopies
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.live import CELL_SAMPLES_MAX, MemoryMap, cell_size
from vsched.kernel.request import RequestState
from vsched.policy import CachePolicy
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.probes import probe


class BlockPool(Restorable):
    """Blocks 0 to `count` - 1, each free, held, or cached (published, without a holder).

    Attributes:
        holders: Number of holders of each block.
    """

    evictions: Saved[int] = 0
    _order: Saved[GuardedOrder[bytes]]
    holders: list[int]
    _free: Saved[list[int]]
    _by_hash: Saved[dict[bytes, int]]

    def __init__(self, count: int, order: GuardedOrder[bytes]) -> None:
        self.count = count
        self._order = order
        self._free = list(range(count - 1, -1, -1))
        self.holders = [0] * count
        self._hash_of: list[bytes | None] = [None] * count
        self._by_hash = {}

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated: free or evictable."""
        return len(self._free) + len(self._order)

    @property
    def held(self) -> int:
        """Number of blocks that sequences hold."""
        return self.count - self.available

    def allocate(self) -> int:
        """Allocate a block; one must be available."""
        block = self._free.pop() if self._free else self._evict(1)[0]
        self.holders[block] = 1
        return block

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks; they must be available."""
        free, holders = self._free, self.holders
        at = max(len(free) - count, 0)
        # as if popped one by one
        blocks = free[: at - 1 if at else None : -1] if free else []
        del free[at:]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            holders[block] = 1
        return blocks

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest cached prefix, without holding them."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def shared(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks of a sequence that other sequences hold as well.

        It is an estimate if equal blocks were computed twice. If it is too large, the request is recomputed.
        """
        holders = self.holders
        return bisect_left(blocks, True, key=lambda block: holders[block] < 2)

    def hold_blocks(self, blocks: Sequence[int]) -> None:
        """Add a holder to found blocks."""
        for block in blocks:
            block_hash = self._hash_of[block]
            if self.holders[block] == 0 and block_hash is not None:
                self._order.reuse(block_hash)
            self.holders[block] += 1

    def release_blocks(self, blocks: Sequence[int], *, kept: int | None = None) -> None:
        """Release blocks, last first, so that the end of a prefix is evicted before its beginning.

        Only the first `kept` (None: all) stay cached, and blocks that others hold.
        """
        holders, hash_of = self.holders, self._hash_of
        for block in blocks[kept:] if kept is not None else ():
            if holders[block] == 1 and (known := hash_of[block]) is not None:
                del self._by_hash[known]
                hash_of[block] = None
        cached: list[bytes] = []
        free: list[int] = []
        for block in reversed(blocks):
            holders[block] = left = holders[block] - 1
            if left:
                assert left > 0, f"block {block} was released twice"
            elif (known := hash_of[block]) is None:
                free.append(block)
            else:
                cached.append(known)
        refused = self._order.add_all(cached)
        for block_hash in refused:
            hash_of[self._by_hash.pop(block_hash)] = None
        if refused:  # they are freed in the order of their blocks
            idle = [block for block in reversed(blocks) if not holders[block]]
            free = [block for block in idle if hash_of[block] is None]
        self._free += free

    def replace_order(self, policy: CachePolicy) -> None:
        """Hand the cached blocks to another eviction policy, and free refused ones."""
        refused = self._order.replace(policy, size_of=lambda _: 1)
        blocks = list(map(self._by_hash.pop, refused))
        for block in blocks:
            self._hash_of[block] = None
        self._free += blocks

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Publish full blocks; a hash that is published already keeps its block."""
        by_hash, hash_of = self._by_hash, self._hash_of
        if None not in map(hash_of.__getitem__, blocks):
            return  # all are, as is usual at the end of a request
        for block, block_hash in zip(blocks, hashes, strict=True):
            if hash_of[block] is None and by_hash.setdefault(block_hash, block) == block:
                hash_of[block] = block_hash

    def _evict(self, count: int) -> list[int]:
        self.evictions += count
        blocks = list(map(self._by_hash.pop, self._order.take_victims(count)))
        for block in blocks:
            self._hash_of[block] = None
        return blocks

    def map(self) -> MemoryMap:
        """Return the states of all blocks; large cells are sampled."""
        size = cell_size(self.count)
        every = -(-size // CELL_SAMPLES_MAX)
        cells = []
        for start in range(0, self.count, size):
            sample = slice(start, start + size, every)
            holders, hashes = self.holders[sample], self._hash_of[sample]
            idle = holders.count(0)
            cached = sum(
                [not held and one is not None for held, one in zip(holders, hashes, strict=True)]
            )
            cells.append(
                (100 * (len(holders) - idle) // len(holders), 100 * cached // len(holders))
            )
        totals = self.held, len(self._order)
        return MemoryMap(self.count, size, ("held", "cached"), totals, cells)

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges; cached blocks are available, too."""
        return {
            "blocks_total": self.count,
            "blocks_held": self.held,
            "blocks_available": self.available,
            "blocks_cached": len(self._order),
            "prefix_evictions": self.evictions,
        }

    def trim(self) -> None:
        """Remove the last blocks if the restored pool had fewer: they are neither held nor available."""
        self.count = self.available + sum(map(bool, self.holders))
        del self.holders[self.count :], self._hash_of[self.count :]

    def add_holder(self, blocks: Iterable[int]) -> None:
        """Count a holder of blocks, after a snapshot is restored."""
        for block in blocks:
            self.holders[block] += 1

    def rebuild(self) -> None:
        for block_hash, block in self._by_hash.items():
            self._hash_of[block] = block_hash

    def check(self, held_by: Iterable[Sequence[int]]) -> None:
        """Assert that no block is lost, and that reference counts match these holders."""
        counted = [0] * self.count
        for blocks in held_by:
            for block in blocks:
                counted[block] += 1
        assert counted == self.holders, "holders of blocks do not match what sequences hold"
        by_hash = self._by_hash
        idle = sorted([*self._free, *map(by_hash.__getitem__, self._order)])
        assert idle == [block for block, count in enumerate(counted) if not count], "block lost"
        known = map(self._hash_of.__getitem__, by_hash.values())
        assert all(map(eq, known, by_hash)), "a block is published under another's hash"


class StateSnapshots(Restorable):
    """Snapshot slots 0 to `limits.state_snapshots` - 1, free or with a snapshot; none for models without a state.

    A step reads snapshots before it writes any. So it may write to the slot of a snapshot that it reads, and a request
    cannot begin with a snapshot in the step that writes it.
    """

    _order: Saved[GuardedOrder[bytes] | None]
    _free: Saved[list[int]]
    _places: Saved[dict[bytes, int]]  # snapshot slots, by block hash

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

    def snapshot_to_read(self, state: RequestState, *, found: int, used: int) -> int | None:
        """Return the slot of the snapshot for a joining request; None if it begins without one.

        It found `found` cached blocks, and uses the first `used` of them.
        """
        state.branch = found * self._block_size
        if self._order is None or not used:
            return None
        block_hash = state.hashes[used - 1]
        snapshot_slot = self._places[block_hash]
        # released at once: the step reads it before any snapshot is written
        self._order.reuse(block_hash)
        if not self._order.add(block_hash, 1):
            self._free.append(self._places.pop(block_hash))
        return snapshot_slot

    def snapshots_to_write(self, state: RequestState, stop: int) -> list[StateWrite]:
        """Return the snapshots that a chunk from `state.computed` to `stop` writes."""
        if self._order is None or not state.hashes:
            return []
        size, writes = self._block_size, []
        last = (len(state.tokens) - 1) // size * size
        for end in sorted({state.branch, last}):
            if state.computed < end <= stop:
                snapshot_slot = self._snapshot_slot_for(state.hashes[end // size - 1], self._order)
                if snapshot_slot is not None:
                    writes.append(StateWrite(end, snapshot_slot))
        return writes

    def _snapshot_slot_for(self, block_hash: bytes, order: GuardedOrder[bytes]) -> int | None:
        """Return a slot for a new snapshot; None if it exists already, or no slot is available."""
        if block_hash in self._places or block_hash in self.written:
            return None
        if not self._free:
            if not len(order):
                return None
            (victim,) = order.take_victims(1)
            self._free.append(self._places.pop(victim))
        snapshot_slot = self.written[block_hash] = self._free.pop()
        return snapshot_slot

    def replace_order(self, policy: CachePolicy) -> None:
        """Hand the snapshots to another eviction policy, and drop refused ones."""
        if self._order is not None:
            refused = self._order.replace(policy, size_of=lambda _: 1)
            self._free += map(self._places.pop, refused)

    def publish(self) -> None:
        """Make the snapshots of a decided step available to later requests."""
        assert self._order is not None, "states were written without slots for snapshots"
        for block_hash in self._order.add_all(list(self.written)):
            self._free.append(self.written.pop(block_hash))
        self._places |= self.written
        self.written = {}

    def check(self) -> None:
        """Assert that no slot is lost, and that the eviction order has the available snapshots."""
        assert not self.written, "a step was not published"
        taken = sorted([*self._free, *self._places.values()])
        assert taken == list(range(self.count)), "a snapshot slot is lost"
        assert sorted(self._order or ()) == sorted(self._places), "snapshots and order disagree"


class SwappedOut(msgspec.Struct):
    """The swapped-out blocks of a request.

    Attributes:
        tokens: Number of its tokens with KV.
        first: Index of its first swapped-out block; those before have other holders.
        places: The swap slots of that block and the blocks after it.
    """

    tokens: int
    first: int
    places: list[int]


class SwapSpace(Restorable):
    """Swap slots 0 to `limits.swap_blocks` - 1, each free or with a block of a request without a generate slot."""

    _free: Saved[list[int]]
    _kept: Saved[dict[int, SwappedOut]]
    _out: Saved[list[int]]
    _back: Saved[list[int]]

    def __init__(self, limits: SchedulerLimits) -> None:
        self.count = limits.swap_blocks
        self._block_size = limits.block_size
        self._free = list(range(self.count - 1, -1, -1))
        self._kept = {}
        self._out = []
        self._back = []
        # Swap slots freed by the next decision, not in it: it copies out before it copies back.
        self._read: list[int] = []

    def __len__(self) -> int:
        """Number of requests with swapped-out blocks."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Number of free swap slots."""
        return len(self._free)

    @property
    def pending(self) -> bool:
        """Whether the next decision has copies."""
        return bool(self._out or self._back)

    def swap_out(self, state: RequestState, tokens: int, pool: BlockPool) -> bool:
        """Copy out the blocks of the first `tokens` tokens of a request; return False if there is no room.

        Called while it holds them. A request whose prompt log-probabilities are still due is not swapped, since only
        computing the prompt yields them.
        """
        if not tokens or state.wants_prompt_logprobs:
            return False
        held = state.blocks[: -(-tokens // self._block_size)]
        first = pool.shared(held)
        if len(held) - first > len(self._free):
            probe("generate.no_room_to_swap")
            return False
        at = len(self._free) - (len(held) - first)
        swap_slots = self._free[at:]
        del self._free[at:]
        for block, swap_slot in zip(held[first:], swap_slots, strict=True):
            self._out += (block, swap_slot)
        self._kept[state.number] = SwappedOut(tokens, first, swap_slots)
        return True

    def reach(self, state: RequestState, cached: int) -> int:
        """Number of tokens that the request can skip, given `cached` cached blocks."""
        reached = cached * self._block_size
        kept = self._kept.get(state.number) if self._kept else None
        if kept is None or cached < kept.first:
            return reached
        return max(reached, min(kept.tokens, len(state.tokens) - 1))

    def swap_in(self, state: RequestState, blocks: list[int], *, cached: int, computed: int) -> int:
        """Copy blocks of a joining request back, free its swap slots, and return the number of copied blocks.

        The slots are free after the next decision, which writes blocks of preempted requests first.
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
            self._read += reversed(kept.places)
        else:
            self._free += reversed(kept.places)
        return len(needed)

    def free_slots(self, number: int) -> bool:
        """Free the swap slots of a request; return False if it had none."""
        kept = self._kept.pop(number, None) if self._kept else None
        if kept is None:
            return False
        self._free += reversed(kept.places)
        if self._out:  # its own copies are cancelled: its slots may be reused in the same decision
            gone, out = set(kept.places), self._out
            pairs = zip(out[::2], out[1::2], strict=True)
            self._out = [one for pair in pairs if pair[1] not in gone for one in pair]
        return True

    def take_copies(self) -> SwapCopies:
        """Return the copies for the next decision."""
        copies = SwapCopies(self._out, self._back)
        self._free += self._read
        self._out, self._back, self._read = [], [], []
        return copies

    def statistics(self) -> dict[str, int]:
        """Return gauges."""
        return {
            "swapped": len(self._kept),
            "swap_blocks_total": self.count,
            "swap_blocks_held": self.count - len(self._free),
        }

    def check(self, without_slot: Collection[int]) -> None:
        """Assert that no swap slot is lost, and that only these requests have any."""
        kept = [swap_slot for one in self._kept.values() for swap_slot in one.places]
        assert sorted([*self._free, *kept]) == list(range(self.count)), "a swap slot is lost"
        assert self._kept.keys() <= set(without_slot), (
            "a request with a slot has swapped-out blocks"
        )
