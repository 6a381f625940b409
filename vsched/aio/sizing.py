"""How the KV cache of a generate group comes to its size, while its ranks wait.

Encode ranks publish what they reserve; when all have, the memory policy is asked, its orders go to every rank as
entries of the decision log, and all ranks vote on each. What was accepted once is what a restarted group must build
again: the kernel goes on with the blocks that it knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from vsched.aio.leader import Leader
from vsched.memory import Accepted, KvNegotiation, Ledger, LedgerLine, Rebuild, Reservations
from vsched.policy import Build, MemoryPolicy, MemoryView, Probe, RankMemory
from vsched.wire import Sized, SizeKv


class SizingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory policy is told besides measurements; see `MemoryView`."""

    bytes_per_token: int
    block_size: int
    context_tokens: int
    batch_tokens: int
    slots: int


class Sizing:
    """Sizes the KV cache of one generate group; `together` says that its processes encode, too.

    `ledger` is that of the last attempt, None before the first measurement.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        limits: SizingLimits,
        *,
        encode_ranks: int,
        together: bool,
        more: Sequence[LedgerLine] = (),
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._together = together
        self._more = more
        self._reservations = Reservations({"encode": encode_ranks})
        self._published = asyncio.Event()
        if not encode_ranks:
            self._published.set()
        self._encoders: list[RankMemory] = []
        self._accepted: Accepted | None = None
        self.ledger: Ledger | None = None

    def missing(self) -> list[str]:
        """Name the encode ranks whose reservation is not known; the KV cache cannot be sized before it is (B8)."""
        return self._reservations.missing()

    async def publish(self, encode: Leader) -> None:
        """Take the reservations of an encode group as soon as all its ranks have told them."""
        reports = await encode.reserved.complete
        self._encoders = [report.memory for report in reports]
        for report in reports:
            self._reservations.publish("encode", report.reservation)
        self._published.set()

    async def lead(self, generate: Leader) -> None:
        """Take the group from its weights to an accepted KV cache.

        Blocks: until all encode ranks have published; then as long as the ranks take. The caller has the deadline, and
        `missing` tells what it passed on.

        Raises:
            DeviceOutOfMemory, MemoryLeak, PolicyError: As `KvNegotiation`.
        """
        ranks = await generate.loaded.complete
        await self._published.wait()
        reservations = self._reservations.complete()
        if self._together:
            # The same processes: what their encoders need comes in with the votes, see below.
            reservations = [msgspec.structs.replace(one, held=True) for one in reservations]
        growth = {one.rank: one.growth_bytes for one in reservations if self._together}
        loaded = {rank.rank: rank.reserved_bytes for rank in ranks}
        policy = self._policy if self._accepted is None else Rebuild(tokens=self._accepted.tokens)
        negotiation = KvNegotiation(
            policy,
            MemoryView(
                ranks=ranks,
                reservations=reservations,
                attempts=[],
                tokens_min=self._limits.block_size,
                **msgspec.structs.asdict(self._limits),
            ),
            encoders=self._encoders,
            together=self._together,
            more=self._more,
        )
        try:
            order = negotiation.start()
            while not isinstance(order, Accepted):
                stress, canary_bytes = True, 0
                if isinstance(order, Build):
                    stress, canary_bytes = order.stress, order.canary_bytes
                votes = await generate.size(
                    SizeKv(order.tokens, stress, canary_bytes, probe=isinstance(order, Probe))
                )
                order = negotiation.take(
                    [_covering_encoder(vote, loaded[vote.memory.rank], growth) for vote in votes]
                )
        finally:
            self.ledger = negotiation.ledger()
        self._accepted = order
        generate.accept(order.blocks)


def _covering_encoder(vote: Sized, loaded_bytes: int, growth: dict[int, int]) -> Sized:
    """Raise the peak of a process that encodes, too, to that of its worst batch beside the same KV cache.

    Its two stages take turns, so the larger of the two peaks is what it needs, not their sum.
    """
    memory = vote.memory
    peak_bytes = loaded_bytes + memory.kv_bytes + growth.get(memory.rank, 0)
    if memory.rank not in growth or peak_bytes <= memory.peak_bytes:
        return vote
    return msgspec.structs.replace(
        vote, memory=msgspec.structs.replace(memory, peak_bytes=peak_bytes)
    )
