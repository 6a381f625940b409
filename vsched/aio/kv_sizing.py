"""How the KV caches of the generate groups come to their size, while their ranks wait.

Encode ranks publish what they reserve. When all have, and all generate groups have loaded, one negotiation sizes the
groups together: its ranks are those of all groups, so memory that several take from is shared out in one calculation,
whoever started first. The memory policy is asked, its orders go to every rank as entries of the decision logs, and all
vote on each. The groups get equal sizes: the kernel counts with the smallest.

Groups on memories of their own carry an order out at the same time. Those that share one drop what stands first, and
then take turns, so that each measures the others at rest.

What was accepted once is what a restarted group must build again, and what an encode rank published is what it keeps
after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from vsched.aio.leader.leader import Leader
from vsched.memory import (
    Accepted,
    HostShares,
    KvNegotiation,
    Ledger,
    LedgerLine,
    Rebuild,
    Reservations,
    on_host,
)
from vsched.policy import Build, MemoryPolicy, MemoryView, Probe, RankMemory, Reservation
from vsched.wire import Sized, SizeKv


class SizingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory policy is told besides measurements; see `MemoryView`. Bytes are those of a rank."""

    bytes_per_token: int
    block_size: int
    context_tokens: int
    batch_tokens: int
    slots: int
    state_bytes: int = 0


class Sizing:
    """Sizes the KV caches of all generate groups of a server.

    `generate` names them, each with the encode group that its processes serve, too, or with nothing; `encode` has the
    ranks of each encode group. `more` are lines of the ledger that no rank measures. With `pausing`, encoders that can
    pause do so for the steps of their processes. `host_free` returns what the host can still give, in bytes; without
    it, ranks on a CPU share nothing.
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
        host_free: Callable[[], int] | None = None,
    ) -> None:
        self._policy = policy
        self._pausing = pausing
        self._limits = limits
        self._encoder_of = dict(generate)
        self._more = more
        self._host_free = host_free
        self._reservations = Reservations(encode)
        self._published = asyncio.Event()
        self._encoders: dict[str, list[RankMemory]] = {name: [] for name in encode}
        self._leaders: dict[str, Leader] = {}
        self._loaded: dict[str, list[RankMemory]] = {}
        self._all_loaded = asyncio.Event()
        self._accepted: Accepted | None = None
        self._sized = asyncio.Event()
        self._ledger: Ledger | None = None
        self._pools: dict[str, str] = {}
        if not encode:
            self._published.set()

    @property
    def ledger(self) -> Ledger | None:
        """Where the memory of all groups went, at the peaks of the last attempt; None before there was one."""
        return None if self._ledger is None else self._ledger.with_pools(self._pools)

    def reserved_bytes(self, group: str, rank: int) -> int | None:
        """Return what an encode rank published at its first start and keeps from then on; None before."""
        known = self._encoders[group]
        return self._reservations.of_group(group)[rank].growth_bytes if known else None

    def waited_for(self, groups: Sequence[str]) -> str:
        """Say whom those of `groups` that generate wait for; empty when for nobody else."""
        waiting = [group for group in groups if group in self._encoder_of]
        if not waiting or not all(group in self._loaded for group in waiting):
            return ""
        others = [group for group in self._encoder_of if group not in self._loaded]
        return self._reservations.overdue() or (
            f"{', '.join(others)} has not loaded" if others else ""
        )

    async def publish(self, group: str, encode: Leader) -> None:
        """Take the reservations of an encode group as soon as all its ranks have told them.

        After a restart they are those of before: only the processes are others.
        """
        reports = await encode.reserved.complete
        memory = [report.memory for report in reports]
        if self._encoders[group]:
            self._replaced(self._encoders[group], memory)
            self._encoders[group] = memory
            return
        self._encoders[group] = memory
        for report in reports:
            self._reservations.publish(group, report.reservation)
        if not self._reservations.missing():
            self._published.set()

    async def lead(self, group: str, generate: Leader) -> None:
        """Take a generate group from its weights to an accepted KV cache.

        Blocks: until all groups have loaded and all encode ranks have published; then as long as the ranks of all
        groups take. The caller has the deadline, and `waited_for` tells what it passed on.

        Raises:
            DeviceOutOfMemory, MemoryLeak, PolicyError: As `KvNegotiation`; the first group raises for all.
        """
        loaded = await generate.loaded.complete
        self._leaders[group] = generate
        if self._accepted is None:
            self._loaded[group] = loaded
            accepted = await self._size_with_others(group)
        else:
            accepted = await self._rebuild(group, self._accepted, loaded)
        generate.accept(accepted.blocks)

    async def _size_with_others(self, group: str) -> Accepted:
        """Wait until all are there; the first group sizes all, and the others wait for it."""
        if len(self._loaded) == len(self._encoder_of):
            self._all_loaded.set()
        await self._published.wait()
        await self._all_loaded.wait()
        if group == next(iter(self._encoder_of)):
            shares = self._shares()
            negotiation = self._negotiation(self._policy, list(self._encoder_of), shares)
            try:
                self._accepted = await self._negotiate(negotiation, list(self._encoder_of), shares)
            finally:
                self._ledger = negotiation.ledger()
            self._sized.set()
        await self._sized.wait()
        assert self._accepted is not None, "just sized"
        return self._accepted

    async def _rebuild(self, group: str, accepted: Accepted, loaded: list[RankMemory]) -> Accepted:
        """Have a group that was lost build what it had; the shares of the others stay as they are."""
        self._replaced(self._loaded[group], loaded)
        self._loaded[group] = loaded
        shares = HostShares((), 0)
        negotiation = self._negotiation(Rebuild(tokens=accepted.tokens), [group], shares)
        return await self._negotiate(negotiation, [group], shares)

    def _shares(self) -> HostShares:
        """Return the shares of all ranks in the host's memory; the engine and the encoders have theirs first."""
        if self._host_free is None:
            return HostShares((), 0)
        kept_bytes = sum(line.bytes for line in self._more) + sum(
            one.growth_bytes
            for one in self._published_beside(self._encoder_of)
            if not one.held and on_host(one.pool)
        )
        ranks = [rank for group in self._encoder_of for rank in self._named(group)]
        return HostShares(ranks, self._host_free(), kept_bytes=kept_bytes)

    def _negotiation(
        self, policy: MemoryPolicy, groups: Sequence[str], shares: HostShares
    ) -> KvNegotiation:
        loaded = [rank for group in groups for rank in self._named(group)]
        view = MemoryView(
            ranks=_numbered(shares.within(loaded)),
            reservations=self._published_beside(groups),
            attempts=[],
            tokens_min=self._limits.block_size,
            **msgspec.structs.asdict(self._limits),
        )
        return KvNegotiation(
            policy,
            view,
            encoders=[memory for ranks in self._encoders.values() for memory in ranks],
            together=any(self._encoder_of[group] for group in groups),
            more=self._more,
            owner=_owner(groups),
            encoder_names=[
                f"{name} rank {rank.rank}"
                for name, ranks in self._encoders.items()
                for rank in ranks
            ],
            note=shares.note() + _told_together(groups),
        )

    def _published_beside(self, groups: Iterable[str]) -> list[Reservation]:
        """Return all reservations; what encoders in the processes of `groups` need comes in with the votes."""
        own = {self._encoder_of[group] for group in groups}
        return [
            msgspec.structs.replace(one, held=one.held or name in own)
            for name in self._encoders
            for one in self._reservations.of_group(name)
        ]

    async def _negotiate(
        self, negotiation: KvNegotiation, groups: Sequence[str], shares: HostShares
    ) -> Accepted:
        """Have the ranks of `groups` carry out what the policy asks for, until it accepts what stands."""
        chains = self._sharing(groups)
        order = negotiation.start()
        while not isinstance(order, Accepted):
            votes = await self._votes(chains, order, dropping=bool(negotiation.view.attempts))
            memory = _numbered(shares.within([vote.memory for vote in votes]))
            order = negotiation.take(
                [
                    msgspec.structs.replace(vote, memory=measured)
                    for vote, measured in zip(votes, memory, strict=True)
                ]
            )
        return order

    def _sharing(self, groups: Sequence[str]) -> list[list[str]]:
        """Return the groups in chains: those of one chain share memory, those of different chains do not."""
        chains: list[list[str]] = []
        pools = {group: {rank.pool for rank in self._loaded[group]} for group in groups}
        for group in groups:
            sharing = [chain for chain in chains if any(pools[one] & pools[group] for one in chain)]
            chains = [chain for chain in chains if chain not in sharing]
            chains.append([*(one for chain in sharing for one in chain), group])
        return chains

    async def _votes(
        self, chains: Sequence[Sequence[str]], order: Probe | Build, *, dropping: bool
    ) -> list[Sized]:
        """Return the votes of all ranks on an order, in the order of the groups.

        Where groups share memory, each drops its KV cache before one builds: what still stands of an earlier attempt
        would be in the way. A leak that shows then is the vote.
        """
        if dropping and any(len(chain) > 1 for chain in chains):
            drop = SizeKv(0, profile=False, headroom_bytes=0)
            dropped = await self._of_chains(chains, lambda group: self._leaders[group].size(drop))
            if any(vote.outcome == "leak" for vote in dropped):
                return dropped
        return await self._of_chains(chains, lambda group: self._carry_out(group, order))

    async def _of_chains(
        self, chains: Sequence[Sequence[str]], votes_of: Callable[[str], Awaitable[list[Sized]]]
    ) -> list[Sized]:
        found: dict[str, list[Sized]] = {}

        async def in_turn(chain: Sequence[str]) -> None:
            for group in chain:
                votes = await votes_of(group)
                names = self._named(group)
                found[group] = [
                    msgspec.structs.replace(
                        vote, memory=msgspec.structs.replace(vote.memory, owner=name.owner)
                    )
                    for vote, name in zip(votes, names, strict=True)
                ]

        await asyncio.gather(*(in_turn(chain) for chain in chains))
        return [vote for group in self._encoder_of if group in found for vote in found[group]]

    async def _carry_out(self, group: str, order: Probe | Build) -> list[Sized]:
        """Have the ranks of one group carry out an order; their votes count encoders in their processes, too."""
        own = self._reservations.of_group(self._encoder_of[group])
        growth = {one.rank: one.growth_bytes for one in own}
        paused = [one.growth_bytes for one in own if one.pauses and self._pausing]
        paused_bytes = max(paused, default=0)
        profile, headroom_bytes, probe = True, 0, isinstance(order, Probe)
        if isinstance(order, Build):
            profile, headroom_bytes = order.profile, order.headroom_bytes
            # In place of a batch that waits: so the steps beside it are proved, not only reckoned with.
            headroom_bytes += paused_bytes if profile else 0
        votes = await self._leaders[group].size(
            SizeKv(order.tokens, profile, headroom_bytes, probe=probe)
        )
        loaded = {rank.rank: rank.reserved_bytes for rank in self._loaded[group]}
        return [
            _covering_encoder(one, loaded[one.memory.rank], growth, paused_bytes if probe else 0)
            for one in votes
        ]

    def _named(self, group: str) -> list[RankMemory]:
        """Return what the ranks of a group measured after loading, with their names."""
        return [
            msgspec.structs.replace(rank, owner=f"{group} rank {rank.rank}")
            for rank in self._loaded[group]
        ]

    def _replaced(self, before: Sequence[RankMemory], after: Sequence[RankMemory]) -> None:
        """Other processes are in the place of lost ones: a memory that is named after its process has a new name."""
        for old, new in zip(before, after, strict=True):
            if old.pool not in self._pools.values():
                self._pools.setdefault(old.pool, new.pool)
            for pool, now in self._pools.items():
                if now == old.pool:
                    self._pools[pool] = new.pool


def _numbered(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the ranks of several groups with numbers that no two have."""
    return [msgspec.structs.replace(rank, rank=number) for number, rank in enumerate(ranks)]


def _owner(groups: Sequence[str]) -> str:
    return groups[0] if len(groups) == 1 else f"{groups[0]} to {groups[-1]}"


def _told_together(groups: Sequence[str]) -> str:
    if len(groups) == 1:
        return ""
    return f" {_owner(groups)} are sized together, and each gets the same: fewer generate.replicas need less."


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
