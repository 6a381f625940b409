"""`vsched host`: starts ranks for engines, and forwards frames between the ranks and their leaders.

Ranks find the same environment as on the engine's host: a folder with the sockets of leaders, and an arena. The sockets
are links of `vsched.transport.zmq_link` whose frames are forwarded to the engine. The arena is filled with the bytes
that a decision reads before the decision is forwarded. Each start of a worker group has its own arena; only the parts
that are written use memory.

Anyone with the key can run code here: a specification names a plug-in to import.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial

import zmq

from vsched.aio.hosts.link import (
    VERSION,
    WINDOW_BYTES,
    Bye,
    ByteRange,
    Context,
    Exited,
    Fetch,
    Fetched,
    FromRank,
    HostSocket,
    Kill,
    Launch,
    Launched,
    Opened,
    OpenGroups,
    Refused,
    Stream,
    ToHost,
    ToRank,
    Unsent,
    Write,
    curve_keys,
)
from vsched.aio.launcher import Host, LaunchedRank, Launcher, LocalLauncher
from vsched.aio.leader import LeaderEnd
from vsched.errors import ConfigError, VschedError
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import is_pulse, rank_identity
from vsched.types import stage_of
from vsched.wire import ON_THE_WAY, EncodeResult, undamaged_report
from vsched.worker.memory import host_available
from vsched.worker.spec import shared_out, usable_cores

logger = logging.getLogger(__name__)
STARTS_MAX = 64
"""Starts of worker groups that a host serves at once."""
_FIRST = rank_identity(0)


class HostServer:
    """Serves all starts of worker groups that engines request; each is one peer of the socket.

    Attributes:
        name: Name of this host.
        cores: Number of cores that ranks share; None for all that this process may use.
        starts: Starts that have not ended, by peer.
        ending: Tasks that must finish before all ranks have ended.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        send: Callable[[bytes, bytes], bool],
        read: Callable[[], None],
        name: str = "",
        cores: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Create a server whose `receive` is called with each frame.

        `send` queues a frame for a peer and returns whether it could; `read` handles all frames that have arrived.
        """
        self.name = name or socket.gethostname()
        self.cores = cores
        self.window_bytes = window_bytes
        self.launcher = launcher
        self.send = send
        self.read = read
        self.starts: dict[bytes, HostedStart] = {}
        self.ending: set[asyncio.Task[None]] = set()
        self._closing = False

    def receive(self, peer: bytes, frame: bytes) -> None:
        """Handle a frame of a peer; an unknown peer begins a new start."""
        start = self.starts.get(peer)
        if start is None:
            if self._closing:
                return  # an engine that lost its ranks here reconnects at once; its connection ends soon
            if len(self.starts) >= STARTS_MAX:
                logger.warning("more than %d starts at a time: one was ignored", STARTS_MAX)
                return
            start = self.starts[peer] = HostedStart(self, peer)
        start.receive(frame)

    @property
    def pids(self) -> list[int]:
        return [pid for start in self.starts.values() for pid in start.pids]

    async def close(self) -> None:
        """End all ranks and accept no new starts.

        Blocks: until the ranks are killed.
        """
        self._closing = True
        for start in [*self.starts.values()]:
            start.refuse("is stopping")
        await asyncio.gather(*self.ending, return_exceptions=True)


class HostedStart:
    """One start of a worker group, on this host.

    Attributes:
        whose: The engine and its groups; None until they are known.
    """

    def __init__(self, server: HostServer, peer: bytes) -> None:
        self.whose: tuple[str, tuple[str, ...]] | None = None
        self._server = server
        self._peer = peer
        self._fetches: dict[tuple[str, int], list[ByteRange]] = {}
        self._arena: Arena | None = None
        self._place: Host | None = None
        self._links: dict[str, LeaderEnd] = {}
        self._ranks: dict[int, LaunchedRank] = {}
        self._running: set[int] = set()
        self._reported: set[int] = set()
        self._over = False
        self._alive_s = self._encouraged_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._stream = Stream(
            ToHost,
            None,
            send=partial(server.send, peer),
            take=self._on_message,
            write=self._write,
            on_broken=lambda why: self.stop_serving(f"the engine {why}"),
            window_bytes=server.window_bytes,
        )
        self.receive = self._stream.receive

    @property
    def pids(self) -> list[int]:
        return [self._ranks[rank].pid for rank in self._running if self._ranks[rank].pid]

    # --- messages of the engine ---

    def _on_message(self, message: ToHost) -> None:
        if isinstance(message, OpenGroups):
            self._open_groups(message)
        elif self._place is None:
            self._stream.fail("sent a message before its introduction")
        else:
            self._obey(message, self._place)

    def _open_groups(self, requested: OpenGroups) -> None:
        if self._place is not None:
            self._stream.fail("introduced itself twice")
            return
        if requested.version != VERSION:
            self.refuse(f"runs vsched {VERSION}, and the engine {requested.version}")
            return
        self.whose = (requested.engine, tuple(requested.groups))
        self._alive_s = requested.alive_s
        for start in [*self._server.starts.values()]:
            if start is not self and start.whose == self.whose:
                # The engine has given it up, even if its link stands.
                start.stop_serving("was replaced by a new start")
        launcher = self._server.launcher
        try:
            self._arena = self._stream.arena = Arena.create(requested.layout)
            # Nothing here is lost without its engine.
            self._place = launcher.choose_host(requested.groups, self._arena, lambda _why: None)
            for group in requested.groups:
                self._links[group] = self._place.open_link(group, partial(self._report, group))
        except (VschedError, OSError, zmq.ZMQError) as error:
            self.refuse(f"has no room: {error}")
            return
        logger.info("serves %s", " and ".join(requested.groups))
        self._stream.put(Opened())
        self._stream.watch(
            alive_s=requested.alive_s, silence_s=requested.silence_s, look=self._server.read
        )

    def refuse(self, why: str) -> None:
        self._stream.put(Refused(why))
        self.stop_serving(f"it {why}")

    def _obey(self, message: ToHost, place: Host) -> None:
        match message:
            case Launch():
                self._launch(message, place)
            case ToRank(group, rank, frame) if group in self._links:
                if not self._links[group].send(rank, frame):
                    self._links[group].read()  # its last report may say why
                    self._stream.put(Unsent(group, rank))
            case Fetch(group, step, ranges):
                self._fetches[group, step] = ranges
            case Kill(rank) if rank in self._ranks:
                self._keep(self._ranks[rank].wait_exit(grace_s=0))
            case Bye():
                self.stop_serving("the engine is done")
            case _:
                self._stream.fail(
                    f"sent {type(message).__name__} for an unknown group, rank or step"
                )

    def _launch(self, message: Launch, place: Host) -> None:
        rank = message.spec.rank
        try:
            cores = self._server.cores or usable_cores()
            spec = shared_out(message.spec, cores=cores, available_bytes=host_available())
            started = place.launch(spec, partial(self._exited, rank))
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
        """Tell ranks that the engine is alive: sending bytes may take longer than their timeout."""
        now_s = self._loop.time()
        if now_s - self._encouraged_s < self._alive_s:
            return
        self._encouraged_s = now_s
        for link in self._links.values():
            for rank in self._running:
                link.send(rank, ON_THE_WAY)

    # --- reports of ranks ---

    def _report(self, group: str, identity: bytes, frame: bytes) -> None:
        if self._over:
            return
        self._report_pids()
        if is_pulse(identity):
            self._stream.put_ahead(FromRank(group, identity, frame))
            return
        if identity == _FIRST and stage_of(group) == "encode":
            self._send_rows(group, frame)
        self._stream.put(FromRank(group, identity, frame))

    def _send_rows(self, group: str, frame: bytes) -> None:
        """Send the rows of a step ahead of its result; a damaged report is forwarded for the engine to detect."""
        report = undamaged_report(frame)
        if isinstance(report, EncodeResult):
            ranges = self._fetches.pop((group, report.step), ())
            for where in ranges if report.failure is None else ():
                self._stream.put_range(where)
            self._stream.put(Fetched(group, report.step))

    def _report_pids(self) -> None:
        for rank in self._running - self._reported:
            pid = self._ranks[rank].pid
            if pid:
                self._reported.add(rank)
                self._stream.put(Launched(rank, pid))

    def _exited(self, rank: int, code: int) -> None:
        self._running.discard(rank)
        if not self._over:
            for link in self._links.values():
                link.read()
            self._stream.put(Exited(rank, code))

    # --- the end ---

    def stop_serving(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        self._stream.close()
        if self.whose is not None:
            logger.info("serves %s no more: %s", " and ".join(self.whose[1]), why)
        self._keep(self._close_all())
        self._server.starts.pop(self._peer, None)

    async def _close_all(self) -> None:
        await asyncio.gather(*(self._ranks[rank].wait_exit(grace_s=0) for rank in [*self._running]))
        for link in self._links.values():
            link.close()
        if self._place is not None:
            self._place.close()
        if self._arena is not None:
            self._arena.close()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._server.ending.add(task)
        task.add_done_callback(self._server.ending.discard)


async def serve_host(
    address: str,
    shared: bytes,
    *,
    name: str,
    on_ready: Callable[[str], None],
    cores: int | None = None,
) -> None:
    """Serve engines until cancelled; `on_ready` gets the address, and ranks share `cores` cores.

    Raises:
        ConfigError: When the address cannot be bound.
    """
    launcher = LocalLauncher()
    context: Context = zmq.Context()
    server: HostServer
    try:
        try:
            link = HostSocket(
                context,
                address,
                curve_keys(shared, "host"),
                lambda peer, frame: server.receive(peer, frame),
            )
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--listen: cannot listen on {address}: {error}. Remedy: name an address of this host, such as "
                "tcp://0.0.0.0:7700"
            ) from error
        server = HostServer(launcher, send=link.send, read=link.read, name=name, cores=cores)
        on_ready(link.address)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()
            link.close()
    finally:
        launcher.close()
        context.destroy()
