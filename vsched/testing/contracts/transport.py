"""Contract suite for transports: the leader's end of a link and the ends of its ranks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from vsched.aio.leader import LeaderEnd
from vsched.testing.contracts.base import ContractBroken, demand, demand_members
from vsched.transport.zmq_link import OnFrame, rank_identity
from vsched.worker.member import MemberLink

_POLL_S = 0.001
_RANKS = 3


class Transport(Protocol):
    """The links of one group, as a `Launcher` opens them for a leader and ranks connect to them."""

    def listen(self, on_frame: OnFrame) -> LeaderEnd:
        """Open the leader's end, once, on the running event loop; `on_frame` gets sender and frame of each report."""
        ...

    def connect(self, rank: int) -> MemberLink:
        """Connect a rank after `listen`; its `receive()` without a timeout must not wait."""
        ...

    def close(self) -> None:
        """Release all resources; some ends may already be closed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Timeouts of the suite, on the event loop's clock, and the queue limit for a rank that does not read.

    Attributes:
        patience_s: Maximum time for sent frames to arrive.
        quiet_s: Time to wait for unexpected frames; later ones are not detected.
        frames_max: `send` must return False before this number of frames to a rank that never
            reads.
    """

    patience_s: float = 10.0
    quiet_s: float = 0.05
    frames_max: int = 20_000


async def check_transport(
    make: Callable[[], Transport], *, bounds: Bounds | None = None, seed: int = 0
) -> None:
    """Check that a transport satisfies its contract; each requirement is checked on a new one from `make`.

    Frames arrive whole, once and in order, at the addressed rank, or at the leader with the
    identity of their sender (`rank_identity`). `send` never waits, and returns False for a rank
    that never connected, has closed, or has not read for long; other ranks are not affected. A
    closed leader neither sends nor receives; the last frames of a closed rank arrive.

    Run it on the event loop that the transport is made for.

    Raises:
        ContractBroken: Names the requirement and the observed behaviour.
    """
    for check in CHECKS:
        rng = random.Random(f"{seed} {check.__name__}")  # noqa: S311 - repeatable, not secret
        transport = make()
        demand_members(transport, Transport, who=type(transport).__qualname__)
        bench = _TransportBench(transport, bounds or Bounds(), rng)
        try:
            await check(bench)
        except ContractBroken as error:
            raise ContractBroken(f"{type(transport).__qualname__}: {error}") from error
        finally:
            transport.close()


class _TransportBench:
    """A leader and its ranks, with the frames that each has received."""

    def __init__(self, transport: Transport, bounds: Bounds, rng: random.Random) -> None:
        self.bounds = bounds
        self.rng = rng
        self.received: list[tuple[bytes, bytes]] = []
        self.got: list[list[bytes]] = []
        self.ranks: list[MemberLink] = []
        self._transport = transport
        self.leader = transport.listen(lambda sender, frame: self.received.append((sender, frame)))
        demand_members(self.leader, LeaderEnd, who="the leader's end")

    async def meet(self, ranks: int = _RANKS) -> None:
        """Connect ranks; each sends a hello."""
        for rank in range(ranks):
            self.connect(rank).send(b"hello")
        await self.receive(ranks, "a hello of each rank")
        senders = sorted(sender for sender, _ in self.received)
        known = sorted(rank_identity(rank) for rank in range(ranks))
        demand(senders == known, f"reports came from {senders}, not from {known}")
        self.received.clear()

    def connect(self, rank: int) -> MemberLink:
        end = self._transport.connect(rank)
        demand_members(end, MemberLink, who="a rank's end")
        self.ranks.append(end)
        self.got.append([])
        return end

    def send(self, rank: int, frame: bytes) -> bool:
        """Send a frame to a rank, and check that the call returns immediately."""
        started_s = time.perf_counter()
        taken = self.leader.send(rank, frame)
        waited_s = time.perf_counter() - started_s
        demand(waited_s < 1.0, f"`send` must not wait, and took {waited_s:.1f} s")
        demand(isinstance(taken, bool), f"`send` must return True or False, not {taken!r}")
        return taken

    async def receive(self, count: int, what: str) -> None:
        """Wait until the leader has received `count` frames, then for unexpected ones."""
        await self._until(lambda: len(self.received) >= count)
        await self._settle()
        found = len(self.received)
        demand(
            found == count,
            f"the leader should receive {what}: {count} frames, but received {found}",
        )

    async def take(self, rank: int, count: int) -> list[bytes]:
        """Wait until a rank has received `count` frames, then for unexpected ones."""
        got = self.got[rank]

        def enough() -> bool:
            self._receive(rank)
            return len(got) >= count

        await self._until(enough)
        await self._settle()
        self._receive(rank)
        return got

    def _receive(self, rank: int) -> None:
        while (frame := self.ranks[rank].receive()) is not None:
            self.got[rank].append(frame)

    async def _until(self, condition: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.bounds.patience_s
        while not condition() and loop.time() < until_s:  # noqa: ASYNC110 - ends tell nobody
            await asyncio.sleep(_POLL_S)

    async def _settle(self) -> None:
        await asyncio.sleep(self.bounds.quiet_s)
        self.leader.read()

    def frames(self, count: int, what: str) -> list[bytes]:
        """Return distinct frames of random lengths."""
        rng = self.rng
        return [
            b"%s %d " % (what.encode(), n) + rng.randbytes(rng.randrange(300)) for n in range(count)
        ]


def _same(found: list[bytes], sent: list[bytes], who: str) -> None:
    """Check that the received frames are the sent ones.

    Raises:
        ContractBroken: Names missing, duplicate, unknown or reordered frames.
    """
    if found == sent:
        return
    unknown = [frame for frame in found if frame not in set(sent)]
    missing = [number for number, frame in enumerate(sent) if frame not in set(found)]
    if unknown:
        raise ContractBroken(f"{who} received a frame that nobody sent it so: {unknown[0][:40]!r}…")
    demand(
        not missing, f"{who} misses {len(missing)} of {len(sent)} frames, the first {missing[:1]}"
    )
    demand(len(found) == len(sent), f"{who} received {len(found)} frames of {len(sent)} sent")
    raise ContractBroken(f"{who} received the frames in another order")


async def check_decisions_arrive_in_order(bench: _TransportBench) -> None:
    """Check that every rank receives its decisions once and in order."""
    await bench.meet()
    sent = {rank: bench.frames(200, f"to {rank}") for rank in range(_RANKS)}
    for turn in range(200):
        for rank in bench.rng.sample(range(_RANKS), _RANKS):
            demand(bench.send(rank, sent[rank][turn]), f"frame {turn} to rank {rank} was refused")
        if turn % 50 == 0:
            await asyncio.sleep(0)
    for rank, frames in sent.items():
        _same(await bench.take(rank, len(frames)), frames, f"rank {rank}")


async def check_reports_arrive_in_order(bench: _TransportBench) -> None:
    """Check that each report is received once, with its sender's identity, while the leader sends as well."""
    await bench.meet()
    sent = {rank: bench.frames(200, f"from {rank}") for rank in range(_RANKS)}
    for turn in range(200):
        for rank in bench.rng.sample(range(_RANKS), _RANKS):
            bench.ranks[rank].send(sent[rank][turn])
        if turn % 20 == 0:
            bench.send(turn % _RANKS, b"meanwhile")
            bench.leader.read()
            await asyncio.sleep(0)
    await bench.receive(200 * _RANKS, "every report once")
    for rank, frames in sent.items():
        found = [frame for sender, frame in bench.received if sender == rank_identity(rank)]
        _same(found, frames, f"the leader, from rank {rank},")


async def check_frames_are_whole(bench: _TransportBench) -> None:
    """Check that frames may contain any bytes and have any length."""
    await bench.meet(1)
    lengths = [1, 2, 255, 256, 257, 65_535, 65_537, 1 << 20]
    sent = [bytes(range(256)), *(bench.rng.randbytes(length) for length in lengths)]
    for frame in sent:
        demand(bench.send(0, frame), f"a frame of {len(frame)} bytes was refused")
        bench.ranks[0].send(frame)
    _same(await bench.take(0, len(sent)), sent, "rank 0")
    await bench.receive(len(sent), "frames of all lengths")
    _same([frame for _, frame in bench.received], sent, "the leader")


async def check_unknown_ranks_get_nothing(bench: _TransportBench) -> None:
    """Check that frames to an unknown rank are never delivered and that `send` returns False."""
    await bench.meet(1)
    demand(not bench.send(1, b"for 1"), "`send` to a rank that was never there must return False")
    bench.connect(1)
    demand(bench.send(0, b"for 0"), "a frame to rank 0 was refused")
    _same(await bench.take(0, 1), [b"for 0"], "rank 0")
    _same(await bench.take(1, 0), [], "a rank that says nothing")


async def check_deaf_ranks_stall_nobody(bench: _TransportBench) -> None:
    """Check that a rank that never reads is reported soon, without loss, and without effect on other ranks."""
    await bench.meet(2)
    frame, taken = bench.rng.randbytes(4096), 0
    others: list[bytes] = []
    while bench.send(0, b"%d " % taken + frame):
        taken += 1
        demand(
            taken < bench.bounds.frames_max,
            f"`send` to a rank that never reads must return False at some time, and took {taken} frames",
        )
        if taken % 100 == 0:
            others.append(b"%d" % taken)
            demand(bench.send(1, others[-1]), "rank 1 got nothing because rank 0 does not read")
            _same(await bench.take(1, len(others)), others, "rank 1, next to one that never reads,")
    others.append(b"still here")
    demand(bench.send(1, others[-1]), "rank 1 got nothing because rank 0 does not read")
    _same(await bench.take(1, len(others)), others, "rank 1, next to one that never reads,")
    sent = [b"%d " % number + frame for number in range(taken)]
    _same(await bench.take(0, taken), sent, "a rank that reads late")


async def check_ranks_that_go_are_noticed(bench: _TransportBench) -> None:
    """Check that the last frames of a closed rank arrive, that `send` soon returns False, and that others continue."""
    await bench.meet(2)
    sent = [*bench.frames(20, "last words"), b"farewell"]
    for frame in sent:
        bench.ranks[0].send(frame)
    bench.ranks[0].close()
    await bench.receive(len(sent), "the last words of a rank that closes")
    _same([frame for _, frame in bench.received], sent, "the leader")
    loop = asyncio.get_running_loop()
    until_s = loop.time() + bench.bounds.patience_s
    while bench.send(0, b"anybody?"):
        demand(loop.time() < until_s, "`send` to a closed rank must soon return False")
        await asyncio.sleep(_POLL_S)
    demand(bench.send(1, b"you"), "rank 1 got nothing after rank 0 closed")
    _same(await bench.take(1, 1), [b"you"], "rank 1")


async def check_close_ends_everything(bench: _TransportBench) -> None:
    """Check that nothing is sent or received after `close`, which may be called twice."""
    await bench.meet(2)
    bench.leader.close()
    bench.leader.close()
    demand(not bench.send(0, b"late"), "`send` must return False after `close`")
    bench.ranks[1].send(b"too late")
    bench.leader.read()
    await bench.receive(0, "nothing after `close`")
    _same(await bench.take(0, 0), [], "rank 0, after the leader has closed,")
    demand(bench.ranks[0].receive(0.001) is None, "`receive` must return None without a frame")


CHECKS: tuple[Callable[[_TransportBench], Awaitable[None]], ...] = (
    check_decisions_arrive_in_order,
    check_reports_arrive_in_order,
    check_frames_are_whole,
    check_unknown_ranks_get_nothing,
    check_deaf_ranks_stall_nobody,
    check_ranks_that_go_are_noticed,
    check_close_ends_everything,
)
"""Checks of `check_transport`, in order."""
