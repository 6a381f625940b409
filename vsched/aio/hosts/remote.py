"""Worker groups on other hosts: the choice of a host for each start, and the engine's end of that start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zmq

from vsched.aio.hosts.link import (
    VERSION,
    WINDOW_BYTES,
    Bye,
    ByteRange,
    Connect,
    ConnectTo,
    Context,
    EngineEnd,
    EngineSocket,
    Exited,
    Fetch,
    Fetched,
    Find,
    FromRank,
    Kill,
    Launch,
    Launched,
    Opened,
    OpenGroups,
    Refused,
    Stream,
    ToEngine,
    ToRank,
    Unsent,
    Write,
    curve_keys,
    make_secret,
    read_key_file,
)
from vsched.aio.hosts.ray_hosts import InstalledRay, RayHosts
from vsched.aio.launcher import Host, Launcher, OnExit
from vsched.config import Config
from vsched.config.sections import OWN_HOST, RAY_HOST, DeadlinesConfig
from vsched.errors import VschedError
from vsched.kernel.decisions import ChunkPlan, EncodeDecision, EncodeTask, GenerateDecision
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import OnFrame
from vsched.types import ArenaLayout, ItemPlace, replica_of, stage_of
from vsched.wire import LogEntry
from vsched.worker.spec import RankSpec

logger = logging.getLogger(__name__)
ANSWER_S = 10.0
"""Time for a host that was looked up to answer; it may have moved meanwhile."""
KILL_S = 5.0
"""Time for a host to confirm that it killed a rank; after that it is given up."""
LOST_CODE = 1
"""Exit code reported for ranks of a lost host; the loss of the host is reported first."""


class RemoteHost:
    """Another host, for one start of a worker group."""

    def __init__(
        self,
        name: str,
        connect: Connect | tuple[Find, ConnectTo],
        *,
        engine: str,
        groups: Sequence[str],
        arena: Arena,
        deadlines: DeadlinesConfig,
        open_s: float,
        on_open: Callable[[], object],
        on_lost: Callable[[str], None],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Ask the host to serve these groups, within `open_s` if not 0; launches are queued until it answers.

        A host without a fixed address is looked up first, without a limit of time.
        """
        self.name = name
        self.layout: ArenaLayout = arena.layout
        self._arena = arena
        self._alive_s = deadlines.heartbeat_s
        self._silence_s = deadlines.rank_timeout_s + deadlines.heartbeat_s
        self._on_open = on_open
        self._on_lost = on_lost
        self._links: dict[str, RemoteLink] = {}
        self._ranks: dict[int, RemoteRank] = {}
        self._fetching: dict[tuple[str, int], Sequence[ByteRange]] = {}
        self._loop = asyncio.get_running_loop()
        self._end: EngineEnd | None = None
        self._unsent: list[bytes] = []
        self._opening: asyncio.TimerHandle | None = None
        self._seeking: asyncio.Task[None] | None = None
        self.stream = Stream(
            ToEngine,
            arena,
            send=self._send,
            take=self._on_message,
            write=self._write,
            on_broken=self._lose,
            window_bytes=window_bytes,
        )
        if isinstance(connect, tuple):
            self._seeking = self._loop.create_task(self._seek(*connect))
        else:
            self._connect(connect, open_s, ". Remedy: see that it runs, and has the same key")
        opening = OpenGroups(
            VERSION, engine, [*groups], arena.layout, self._alive_s, self._silence_s
        )
        self.stream.put(opening)

    async def _seek(self, find: Find, connect_to: ConnectTo) -> None:
        try:
            address = await find()
        except VschedError as error:
            self.stream.fail(f"was not found: {error}")
            return
        logger.info("looking for a host at %s", address)
        self._connect(connect_to(address), ANSWER_S, f" at {address}")
        if not all(map(self._send, self._unsent)):
            self.stream.fail("cannot be reached")

    def _connect(self, connect: Connect, open_s: float, hint: str) -> None:
        self._end = connect(self.stream.receive, self.stream.fail)
        if open_s:
            late = f"did not answer for {open_s:g} s{hint}"
            self._opening = self._loop.call_later(open_s, self.stream.fail, late)

    def _send(self, frame: bytes) -> bool:
        if self._end is None:
            self._unsent.append(frame)
            return True
        return self._end.send(frame)

    @property
    def sought(self) -> bool:
        """True if the address of the host is not known yet, so nothing has been started there."""
        return self._end is None

    def _close_link(self) -> None:
        for waiting in (self._opening, self._seeking):
            if waiting is not None:
                waiting.cancel()
        if self._end is not None:
            self._end.close()

    def open_link(self, group: str, on_frame: OnFrame) -> RemoteLink:
        link = self._links[group] = RemoteLink(self, group, on_frame)
        return link

    def launch(self, spec: RankSpec, on_exit: OnExit) -> RemoteRank:
        rank = self._ranks[spec.rank] = RemoteRank(self, spec.rank, on_exit)
        self.stream.put(Launch(spec))
        return rank

    def read(self) -> None:
        if self._end is not None:
            self._end.read()

    def fetch(self, group: str, step: int, ranges: list[ByteRange]) -> None:
        """Have arena bytes sent here before the result of a step."""
        self._fetching[group, step] = ranges
        self.stream.put(Fetch(group, step, ranges))

    # --- receiving ---

    def _on_message(self, message: ToEngine) -> None:
        match message:
            case Opened():
                self._on_opened()
            case Refused(why):
                self.stream.fail(why)
            case Launched(rank, pid) if rank in self._ranks:
                self._ranks[rank].pid = pid
            case FromRank(group, identity, frame) if group in self._links:
                self._links[group].receive(identity, frame)
            case Fetched(group, step) if (group, step) in self._fetching:
                del self._fetching[group, step]
            case Unsent(group, rank) if group in self._links:
                self._links[group].gone.add(rank)
            case Exited(rank, code) if rank in self._ranks:
                self._ranks[rank].ended(code)
            case _:
                self.stream.fail(
                    f"sent {type(message).__name__} for an unknown group, rank or step"
                )

    def _on_opened(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        logger.info("host %s: connected", self.name)
        self._on_open()
        self.stream.watch(alive_s=self._alive_s, silence_s=self._silence_s, look=self.read)

    def _write(self, message: Write) -> None:
        """Take embedding rows; a host may write only bytes that were requested from it."""
        start, stop = message.offset, message.offset + len(message.data)
        if any(
            where.offset <= start and stop <= where.offset + where.size
            for ranges in self._fetching.values()
            for where in ranges
        ):
            self._arena.put(start, message.data)
        else:
            self.stream.fail("sent bytes that were not requested")

    def _lose(self, why: str) -> None:
        self._close_link()
        logger.warning("host %s %s", self.name, why)
        self._on_lost(why)
        for rank in self._ranks.values():
            rank.ended(LOST_CODE)

    def close(self) -> None:
        """Send `Bye` and close the link; the host kills ranks that still run."""
        self.stream.put(Bye())
        self.stream.close()
        self._close_link()


class RemoteRank:
    """A rank on another host; `pid` is its process id there, 0 until it is reported."""

    def __init__(self, host: RemoteHost, rank: int, on_exit: OnExit) -> None:
        self.pid = 0
        self._host = host
        self._rank = rank
        self._on_exit = on_exit
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ended(self, code: int) -> None:
        """Report that the rank has ended, or that its host is lost."""
        if not self._exited.done():
            self._exited.set_result(code)
            self._on_exit(code)

    async def wait_exit(self, *, grace_s: float) -> None:
        """Wait for the rank to end; kill it after the grace period.

        Blocks: at most the grace period and `KILL_S`; then its host is given up.
        """
        if self._host.sought:
            self._host.stream.fail("has not been found")
        if await self._wait(grace_s):
            return
        self._host.stream.put(Kill(self._rank))
        if not await self._wait(KILL_S):
            self._host.stream.fail(f"has not ended rank {self._rank} in {KILL_S:g} s")

    async def _wait(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._exited], timeout=timeout_s)
        return bool(done)


class RemoteLink:
    """The leader's end of a group whose ranks are on another host.

    Attributes:
        gone: Ranks that could not be sent an entry.
    """

    def __init__(self, host: RemoteHost, group: str, on_frame: OnFrame) -> None:
        self.gone: set[int] = set()
        self._host = host
        self._group = group
        self._on_frame = on_frame
        self._traffic = Traffic(host.layout)
        self._closed = False

    def carry(self, entry: LogEntry) -> None:
        """Send the bytes that ranks read for this entry, and request the bytes that they write."""
        for where in self._traffic.read_by(entry):
            self._host.stream.put_range(where)
        if isinstance(entry, EncodeDecision):
            self._host.fetch(self._group, entry.step, written_by(self._host.layout, entry.tasks))

    def send(self, rank: int, frame: bytes) -> bool:
        return (
            not self._closed
            and rank not in self.gone
            and self._host.stream.put(ToRank(self._group, rank, frame))
        )

    def read(self) -> None:
        self._host.read()

    def receive(self, identity: bytes, frame: bytes) -> None:
        if not self._closed:
            self._on_frame(identity, frame)

    def close(self) -> None:
        self._closed = True


class Traffic:
    """Bytes read by one group's decisions; follows its log, because a chunk names a slot, not the request's images."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._items: dict[int, Sequence[ItemPlace]] = {}
        self._slots: dict[int, int] = {}

    def read_by(self, entry: LogEntry) -> list[ByteRange]:
        """Return the ranges that ranks read for the next entry of the log."""
        if isinstance(entry, EncodeDecision):
            return [ByteRange(task.extent.offset, task.extent.size) for task in entry.tasks]
        if not isinstance(entry, GenerateDecision):
            return []
        self._follow(entry)
        return [where for chunk in entry.chunks for where in self._rows_of(chunk)]

    def _follow(self, decision: GenerateDecision) -> None:
        for leave in decision.left:
            self._slots.pop(leave.slot, None)
            if not leave.keep:
                self._items.pop(leave.number, None)
        for number in decision.forgotten:
            self._items.pop(number, None)
        for join in decision.joined:
            finished = self._slots.get(join.slot)  # decisions do not say that a request finished
            if finished is not None:
                self._items.pop(finished, None)
            self._slots[join.slot] = join.number
            if join.data is not None:
                self._items[join.number] = join.data.items

    def _rows_of(self, chunk: ChunkPlan) -> list[ByteRange]:
        places = {place.offset: place for place in self._items[self._slots[chunk.slot]]}
        return [
            where
            for item in chunk.items
            for _, row, rows in places[item.offset].rows(chunk.start, chunk.stop)
            for where in row_ranges(self._layout, item.pages, row, row + rows)
        ]


def written_by(layout: ArenaLayout, tasks: Sequence[EncodeTask]) -> list[ByteRange]:
    """Return the ranges that the embedding rows of a batch are written to."""
    return [where for task in tasks for where in row_ranges(layout, task.pages, 0, task.tokens)]


def row_ranges(layout: ArenaLayout, pages: Sequence[int], start: int, stop: int) -> list[ByteRange]:
    """Return the ranges of rows [start, stop) of an embedding in these pages; adjacent ones are merged."""
    found: list[ByteRange] = []
    row = start
    while row < stop:
        page, first = divmod(row, layout.page_rows)
        past = min(layout.page_rows, first + stop - row)
        offset = (
            layout.embedding_offset + (pages[page] * layout.page_rows + first) * layout.row_bytes
        )
        size = (past - first) * layout.row_bytes
        if found and found[-1].offset + found[-1].size == offset:
            found[-1] = ByteRange(found[-1].offset, found[-1].size + size)
        else:
            found.append(ByteRange(offset, size))
        row += past - first
    return found


class PlacedLauncher:
    """Starts the worker groups of each stage on the hosts that are listed for it.

    Replica i uses the i-th host, and the next one when its host is lost or does not answer. The first start fails if a
    host does not answer. Later, the only host of a stage is waited for until the deadline for readiness; so is Ray,
    which may have to start nodes first.

    Attributes:
        run_dir: Of the engine's host.
    """

    def __init__(
        self,
        config: Config,
        own: Launcher,
        hosts: Mapping[str, Connect | tuple[Find, ConnectTo]],
        *,
        close: Callable[[], None] = lambda: None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Create a launcher with the configured placement and timeouts.

        `hosts` are the links by name, or how to look a host up and connect to its address; `RAY_HOST` in the
        configuration stands for the replica's `ray_host`.
        """
        cluster = config.cluster
        self.run_dir = own.run_dir
        self._own = own
        self._hosts = hosts
        self._stages = {stage: cluster.hosts_of(stage) for stage in ("encode", "generate")}
        if config.placement == "together":
            self._stages["encode"] = self._stages["generate"]
        self._deadlines = config.deadlines
        self._open_s = cluster.connect_s
        self._close = close
        self._window_bytes = window_bytes
        self._engine = secrets.token_hex(8)
        self._lost: Counter[str] = Counter()
        self._served: set[str] = set()

    def choose_host(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> Host:
        group = groups[-1]
        names = self._stages[stage_of(group)]
        name = names[(replica_of(group) + self._lost[group]) % len(names)]
        if name == OWN_HOST:
            return self._own.choose_host(groups, arena, on_lost)
        on_ray = name == RAY_HOST
        if on_ray:
            name = ray_host(stage_of(group), replica_of(group))
        waited_for = on_ray or (len(names) == 1 and group in self._served)

        def lost(why: str) -> None:
            self._lost[group] += 1
            on_lost(why)

        logger.info("%s: starting on host %s", " and ".join(groups), name)
        return RemoteHost(
            name,
            self._hosts[name],
            engine=self._engine,
            groups=groups,
            arena=arena,
            deadlines=self._deadlines,
            open_s=0.0 if waited_for else self._open_s,
            on_open=lambda: self._served.add(group),
            on_lost=lost,
            window_bytes=self._window_bytes,
        )

    def close(self) -> None:
        self._close()
        self._own.close()


def ray_host(stage: str, replica: int) -> str:
    """Return the host name of a replica that Ray places; it has a space, which no other host name has."""
    return f"{RAY_HOST} {stage}-{replica}"


def placed(config: Config, own: Launcher, *, ray: InstalledRay | None = None) -> PlacedLauncher:
    """Return a launcher for the hosts of a cluster."""
    cluster = config.cluster
    hosts: dict[str, Connect | tuple[Find, ConnectTo]] = {}
    with contextlib.ExitStack() as opened:
        context: Context = zmq.Context()
        opened.callback(context.destroy)
        if cluster.used & cluster.hosts.keys():
            shared = read_key_file(cluster.key_file, key="cluster.key_file")
            keys = curve_keys(shared, "engine")
            for name, address in cluster.hosts.items():
                hosts[name] = partial(EngineSocket, context, address, keys)
        on_ray = config.on_ray
        if on_ray:
            secret = make_secret()
            replicas = {ray_host(*which): resources for which, resources in on_ray.items()}
            ray_hosts = RayHosts(ray or InstalledRay(), cluster, replicas, secret)
            opened.callback(ray_hosts.close)
            own_keys = curve_keys(secret, "engine")

            def connect_to(address: str) -> Connect:
                return partial(EngineSocket, context, address, own_keys)

            for name, find in ray_hosts.finders().items():
                hosts[name] = find, connect_to
        closing = opened.pop_all()
    return PlacedLauncher(config, own, hosts, close=closing.close)
