"""A host's end: `vsched host`, which starts ranks for engines and passes on what they and their leaders say.

Ranks find here what they find beside an engine: a folder with the sockets of leaders, and an arena. The first are links
of `vsched.transport.zmq_link` whose frames go on to the engine, the second is filled with what decisions read before
they are passed on. Each start of a worker group has an arena of its own, of which only what is written takes memory.

Whoever has the key may run code here: a specification names a plug-in to import.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import msgspec
import zmq

from vsched.aio.hosts.keys import CurveKeys, PlainKeys, curve_keys
from vsched.aio.hosts.messages import (
    VERSION,
    Admit,
    Admitted,
    Bye,
    CutWay,
    Exited,
    Fetch,
    Fetched,
    FromRank,
    Held,
    Kill,
    Launch,
    Launched,
    Opened,
    OpenGroups,
    Pull,
    Reach,
    Reached,
    Refused,
    ToHost,
    ToRank,
    Unreached,
    Unsent,
    Write,
)
from vsched.aio.hosts.rows import Owed, RowSource, RowTaker, SourceEnd
from vsched.aio.hosts.sockets import Context, HostSocket
from vsched.aio.hosts.stream import WINDOW_BYTES, Stream
from vsched.aio.leader.link import LeaderEnd
from vsched.aio.replicas.launcher import Host, LaunchedRank, Launcher, LocalLauncher
from vsched.errors import ConfigError, VschedError
from vsched.policy import RankMemory, Reservation
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import is_pulse, rank_identity
from vsched.types import stage_of
from vsched.wire import (
    ON_THE_WAY,
    EncodeResult,
    Loaded,
    RankReport,
    Ready,
    Reserved,
    Sized,
    encode_report,
    undamaged_report,
)
from vsched.worker.memory import host_available
from vsched.worker.shares import shared_out, threads_of, usable_cores

logger = logging.getLogger(__name__)
STARTS_MAX = 64
"""Starts of worker groups that a host serves at a time."""
_FIRST = rank_identity(0)
Measured = TypeVar("Measured", RankMemory, Reservation)


class EntranceEnd(Protocol):
    """A port of a host; see `vsched.aio.hosts.sockets.Entrance`."""

    @property
    def port(self) -> int: ...

    def send(self, identity: bytes, frame: bytes) -> bool: ...

    def read(self) -> None: ...

    def admit(self, key: bytes, on_frame: Callable[[bytes, bytes], None]) -> None: ...

    def dismiss(self, key: bytes) -> None: ...


class HostEnd(EntranceEnd, Protocol):
    """The host's end of all links; see `vsched.aio.hosts.sockets.HostSocket`."""

    def plain(self) -> EntranceEnd: ...

    def reach(
        self,
        address: str,
        keys: CurveKeys | PlainKeys,
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
    ) -> SourceEnd: ...


class NearEnd:
    """The end of a host that no other host reaches."""

    port = 0

    def __init__(self, send: Callable[[bytes, bytes], bool], read: Callable[[], None]) -> None:
        self.send, self.read = send, read

    def admit(self, key: bytes, on_frame: Callable[[bytes, bytes], None]) -> None:
        """Nobody comes."""

    def dismiss(self, key: bytes) -> None:
        """Nobody was there."""

    def plain(self) -> NoReturn:
        """There is no second port."""
        raise AssertionError("an engine knows no address of a host without a way to others")

    def reach(self, *_: object) -> NoReturn:
        """There is no way to another host."""
        raise AssertionError("an engine knows no address of a host without a way to others")


class HostServer:
    """Serves every start of a worker group that engines ask for, by the identity of their peer."""

    def __init__(
        self,
        launcher: Launcher,
        link: HostEnd,
        *,
        name: str = "",
        cores: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Prepare; `link` has `hear` called.

        `cores` are those that ranks share; all that this process may run on, where it is None.
        """
        self.name = name or socket.gethostname()
        self._cores = cores
        self._window_bytes = window_bytes
        self._launcher = launcher
        self._link = link
        self._starts: dict[bytes, HostedStart] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = False

    def hear(self, peer: bytes, frame: bytes) -> None:
        """Take a frame of a peer, which may be a new one."""
        start = self._starts.get(peer)
        if start is None:
            if self._closing:
                return  # an engine that lost its ranks here is back at once; its connection ends in a moment
            if len(self._starts) >= STARTS_MAX:
                logger.warning("more than %d starts at a time: one was not heard", STARTS_MAX)
                return
            start = HostedStart(
                self._launcher,
                self._link,
                peer,
                name=self.name,
                cores=self._cores,
                window_bytes=self._window_bytes,
                on_open=self._replace,
                ending=self._ending,
            )
            self._starts[peer] = start
            start.on_end = partial(self._starts.pop, peer, None)
        start.hear(frame)

    def _replace(self, opened: HostedStart) -> None:
        """End what an engine started before for the same groups: it has given that up, though this may not know yet."""
        for start in [*self._starts.values()]:
            if start is not opened and start.whose == opened.whose:
                start.end("was replaced by a new start")

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks here."""
        return [pid for start in self._starts.values() for pid in start.pids]

    async def close(self) -> None:
        """End every rank, and start none any more.

        Blocks: for the moment that the system takes to kill.
        """
        self._closing = True
        for start in [*self._starts.values()]:
            start.refuse("is stopping")
        await asyncio.gather(*self._ending, return_exceptions=True)


class HostedStart:
    """One start of a worker group, on this host.

    Attributes:
        on_end: Called when it is over.
        whose: The engine and its groups; None before they are known.
    """

    def __init__(
        self,
        launcher: Launcher,
        link: HostEnd,
        peer: bytes,
        *,
        name: str,
        cores: int | None,
        window_bytes: int,
        on_open: Callable[[HostedStart], None],
        ending: set[asyncio.Task[None]],
    ) -> None:
        """Prepare; `ending` gets what has to be waited for until nothing of this runs."""
        self.on_end: Callable[[], object] = lambda: None
        self.whose: tuple[str, tuple[str, ...]] | None = None
        self._launcher = launcher
        self._link = link
        self._owed = Owed()
        self._takers: dict[bytes, RowTaker] = {}
        self._sources: dict[bytes, RowSource] = {}
        self._name = name
        self._cores = cores
        self._on_open = on_open
        self._arena: Arena | None = None
        self._place: Host | None = None
        self._links: dict[str, LeaderEnd] = {}
        self._ranks: dict[int, LaunchedRank] = {}
        self._running: set[int] = set()
        self._ending = ending
        self._ready: set[tuple[str, bytes]] = set()
        self._told: set[int] = set()
        self._over = False
        self._alive_s = self._encouraged_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._stream = Stream(
            ToHost,
            None,
            send=partial(link.send, peer),
            take=self._take,
            write=self._write,
            on_broken=lambda why: self.end(f"the engine {why}"),
            window_bytes=window_bytes,
        )
        self.hear = self._stream.hear

    @property
    def pids(self) -> list[int]:
        """Process ids of its ranks, as far as they run."""
        return [self._ranks[rank].pid for rank in self._running if self._ranks[rank].pid]

    # --- what the engine says ---

    def _take(self, message: ToHost) -> None:
        if isinstance(message, OpenGroups):
            self._open(message)
        elif self._place is None:
            self._stream.fail("spoke before it said who it is")
        else:
            self._obey(message, self._place)

    def _open(self, asked: OpenGroups) -> None:
        if self._place is not None:
            self._stream.fail("said twice who it is")
            return
        if asked.version != VERSION:
            self.refuse(f"runs vsched {VERSION}, and the engine {asked.version}")
            return
        try:
            self._arena = self._stream.arena = Arena.create(asked.layout)
        except VschedError as error:
            self.refuse(f"has no room: {error}")
            return
        self._asked = asked
        self.whose = (asked.engine, tuple(asked.groups))
        self._alive_s = asked.alive_s
        self._on_open(self)
        # Nothing here is lost without its engine.
        self._place = self._launcher.place(
            asked.groups, self._arena, lambda _why: None, lambda _pages: None
        )
        for group in asked.groups:
            self._links[group] = self._place.open_link(group, partial(self._report, group))
        logger.info("serves %s", " and ".join(asked.groups))
        self._stream.put(Opened(self._name))
        self._stream.watch(alive_s=asked.alive_s, silence_s=asked.silence_s, look=self._link.read)

    def refuse(self, why: str) -> None:
        """Tell the engine why it ends, and end it."""
        self._stream.put(Refused(why))
        self.end(f"it {why}")

    def _obey(self, message: ToHost, place: Host) -> None:
        match message:
            case Launch():
                self._launch(message, place)
            case ToRank(group, rank, frame) if group in self._links:
                if not self._links[group].send(rank, frame):
                    self._links[group].read()  # its last word tells more
                    self._stream.put(Unsent(group, rank))
            case Fetch():
                self._owed.ask(self._stream, message)
            case Held():
                self._encourage()
            case Admit() | Reach() | Pull() | CutWay():
                self._exchange(message)
            case Kill(rank) if rank in self._ranks:
                self._keep(self._ranks[rank].end(grace_s=0))
            case Bye():
                self.end("the engine is done")
            case _:
                self._stream.fail(f"sent {type(message).__name__} of what is not there")

    def _launch(self, message: Launch, place: Host) -> None:
        rank = message.spec.rank
        try:
            on_exit = partial(self._exited, rank)
            cores = self._cores or usable_cores()
            spec = shared_out(message.spec, cores=cores, available_bytes=host_available())
            started = place.launch(spec, threads=threads_of(spec), on_exit=on_exit)
        except Exception:
            logger.exception("rank %d could not be started", rank)
            self._stream.put(Exited(rank, 1))
            return
        self._ranks[rank] = started
        self._running.add(rank)

    def _write(self, message: Write) -> None:
        arena = self._arena
        if arena is None or message.offset + len(message.data) > arena.layout.total_bytes:
            self._stream.fail("sent bytes for no arena")
            return
        arena.put(message.offset, message.data)
        self._encourage()

    def _encourage(self) -> None:
        """Have ranks know that the engine lives: bytes may take longer than their patience, be it to the engine."""
        now_s = self._loop.time()
        if now_s - self._encouraged_s < self._alive_s:
            return
        self._encouraged_s = now_s
        for group, link in self._links.items():
            for rank in self._running:
                if (group, rank_identity(rank)) in self._ready:
                    link.send(rank, ON_THE_WAY)

    # --- other hosts ---

    def _exchange(self, message: Admit | Reach | Pull | CutWay) -> None:
        """Have rows go to other hosts, and come from them."""
        match message:
            case Admit(key, encrypted):
                self._admit(key, encrypted=encrypted)
            case Reach():
                self._reach(message)
            case Pull(number, key):
                source = self._sources.get(key)
                if source is None:
                    self._stream.put(Fetched(number, False))
                else:
                    source.pull(message, lambda came: self._stream.put(Fetched(number, came)))
            case CutWay(key):
                self._cut(key)

    def _admit(self, key: bytes, *, encrypted: bool) -> None:
        assert self._arena is not None, "a start that is open has one"
        try:
            entrance = self._link if encrypted else self._link.plain()
        except zmq.ZMQError as error:
            self._stream.put(Unreached(key, f"cannot listen on another port: {error}"))
            return
        taker = self._takers[key] = RowTaker(
            self._owed,
            self._arena,
            self._asked,
            send=entrance.send,
            read=entrance.read,
            on_broken=partial(self._cut, key),
        )
        entrance.admit(key, taker.hear)
        self._stream.put(Admitted(key, entrance.port))

    def _reach(self, asked: Reach) -> None:
        assert self._arena is not None, "a start that is open has one"
        key = asked.public

        def broken(why: str) -> None:
            self._sources.pop(key, None)
            self._stream.put(Unreached(key, why))

        source = self._sources[key] = RowSource(
            self._arena,
            self._asked,
            on_reached=lambda: self._stream.put(Reached(key)),
            on_broken=broken,
        )
        keys = (
            CurveKeys(asked.public, asked.secret, asked.host_key)
            if asked.encrypted
            else PlainKeys(asked.public, asked.secret)
        )
        source.begin(self._link.reach(asked.address, keys, source.hear, source.fail))

    def _cut(self, key: bytes) -> None:
        self._link.dismiss(key)
        taker, source = self._takers.pop(key, None), self._sources.pop(key, None)
        if taker is not None:
            taker.close()
        if source is not None:
            source.close()

    # --- what ranks say ---

    def _report(self, group: str, identity: bytes, frame: bytes) -> None:
        if self._over:
            return
        self._tell_pids()
        if is_pulse(identity):
            self._stream.put_ahead(FromRank(group, identity, frame))
            return
        if (group, _FIRST) in self._ready and identity == _FIRST and stage_of(group) == "encode":
            self._note_result(group, frame)
        elif (group, identity) not in self._ready:
            frame = self._name_pools(group, identity, frame)
        self._stream.put(FromRank(group, identity, frame))

    def _note_result(self, group: str, frame: bytes) -> None:
        """Send the rows of a step before its result; a damaged report goes on as it is, for the engine to find."""
        report = undamaged_report(frame)
        if isinstance(report, EncodeResult):
            self._owed.done(group, report.step, succeeded=report.failure is None)

    def _name_pools(self, group: str, identity: bytes, frame: bytes) -> bytes:
        """Return a report of a rank that starts: what it says of memory is said of this host's."""
        report = undamaged_report(frame)
        if report is None:
            return frame
        if isinstance(report, Ready):
            self._ready.add((group, identity))
        named = _with_pools_of(report, self._name)
        return frame if named is report else encode_report(named)

    def _tell_pids(self) -> None:
        for rank in self._running - self._told:
            pid = self._ranks[rank].pid
            if pid:
                self._told.add(rank)
                self._stream.put(Launched(rank, pid))

    def _exited(self, rank: int, code: int) -> None:
        self._running.discard(rank)
        if not self._over:
            for link in self._links.values():
                link.read()
            self._stream.put(Exited(rank, code))

    # --- the end ---

    def end(self, why: str) -> None:
        """Kill its ranks, and forget it."""
        if self._over:
            return
        self._over = True
        self._stream.close()
        for key in [*self._takers, *self._sources]:
            self._cut(key)
        if self.whose is not None:
            logger.info("serves %s no more: %s", " and ".join(self.whose[1]), why)
        self._keep(self._end())
        self.on_end()

    async def _end(self) -> None:
        await asyncio.gather(*(self._ranks[rank].end(grace_s=0) for rank in [*self._running]))
        for link in self._links.values():
            link.close()
        if self._place is not None:
            self._place.close()
        if self._arena is not None:
            self._arena.close()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _with_pools_of(report: RankReport, host: str) -> RankReport:
    """Return a report with this host's name behind the memories that it speaks of: no two hosts share one."""

    def named(one: Measured) -> Measured:
        return msgspec.structs.replace(one, pool=f"{one.pool} of {host}")

    match report:
        case Loaded() | Sized():
            return msgspec.structs.replace(report, memory=named(report.memory))
        case Reserved(memory, reservation):
            return Reserved(named(memory), named(reservation))
    return report


async def serve_host(
    address: str,
    shared: bytes,
    *,
    name: str,
    on_ready: Callable[[str], None],
    cores: int | None = None,
) -> None:
    """Serve engines until this is cancelled; `on_ready` is told where, and `cores` are those that ranks share.

    Raises:
        ConfigError: When the address cannot be listened on.
    """
    launcher = LocalLauncher()
    context: Context = zmq.Context()
    try:
        heard: list[Callable[[bytes, bytes], None]] = []
        try:
            link = HostSocket(
                context, address, curve_keys(shared, "host"), lambda *said: heard[0](*said)
            )
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--listen: cannot listen on {address}: {error}. Remedy: name an address of this host, such as "
                "tcp://0.0.0.0:7700"
            ) from error
        server = HostServer(launcher, link, name=name, cores=cores)
        heard.append(server.hear)
        on_ready(link.address)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()
            link.close()
    finally:
        launcher.close()
        context.destroy()
