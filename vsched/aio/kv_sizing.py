"""How the KV caches of the generate groups come to their sizes, while their ranks wait.

Encode ranks publish what they reserve; when all have, the memory policy is asked, its orders go to every rank of a
group as entries of the decision log, and all ranks vote on each. What was accepted once is what a restarted group must
build again: the kernel goes on with the blocks that it knows.

Generate groups on memories of their own are sized at the same time. Those that share one are sized one after the other,
and each leaves the next its share: it is told of a device that is smaller by so much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from vsched.aio.leader.leader import Leader
from vsched.memory import (
    Accepted,
    KvNegotiation,
    Ledger,
    LedgerLine,
    Rebuild,
    Reservations,
    merge_ledgers,
)
from vsched.policy import Build, MemoryPolicy, MemoryView, Probe, RankMemory, Reservation
from vsched.wire import Sized, SizeKv


class SizingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory policy is told besides measurements; see `MemoryView`. `bytes_per_token` are those of a rank."""

    bytes_per_token: int
    block_size: int
    context_tokens: int
    batch_tokens: int
    slots: int


class _Progress(msgspec.Struct):
    """How far a generate group has come.

    Attributes:
        loaded: What its ranks measured after loading.
        built: What they measured when the KV cache stood that was accepted.
    """

    loaded: Sequence[RankMemory] = ()
    built: Sequence[RankMemory] = ()
    accepted: Accepted | None = None
    ledger: Ledger | None = None


class Sizing:
    """Sizes the KV caches of all generate groups of a server.

    `generate` names them, each with the encode group that its processes serve, too, or with nothing; `encode` has the
    ranks of each encode group. `more` are lines of the ledger that no rank measures. With `pausing`, encoders that can
    pause do so for the steps of their processes.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        limits: SizingLimits,
        *,
        encode: Mapping[str, int],
        generate: Mapping[str, str],
        more: Sequence[LedgerLine] = (),
        pausing: bool = True,
    ) -> None:
        self._policy = policy
        self._pausing = pausing
        self._limits = limits
        self._encoder_of = dict(generate)
        self._more = more
        self._reservations = Reservations(encode)
        self._published = asyncio.Event()
        self._encoders: dict[str, list[RankMemory]] = {name: [] for name in encode}
        self._groups = {group: _Progress() for group in generate}
        self._loaded = asyncio.Event()
        self._locks: dict[str, asyncio.Lock] = {}
        if not encode:
            self._published.set()

    @property
    def ledger(self) -> Ledger | None:
        """Where the memory of all groups went, at the peaks of their last attempts; None before there was one."""
        ledgers = [one.ledger for one in self._groups.values() if one.ledger is not None]
        return merge_ledgers(ledgers) if ledgers else None

    def waited_for(self, groups: Sequence[str]) -> str:
        """Say whom those of `groups` that generate wait for; empty when for nobody else."""
        if not any(group in self._groups for group in groups):
            return ""
        loading = [group for group, one in self._groups.items() if not one.loaded]
        others = [group for group in loading if group not in groups]
        if len(others) < len(loading):
            return ""  # it has not loaded itself
        return self._reservations.overdue() or (
            f"{', '.join(others)} has not loaded" if others else ""
        )

    async def publish(self, group: str, encode: Leader) -> None:
        """Take the reservations of an encode group as soon as all its ranks have told them; a restart tells anew."""
        reports = await encode.reserved.complete
        self._encoders[group] = [report.memory for report in reports]
        for report in reports:
            self._reservations.publish(group, report.reservation)
        if not self._reservations.missing():
            self._published.set()

    async def lead(self, group: str, generate: Leader) -> None:
        """Take a generate group from its weights to an accepted KV cache.

        Blocks: until all groups have loaded and all encode ranks have published, and while another is sized on the same
        memory; then as long as the ranks take. The caller has the deadline, and `waited_for` tells what it passed on.

        Raises:
            DeviceOutOfMemory, MemoryLeak, PolicyError: As `KvNegotiation`.
        """
        progress = self._groups[group]
        ranks = progress.loaded = await generate.loaded.complete
        if all(one.loaded for one in self._groups.values()):
            self._loaded.set()
        await self._published.wait()
        await self._loaded.wait()
        async with self._alone({rank.pool for rank in ranks}):
            accepted = await self._negotiate(group, generate)
        generate.accept(accepted.blocks)

    @asynccontextmanager
    async def _alone(self, pools: set[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as held:
            for pool in sorted(pools):  # in one order, or two groups could wait for each other
                await held.enter_async_context(self._locks.setdefault(pool, asyncio.Lock()))
            yield

    async def _negotiate(self, group: str, generate: Leader) -> Accepted:
        """Ask the policy until it accepts what stands; return that."""
        progress = self._groups[group]
        left = self._left_to_others(group)
        loaded = {rank.rank: rank.reserved_bytes for rank in progress.loaded}
        growth, paused_bytes = self._growth_within(group)
        negotiation = self._negotiation(group, [_smaller(one, left) for one in progress.loaded])
        votes: list[Sized] = []
        try:
            order = negotiation.start()
            while not isinstance(order, Accepted):
                profile, headroom_bytes = True, 0
                probe = isinstance(order, Probe)
                if isinstance(order, Build):
                    profile, headroom_bytes = order.profile, order.headroom_bytes
                    # In place of a batch that waits: so the steps beside it are proved, not only reckoned with.
                    headroom_bytes += paused_bytes if profile else 0
                votes = await generate.size(
                    SizeKv(order.tokens, profile, headroom_bytes, probe=probe)
                )
                beside_bytes = paused_bytes if probe else 0
                covered = [
                    _covering_encoder(one, loaded[one.memory.rank], growth, beside_bytes)
                    for one in votes
                ]
                order = negotiation.take(
                    [
                        msgspec.structs.replace(one, memory=_smaller(one.memory, left))
                        for one in covered
                    ]
                )
        finally:
            progress.ledger = _whole(negotiation.ledger(), left)
        progress.accepted = order
        progress.built = [vote.memory for vote in votes]
        return order

    def _negotiation(self, group: str, ranks: list[RankMemory]) -> KvNegotiation:
        own_encoder = self._encoder_of[group]
        reservations: list[Reservation] = []
        names: list[str] = []
        for name in self._encoders:
            published = self._reservations.of_group(name)
            if name == own_encoder:
                # The same processes: what their encoders need comes in with the votes.
                published = [msgspec.structs.replace(one, held=True) for one in published]
            reservations += published
            names += [f"{name} rank {one.rank}" for one in published]
        accepted = self._groups[group].accepted
        return KvNegotiation(
            self._policy if accepted is None else Rebuild(tokens=accepted.tokens),
            MemoryView(
                ranks=ranks,
                reservations=reservations,
                attempts=[],
                tokens_min=self._limits.block_size,
                **msgspec.structs.asdict(self._limits),
            ),
            encoders=[memory for ranks in self._encoders.values() for memory in ranks],
            together=bool(own_encoder),
            more=self._more,
            owner=group,
            encoder_names=names,
        )

    def _growth_within(self, group: str) -> tuple[dict[int, int], int]:
        """Return what encoders in the processes of a group reserve, by rank, and the most that one holds in a pause."""
        own = self._reservations.of_group(self._encoder_of[group])
        paused = [one.growth_bytes for one in own if one.pauses and self._pausing]
        return {one.rank: one.growth_bytes for one in own}, max(paused, default=0)

    def _left_to_others(self, group: str) -> dict[str, int]:
        """Return the bytes of each pool that a group must leave to others that generate from the same memory.

        To those that are sized: what their largest step takes beyond what they hold. To each that is not yet: as large
        a share of what is free as this group's own. A group that comes back takes no more than it had.
        """
        if self._groups[group].accepted is not None:
            return {}
        left: dict[str, int] = {}
        for pool in dict.fromkeys(rank.pool for rank in self._groups[group].loaded):
            sharing = {
                name: one
                for name, one in self._groups.items()
                if name != group and any(rank.pool == pool for rank in one.loaded)
            }
            waiting = [one for one in sharing.values() if one.accepted is None]
            built = [rank for one in sharing.values() for rank in one.built if rank.pool == pool]
            loaded = [
                rank
                for one in [self._groups[group], *sharing.values()]
                for rank in one.loaded
                if rank.pool == pool
            ]
            later_bytes = sum(max(rank.peak_bytes - rank.reserved_bytes, 0) for rank in built)
            free_bytes = min(rank.available_bytes for rank in [*loaded, *built]) - later_bytes
            share_bytes = max(free_bytes, 0) * len(waiting) // (len(waiting) + 1)
            left[pool] = later_bytes + share_bytes
        return left


def _smaller(memory: RankMemory, left: Mapping[str, int]) -> RankMemory:
    """Return a measurement as if the device had no room but what this group may take of it."""
    left_bytes = left.get(memory.pool, 0)
    return msgspec.structs.replace(
        memory,
        total_bytes=memory.total_bytes - left_bytes,
        available_bytes=max(memory.available_bytes - left_bytes, 0),
    )


def _whole(ledger: Ledger, left: Mapping[str, int]) -> Ledger:
    """Return a ledger with what was left to others among what nobody claims."""
    totals = {pool: total + left.get(pool, 0) for pool, total in ledger.totals.items()}
    lines = [line for line in ledger.lines if line.line != "unclaimed"]
    return Ledger.balanced(totals, lines, ledger.phases)


def _covering_encoder(
    vote: Sized, loaded_bytes: int, growth: Mapping[int, int], beside_bytes: int
) -> Sized:
    """Raise the peak of a process that encodes, too, to that of its worst batch beside the same KV cache.

    Its two stages take turns, so the larger of the two peaks is what it needs. A batch that pauses for steps holds up
    to `beside_bytes` meanwhile, which come on top of theirs.
    """
    memory = vote.memory
    if memory.rank not in growth:
        return vote
    batch_bytes = loaded_bytes + memory.kv_bytes + growth[memory.rank]
    peak_bytes = max(batch_bytes, memory.peak_bytes + beside_bytes)
    return msgspec.structs.replace(
        vote, memory=msgspec.structs.replace(memory, peak_bytes=peak_bytes)
    )
