"""The pool of KV blocks: reference counts and the prefix cache.

A full block is published under a hash of its tokens, all tokens before, and the digests of their items, so equal
hashes mean equal KV. A published block without a holder stays cached until the pool needs it.

The keys of the eviction order are hashes, so a policy that remembers evicted keys remembers content.

A block may be published when the step that fills it is decided, before it runs: ranks execute decisions in order, so a
request that finds the block reads it in a later step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import eq

from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.live import CELL_SAMPLES_MAX, MemoryMap, cell_size
from vsched.kernel.request import RequestState
from vsched.policy import CachePolicy, InsertionView
from vsched.policy.measured import Measured
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.snapshot import Restorable, Saved


class BlockPool(Restorable):
    """Blocks 0 to `count` - 1, each free, held (counted), or cached (published, without a holder)."""

    evictions: Saved[int] = 0
    _order: Saved[GuardedOrder[bytes]]
    _free: Saved[list[int]]
    _by_hash: Saved[dict[bytes, int]]

    def __init__(self, count: int, order: GuardedOrder[bytes]) -> None:
        self.count = count
        self._order = order
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
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
        self._holders[block] = 1
        return block

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks; they must be available."""
        free, holders = self._free, self._holders
        at = max(len(free) - count, 0)
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

    def cached_among(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks without a holder, which would become unavailable."""
        return sum(1 for block in blocks if self._holders[block] == 0)

    def shared(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks of a sequence that other sequences hold as well."""
        holders = self._holders
        return bisect_left(blocks, True, key=lambda block: holders[block] < 2)

    def freed_by(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks that become available once their only holder releases these."""
        return [block for block in blocks if self._holders[block] == 1]

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to found blocks."""
        for block in blocks:
            block_hash = self._hash_of[block]
            if self._holders[block] == 0 and block_hash is not None:
                self._order.reuse(block_hash)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int], *, kept: int | None = None) -> None:
        """Release blocks, last first, so that the end of a prefix is evicted before its beginning.

        Only the first `kept` stay cached, None for all, and those that others hold.
        """
        holders, hash_of = self._holders, self._hash_of
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
        """Hand the cached blocks to another eviction policy, and free those that it does not keep."""
        refused = self._order.replace(policy, lambda _: 1)
        blocks = list(map(self._by_hash.pop, refused))
        for block in blocks:
            self._hash_of[block] = None
        self._free += blocks

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Publish full blocks; a hash that is published already keeps its block."""
        by_hash, hash_of = self._by_hash, self._hash_of
        if None not in map(hash_of.__getitem__, blocks):
            return  # all are, as those of a request that ends mostly are
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
        """Return the states of all blocks; of a cell with many blocks, some are looked at."""
        size = cell_size(self.count)
        every = -(-size // CELL_SAMPLES_MAX)
        cells = []
        for start in range(0, self.count, size):
            looked_at = slice(start, start + size, every)
            holders, hashes = self._holders[looked_at], self._hash_of[looked_at]
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

    def add_holder(self, blocks: Iterable[int]) -> None:
        """Count a holder of blocks, after a snapshot is restored."""
        for block in blocks:
            self._holders[block] += 1

    def rebuild(self) -> None:
        for block_hash, block in self._by_hash.items():
            self._hash_of[block] = block_hash

    def check(self, held_by: Iterable[Sequence[int]]) -> None:
        """Assert that no block is lost, and that reference counts match these holders."""
        counted = [0] * self.count
        for blocks in held_by:
            for block in blocks:
                counted[block] += 1
        assert counted == self._holders, "holders of blocks do not match what sequences hold"
        by_hash = self._by_hash
        idle = sorted([*self._free, *map(by_hash.__getitem__, self._order)])
        assert idle == [block for block, count in enumerate(counted) if not count], "block lost"
        known = map(self._hash_of.__getitem__, by_hash.values())
        assert all(map(eq, known, by_hash)), "a block is published under another's hash"


def blocks_kept(
    seat: PolicySeat,
    limits: SchedulerLimits,
    state: RequestState,
    computed: int,
    now_ns: int,
    measured: Measured,
) -> int | None:
    """Return the number of leading blocks of an ended request that stay cached; None for all.

    `computed` of its tokens have KV. The insertion policy decides at the end of a request only: before, its blocks are
    published for others, and for itself after a preemption. Blocks that it found in the cache always stay.
    """
    full = min(computed // limits.block_size, len(state.hashes))
    found = min(state.cached_tokens // limits.block_size, full)
    if not (limits.prefix_cache and limits.shares_blocks) or full <= found:
        return None
    view = InsertionView(
        now_ns=now_ns,
        hashes=tuple(state.hashes[:full]),
        prompt_blocks=min(state.prompt_length // limits.block_size, full),
        found=found,
        block_tokens=limits.block_size,
        prompt_tokens=state.prompt_length,
        output_tokens=len(state.tokens) - state.prompt_length,
        items=len(state.items),
        priority=state.request.priority,
        tenant=state.request.tenant,
        session=state.request.session,
        measured=measured,
        state=seat.state,
    )
    kept: int = seat.decide(view, full)
    if kept < found:
        seat.overrule("blocks that were found in the cache stay")
        kept = found
    return kept if kept < full else None
