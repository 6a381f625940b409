"""Sizes the KV caches of the generate groups while their ranks wait.

Encode ranks publish their reservations. When all have, and all generate groups have loaded, one negotiation sizes the
groups together: its ranks are the ranks of all groups, so memory that several take from is divided in one calculation,
whatever the order of starting. The orders of the memory policy go to every rank as entries of the decision logs, and
all vote on each. The groups get equal sizes: the kernel counts with the smallest.

Groups on separate memories carry an order out at the same time. Those that share one first drop their KV caches, and
then take turns, so that each measures the others at rest.

A restarted encode rank keeps its reservation. A restarted group builds the size that was accepted before, or a smaller
one if a step ran out of memory, or if something else has taken the memory meanwhile: its steps are then proved again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain

import msgspec

from vsched.aio.leader import Leader
from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.memory import (
    Accepted,
    HostShares,
    KvNegotiation,
    Ledger,
    LedgerLine,
    Sized,
    group_ledger,
    on_host,
    size_text,
)
from vsched.policy import Build, MemoryPolicy, MemoryView, Probe, RankMemory, Reservation
from vsched.wire import SizeKv

logger = logging.getLogger(__name__)

EIGHTHS_MIN = 4
"""Eighths of the accepted KV cache that a restarted group has at least."""
_PROCESS = re.compile(r"(?<=limit of )\d+|(?<=device of )\d+")
"""Process id in the name of a pool that one process has."""


class Sizing:
    """Sizes the KV caches of all generate groups of a server.

    `view` is the policy's view without measurements. `encode` has the number of ranks of each encode group; `generate`
    names the generate groups, each with the encode group in the same processes, or with nothing. `more` are lines of
    the ledger that no rank measures. With `pausing`, encoders that can pause do so for the steps of their processes.
    `host_free` returns the free memory of the engine's host, in bytes, which ranks on its CPU share.

    Attributes:
        ledger: Memory of all groups at the peaks of the last attempt; None before there was one.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        view: MemoryView,
        *,
        encode: Mapping[str, int],
        generate: Mapping[str, str],
        more: Sequence[LedgerLine] = (),
        pausing: bool = True,
        host_free: Callable[[], int],
    ) -> None:
        self._policy = policy
        self._view = view
        self._encode = dict(encode)
        self._encoder_of = dict(generate)
        self._more = more
        self._pausing = pausing
        self._host_free = host_free
        self._reserved: dict[str, list[Reservation]] = {}
        self._leaders: dict[str, Leader] = {}
        self._loaded: dict[str, list[RankMemory]] = {}
        self._hosts: dict[str, str] = {}
        self._complete = asyncio.Event()
        self._accepted: Accepted | None = None
        self._sized = asyncio.Event()
        self._eighths: dict[str, int] = {}
        self.ledger: Ledger | None = None

    def reserved_bytes(self, group: str, rank: int) -> int | None:
        """Reservation that an encode rank published at its first start and keeps from then on; None before."""
        reservations = self._reserved.get(group)
        return reservations[rank].growth_bytes if reservations else None

    def waited_for(self, groups: Sequence[str]) -> str:
        """Name the condition that generate groups among `groups` wait for; empty if there is none."""
        waiting = [group for group in groups if group in self._encoder_of]
        if not waiting or not all(group in self._loaded for group in waiting):
            return ""
        missing = [
            f"{group} rank {rank}"
            for group, ranks in self._encode.items()
            if group not in self._reserved
            for rank in range(ranks)
        ]
        if missing:
            ranks = sum(self._encode.values())
            return limit_message(
                "the KV cache cannot be sized before every encode rank has published what it reserves: "
                f"{', '.join(missing)} did not",
                value=f"{ranks - len(missing)} of {ranks} reservations",
                limit="all of them, within deadlines.ready_s",
                remedy="look for the reason in the log of the encode group, raise deadlines.ready_s, "
                "or give its size with encode.reserved, which skips the probe",
            )
        others = [group for group in self._encoder_of if group not in self._loaded]
        return f"{', '.join(others)} has not loaded" if others else ""

    async def publish(self, group: str, encode: Leader, host: str = "") -> None:
        """Take the reservations of an encode group once all its ranks have reported them; `host` is their host's name.

        After a restart the earlier reservations are kept; only the processes are new.
        """
        self._hosts[group] = host
        reports = await encode.loaded.complete
        self._loaded[group] = [self._named(group, report.memory) for report in reports]
        found = [report.reservation for report in reports if report.reservation is not None]
        self._reserved[group] = [
            msgspec.structs.replace(kept, pool=self._pool_of(group, new.rank, new.pool))
            for kept, new in zip(self._reserved.get(group, found), found, strict=True)
        ]
        self._check_complete()

    async def lead(self, group: str, generate: Leader, host: str = "") -> None:
        """Take a generate group from its weights to an accepted KV cache.

        Blocks: until all groups have loaded and all encode ranks have published; then as long as the ranks of all
        groups take. The caller has the deadline; `waited_for` explains a timeout.

        Raises:
            DeviceOutOfMemory, MemoryLeak, PolicyError: As `KvNegotiation`; the first group raises for all.
        """
        self._hosts[group] = host
        loaded = [self._named(group, one.memory) for one in await generate.loaded.complete]
        self._leaders[group] = generate
        self._loaded[group] = loaded
        accepted = self._accepted
        if accepted is None:
            accepted = await self._size_with_others(group)
        else:
            accepted = await self._rebuild(group, generate, accepted)
        generate.accept(accepted.blocks)

    def ran_out(self, groups: Sequence[str]) -> None:
        """Note that a step ran out of memory: the groups come back with an eighth less KV cache, down to a half."""
        for group in groups:
            self._eighths[group] = max(self._eighths.get(group, 8) - 1, EIGHTHS_MIN)

    async def _rebuild(self, group: str, generate: Leader, accepted: Accepted) -> Accepted:
        """Build the KV cache that was accepted before, in a restarted group, or one that fits.

        Raises:
            DeviceOutOfMemory: If none does that is large enough for every request.
        """
        view, message = self._view, ""
        blocks_min = min(-(-view.context_tokens // view.block_size), accepted.blocks)
        for eighths in range(self._eighths.get(group, 8), EIGHTHS_MIN - 1, -1):
            blocks = max(accepted.blocks * eighths // 8, blocks_min)
            tokens, smaller = blocks * view.block_size, blocks < accepted.blocks
            if smaller:
                votes = await self._carry_out(group, Build(tokens))
            else:
                votes = await generate.size(SizeKv(tokens, profile=False, headroom_bytes=0))
            failed = [vote for vote in votes if vote.outcome != "fits"]
            if not failed:
                if smaller:
                    logger.warning(
                        "%s: %d tokens of KV cache instead of %d%s",
                        *(group, tokens, accepted.tokens),
                        f": {message}" if message else ", after a step ran out of memory",
                    )
                return Accepted(tokens, blocks)
            message = failed[0].message
            if failed[0].outcome == "leak" or blocks == blocks_min:
                break
        raise DeviceOutOfMemory.of_limit(
            f"the generate group cannot build the KV cache that it had before it was lost ({message})",
            value=f"{accepted.tokens} tokens",
            limit="what is free on the device now",
            remedy="see what else takes the device's memory, or restart the server",
        )

    async def _size_with_others(self, group: str) -> Accepted:
        """Wait until all groups are there; the first group sizes all, and the others wait for it."""
        self._check_complete()
        await self._complete.wait()
        groups = list(self._encoder_of)
        if group == groups[0]:
            shares = self._shares()
            negotiation = self._negotiation(groups, shares)
            try:
                self._accepted = await self._negotiate(negotiation, groups, shares)
            finally:
                self.ledger = negotiation.ledger()
            self._sized.set()
        await self._sized.wait()
        assert self._accepted is not None, "just sized"
        return self._accepted

    def _check_complete(self) -> None:
        published = self._reserved.keys() == self._encode.keys()
        if published and self._loaded.keys() >= self._encoder_of.keys():
            self._complete.set()

    def _shares(self) -> HostShares:
        """Return the shares of all ranks in the host's memory, of which the engine and the encoders keep theirs."""
        kept_bytes = sum(line.bytes for line in self._more) + sum(
            one.growth_bytes for one in self._reservations() if not one.held and on_host(one.pool)
        )
        ranks = [rank for group in self._encoder_of for rank in self._loaded[group]]
        return HostShares(ranks, self._host_free(), kept_bytes=kept_bytes)

    def _negotiation(self, groups: Sequence[str], shares: HostShares) -> KvNegotiation:
        together = len(groups) > 1
        owner = f"{groups[0]} to {groups[-1]}" if together else groups[0]
        note = shares.limit_note()
        if together:
            note += f" {owner} are sized together, and each gets the same: fewer generate.replicas need less."
        loaded = [rank for group in groups for rank in self._loaded[group]]
        return KvNegotiation(
            self._policy,
            msgspec.structs.replace(
                self._view,
                ranks=_numbered(shares.within(loaded)),
                reservations=self._reservations(),
            ),
            ledger=partial(
                group_ledger,
                encoders=[rank for group in self._encode for rank in self._loaded[group]],
                together=any(self._encoder_of.values()),
                more=self._more,
                owner=owner,
            ),
            note=note,
        )

    def _reservations(self) -> list[Reservation]:
        """Return all reservations; encoders in the processes of generate groups count in the votes instead."""
        own = {*self._encoder_of.values()}
        return [
            msgspec.structs.replace(one, held=one.held or group in own)
            for group in self._encode
            for one in self._reserved[group]
        ]

    async def _negotiate(
        self, negotiation: KvNegotiation, groups: Sequence[str], shares: HostShares
    ) -> Accepted:
        """Have the ranks of all groups carry out the policy's orders until it accepts a build."""
        order = negotiation.first_order()
        while not isinstance(order, Accepted):
            votes = await self._votes(groups, order, dropping=bool(negotiation.attempts))
            memory = _numbered(shares.within([vote.memory for vote in votes]))
            order = negotiation.next_order(
                [
                    msgspec.structs.replace(vote, memory=measured)
                    for vote, measured in zip(votes, memory, strict=True)
                ]
            )
        return order

    async def _votes(
        self, groups: Sequence[str], order: Probe | Build, *, dropping: bool
    ) -> list[Sized]:
        """Return the votes of all ranks on an order, in the order of the groups.

        If groups share memory, all drop their KV caches before one builds: the caches of an earlier attempt would be
        in the way. A leak that this finds is the vote.
        """
        pools = {group: sorted({rank.pool for rank in self._loaded[group]}) for group in groups}
        turns = {pool: asyncio.Lock() for names in pools.values() for pool in names}

        async def votes_of(group: str, order: Probe | Build | None) -> list[Sized]:
            async with AsyncExitStack() as alone:
                for pool in pools[group]:
                    await alone.enter_async_context(turns[pool])
                votes = await self._carry_out(group, order)
            return [
                msgspec.structs.replace(vote, memory=self._named(group, vote.memory))
                for vote in votes
            ]

        async def votes_of_all(order: Probe | Build | None) -> list[Sized]:
            votes = await asyncio.gather(*(votes_of(group, order) for group in groups))
            return [*chain.from_iterable(votes)]

        if dropping and len(turns) < sum(map(len, pools.values())):
            dropped = await votes_of_all(None)
            if any(vote.outcome == "leak" for vote in dropped):
                return dropped
        return await votes_of_all(order)

    async def _carry_out(self, group: str, order: Probe | Build | None) -> list[Sized]:
        """Have the ranks of one group carry out an order, or drop their KV caches.

        Their votes on an order count encoders in their processes, too.
        """
        leader = self._leaders[group]
        if order is None:
            return await leader.size(SizeKv(0, profile=False, headroom_bytes=0))
        own = self._reserved.get(self._encoder_of[group], ())
        paused = [one.growth_bytes for one in own if one.pauses and self._pausing]
        paused_bytes = max(paused, default=0)
        profile, headroom_bytes, probe = True, 0, isinstance(order, Probe)
        if isinstance(order, Build):
            profile, headroom_bytes = order.profile, order.headroom_bytes
            # In place of a paused batch: so steps during a pause are proved, not only calculated.
            headroom_bytes += paused_bytes if profile else 0
        votes = await leader.size(SizeKv(order.tokens, profile, headroom_bytes, probe=probe))
        if not own:
            return votes
        growth = {one.rank: one.growth_bytes for one in own}
        needed = {
            rank.rank: rank.reserved_bytes + growth[rank.rank] for rank in self._loaded[group]
        }
        return [
            _covering_encoder(
                vote,
                needed[vote.memory.rank] + vote.memory.kv_bytes,
                paused_bytes if probe else 0,
                proves=not probe,
            )
            for vote in votes
        ]

    def _named(self, group: str, rank: RankMemory) -> RankMemory:
        pool = self._pool_of(group, rank.rank, rank.pool)
        return msgspec.structs.replace(rank, owner=f"{group} rank {rank.rank}", pool=pool)

    def _pool_of(self, group: str, rank: int, pool: str) -> str:
        """Name the memory of a process by its rank, which a restart keeps, instead of its process id, and by its host.

        No two hosts share memory.
        """
        generators = (name for name, encoder in self._encoder_of.items() if encoder == group)
        named = _PROCESS.sub(f"{next(generators, group)} rank {rank}", pool)
        host = self._hosts[group]
        return f"{host}: {named}" if host else named


def _numbered(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the ranks of several groups with unique numbers."""
    return [msgspec.structs.replace(rank, rank=number) for number, rank in enumerate(ranks)]


def _covering_encoder(vote: Sized, batch_bytes: int, paused_bytes: int, *, proves: bool) -> Sized:
    """Raise the peak of a process that also encodes to the peak of its largest batch next to the same KV cache.

    Its two stages take turns, so the larger of the two peaks is what it needs. A batch that pauses for steps holds
    `paused_bytes` meanwhile, in addition to their memory. With `proves`, a batch that does not fit is a vote against.
    """
    memory = vote.memory
    peak_bytes = max(batch_bytes, memory.peak_bytes + paused_bytes)
    vote = msgspec.structs.replace(
        vote, memory=msgspec.structs.replace(memory, peak_bytes=peak_bytes)
    )
    if not proves or vote.outcome != "fits" or batch_bytes <= memory.total_bytes:
        return vote
    return msgspec.structs.replace(
        vote,
        outcome="out_of_memory",
        message="the largest batch of images does not fit next to the KV cache: "
        f"{size_text(batch_bytes)} are needed of {size_text(memory.total_bytes)}",
    )
