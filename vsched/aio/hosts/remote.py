"""The engine's end of one start of a worker group on another host."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vsched.aio.hosts.exchange import Delivery, Exchange
from vsched.aio.hosts.messages import (
    VERSION,
    Admitted,
    Bye,
    ByteRange,
    Exited,
    Fetch,
    Fetched,
    FromRank,
    Kill,
    Launch,
    Launched,
    Opened,
    OpenGroups,
    Pull,
    Reached,
    Refused,
    ToEngine,
    ToHost,
    ToRank,
    Unreached,
    Unsent,
    Write,
)
from vsched.aio.hosts.rows import Due, Then
from vsched.aio.hosts.stream import WINDOW_BYTES, Stream
from vsched.aio.hosts.traffic import Traffic
from vsched.aio.replicas.launcher import OnExit
from vsched.kernel.decisions import EncodeDecision
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import OnFrame, rank_identity
from vsched.types import ArenaLayout
from vsched.wire import EncodeResult, LogEntry, undamaged_report
from vsched.worker.spec import RankSpec

logger = logging.getLogger(__name__)
KILL_S = 5.0
"""How long a host may take to say that a rank was killed; one that does not is given up."""
_FIRST = rank_identity(0)
LOST_CODE = 1
"""What ranks of a lost host are said to have ended with; the host's loss is told before."""


class EngineEnd(Protocol):
    """The engine's end of a link; see `vsched.aio.hosts.sockets.EngineSocket`."""

    @property
    def address(self) -> str: ...
    @property
    def host_key(self) -> bytes: ...
    @property
    def hung_up(self) -> int: ...

    def send(self, frame: bytes) -> bool: ...

    def read(self) -> None: ...

    def close(self) -> None: ...


Connect = Callable[[Callable[[bytes], None], Callable[[str], None]], EngineEnd]
"""Opens a link to a host: told who gets its frames, and whom to tell when the connection breaks."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long the sides of a link wait for each other, in seconds; `open_s` is 0 where a host is waited for."""

    alive_s: float
    silence_s: float
    open_s: float = 0.0


class RemoteHost:
    """Another host, for one start of a worker group.

    Attributes:
        groups: What is served there.
        stream: What carries everything to it.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        engine: str,
        groups: Sequence[str],
        arena: Arena,
        patience: Patience,
        exchange: Exchange,
        on_open: Callable[[], object],
        on_lost: Callable[[str], None],
        on_rows_lost: Callable[[Sequence[int]], None],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Ask the host to serve these groups; what is launched waits for its answer."""
        self.name = name
        self.opened = False
        self.groups = groups
        self.layout: ArenaLayout = arena.layout
        self._arena = arena
        self._exchange = exchange
        self._on_rows_lost = on_rows_lost
        self._patience = patience
        self._on_open = on_open
        self._on_lost = on_lost
        self._links: dict[str, RemoteLink] = {}
        self._ranks: dict[int, RemoteRank] = {}
        self._due = Due()
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._end: EngineEnd | None = None
        self.stream = self._stream = Stream(
            ToEngine,
            arena,
            send=self._send,
            take=self._take,
            write=self._write,
            on_broken=self._lose,
            window_bytes=window_bytes,
        )
        self._end = connect(self._stream.hear, self._stream.fail)
        open_s = patience.open_s
        self._opening = self._loop.call_later(open_s, self._miss) if open_s else None
        alive_s, silence_s = patience.alive_s, patience.silence_s
        self._stream.put(OpenGroups(VERSION, engine, [*groups], arena.layout, alive_s, silence_s))

    def _miss(self) -> None:
        """The host has not answered in time."""
        why = f"did not answer for {self._patience.open_s:g} s"
        if self._end is not None and self._end.hung_up:
            why += f" and hung up {self._end.hung_up} times. Remedy: see that it has the same key"
        self._stream.fail(why)

    @property
    def bytes_sent(self) -> int:
        """Bytes that went there."""
        return self._stream.bytes_sent

    @property
    def bytes_fetched(self) -> int:
        """Arena bytes that came from there."""
        return self._due.bytes_taken

    @property
    def hold_s(self) -> float:
        """How long a result may wait for rows that go elsewhere: less than a rank may be silent."""
        return self._patience.silence_s / 2

    @property
    def where(self) -> tuple[str, bytes]:
        """The address of the host, empty while it is not known, and its public key."""
        return ("", b"") if self._end is None else (self._end.address, self._end.host_key)

    def _send(self, frame: bytes) -> bool:
        return self._end is not None and self._end.send(frame)

    def open_link(self, group: str, on_frame: OnFrame) -> RemoteLink:
        """Return what passes a leader's frames on."""
        link = self._links[group] = RemoteLink(self, group, on_frame, self._exchange)
        return link

    def launch(self, spec: RankSpec, *, threads: int, on_exit: OnExit) -> RemoteRank:
        """Have a rank started."""
        rank = self._ranks[spec.rank] = RemoteRank(self, spec.rank, on_exit)
        del threads  # the host says, where the configuration does not
        self._stream.put(Launch(spec))
        return rank

    def kill(self, rank: int) -> None:
        """Have a rank killed."""
        self._stream.put(Kill(rank))

    def give_up(self, why: str) -> None:
        """Count the host as lost."""
        self._stream.fail(why)

    @property
    def lost(self) -> bool:
        """Whether nothing comes from there any more."""
        return self._stream.broken

    def read(self) -> None:
        """Take everything that has come."""
        if self._end is not None:
            self._end.read()

    def say(self, message: ToHost) -> bool:
        """Put a message into the stream."""
        return self._stream.put(message)

    def fetch(
        self, ranges: Sequence[ByteRange], then: Then, *, group: str = "", step: int = 0
    ) -> None:
        """Have bytes sent here, before the result of a step or at once."""
        number = self._expect(ranges, then)
        self.say(Fetch(number, group, step, [*ranges]))

    def pull(
        self, ranges: Sequence[ByteRange], then: Then, *, key: bytes, group: str, step: int
    ) -> None:
        """Have the host fetch bytes from another one, which it has reached with a key."""
        number = self._expect((), then)
        self.say(Pull(number, key, group, step, [*ranges]))

    def _expect(self, ranges: Sequence[ByteRange], then: Then) -> int:
        self._number += 1
        self._due.expect(self._number, ranges, then)
        if self.lost:
            self._due.fail()
        return self._number

    # --- hearing ---

    def _take(self, message: ToEngine) -> None:
        match message:
            case Opened():
                self._open()
            case Refused(why):
                self._stream.fail(why)
            case Launched(rank, pid) if rank in self._ranks:
                self._ranks[rank].pid = pid
            case FromRank(group, identity, frame) if group in self._links:
                self._links[group].hear(identity, frame)
            case Fetched() if self._due.settle(message):
                pass
            case Admitted(key, port):
                self._exchange.admitted(key, port)
            case Reached(key):
                self._exchange.reached(key)
            case Unreached(key, why):
                self._exchange.unreached(key, why)
            case Unsent(group, rank) if group in self._links:
                self._links[group].gone.add(rank)
            case Exited(rank, code) if rank in self._ranks:
                self._ranks[rank].ended(code)
            case _:
                self._stream.fail(f"sent {type(message).__name__} of what is not there")

    def _open(self) -> None:
        self.opened = True
        if self._opening is not None:
            self._opening.cancel()
        logger.info("host %s: connected", self.name)
        self._on_open()
        self._exchange.join(self)
        self._stream.watch(
            alive_s=self._patience.alive_s, silence_s=self._patience.silence_s, look=self.read
        )

    def _write(self, message: Write) -> None:
        """Take rows, where some are due: a host writes nowhere else."""
        if not self._due.write(message, self._arena):
            self._stream.fail("sent bytes that nobody asked for")

    def _lose(self, why: str) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._end is not None:
            self._end.close()
        logger.warning("host %s %s", self.name, why)
        self._on_lost(why)
        for rank in self._ranks.values():
            rank.ended(LOST_CODE)
        self._leave()

    def _leave(self) -> None:
        """What was in its arena is gone."""
        gone = self._exchange.leave(self)
        self._due.fail()
        if gone:
            self._on_rows_lost(gone)

    def close(self) -> None:
        """Say good-bye: what still runs there is killed."""
        if self._opening is not None:
            self._opening.cancel()
        self._stream.put(Bye())
        self._stream.close()
        if self._end is not None:
            self._end.close()
        self._leave()


class RemoteRank:
    """A rank on another host; `pid` is its number there, 0 while it is not told."""

    def __init__(self, host: RemoteHost, rank: int, on_exit: OnExit) -> None:
        self.pid = 0
        self._host = host
        self._rank = rank
        self._on_exit = on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ended(self, code: int) -> None:
        """It has, or its host is lost."""
        if not self._exited.done():
            self._exited.set_result(code)
            self._on_exit(code)

    async def end(self, *, grace_s: float) -> None:
        """Wait for it to end; have it killed when it has not after the grace.

        Blocks: at most the grace and `KILL_S`; then its host is given up.
        """
        if await self._wait(grace_s):
            return
        self._host.kill(self._rank)
        if not await self._wait(KILL_S):
            self._host.give_up(f"has not ended rank {self._rank} in {KILL_S:g} s")

    async def _wait(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._exited], timeout=timeout_s)
        return bool(done)


class RemoteLink:
    """The leader's end of a group whose ranks are on another host.

    Attributes:
        gone: Ranks that an entry did not get through to.
    """

    def __init__(self, host: RemoteHost, group: str, on_frame: OnFrame, exchange: Exchange) -> None:
        self.gone: set[int] = set()
        self._host = host
        self._group = group
        self._on_frame = on_frame
        self._exchange = exchange
        self._traffic = Traffic(host.layout)
        self._deliveries: deque[Delivery] = deque()
        self._held: deque[bytes] = deque()
        self._closed = False

    def carry(self, entry: LogEntry) -> None:
        """Send ahead what ranks read when they carry this entry out, and see to what they write."""
        for rows in self._traffic.read_by(entry):
            self._exchange.bring(self._host, rows)
        if isinstance(entry, EncodeDecision):
            for where in self._traffic.pixels_of(entry):
                self._host.stream.put_range(where)
            self._deliveries.append(self._exchange.begin(self._host, self._group, entry))

    def send(self, rank: int, frame: bytes) -> bool:
        """Queue a frame for a rank, never waiting; return False when it is gone or backlogged."""
        return (
            not self._closed
            and rank not in self.gone
            and self._host.say(ToRank(self._group, rank, frame))
        )

    def read(self) -> None:
        """Take everything that has come."""
        self._host.read()

    def hear(self, identity: bytes, frame: bytes) -> None:
        """Hand a report to the leader; the result of a batch, and what follows it, when its rows are where they go."""
        if identity == _FIRST and (self._held or self._deliveries):
            self._held.append(frame)
            self._release()
        elif not self._closed:
            self._on_frame(identity, frame)

    def _release(self) -> None:
        """Hand on what was held, as far as rows have come."""
        while self._held and not self._closed:
            frame = self._held[0]
            report = undamaged_report(frame) if self._deliveries else None
            if isinstance(report, EncodeResult):
                delivery = self._deliveries[0]
                if delivery.missing and report.failure is None:
                    self._wait(delivery)
                    return
                self._deliveries.popleft()
                delivery.then = None
                if report.failure is None:
                    self._exchange.finish(self._host, delivery)
            self._held.popleft()
            self._on_frame(_FIRST, frame)

    def _wait(self, delivery: Delivery) -> None:
        if delivery.then is None:
            loop = asyncio.get_running_loop()
            give_up = self._exchange.give_up
            loop.call_later(self._host.hold_s, give_up, self._host, delivery)
            delivery.then = self._release

    def close(self) -> None:
        """Hear nothing more."""
        self._closed = True
