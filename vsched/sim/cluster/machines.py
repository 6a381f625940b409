"""Other hosts of a simulated engine: the production `vsched host` on machines and links that fail.

Production code: placement, the streams of `vsched.aio.hosts` with their windows and timeouts, the
host server, and its ranks. Simulated: sockets, keys, and machines, which crash, stall and restart.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import NamedTuple

from vsched.aio.hosts.remote import PlacedLauncher
from vsched.aio.hosts.server import HostServer
from vsched.aio.launcher import Host, Launcher
from vsched.config import Config
from vsched.errors import ConfigError
from vsched.sim.faults import HostCrash, HostCut, HostFault, HostStall
from vsched.sim.loop import PLACE
from vsched.sim.network.links import HostLinkProfile, LinkDirection
from vsched.sim.ranks.rank_process import RUN_DIR, SimulatedLauncher, SimulatedRank
from vsched.sim.world import World
from vsched.transport.arena import Arena

CONNECT_RETRY_NS = 100_000_000
"""Retry interval of a refused connection; ZeroMQ's default."""
GREETING_BYTES = 500
"""Approximate size of a CURVE handshake, per direction."""


class Strike(NamedTuple):
    """A host fault, and the groups that ran on the host."""

    at_ns: int
    fault: HostFault
    groups: tuple[str, ...]


class Connection:
    """The connection of one start of a worker group to its host; for the engine, an `EngineEnd`.

    Attributes:
        boot: The run of the host that accepted it; None before.
        gone: Whether the host knows that the engine's end is closed.
        groups: Groups served over it.
    """

    def __init__(
        self,
        machine: FailingHost,
        identity: bytes,
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.boot: Boot | None = None
        self.gone = False
        self.closed = False
        self.groups: tuple[str, ...] = ()
        self._machine = machine
        self._loop = machine.world.loop
        self._on_frame = on_frame
        self._on_cut = on_cut
        self._engine = copy_context()
        self._said: list[bytes] = []
        self._greeted = False
        self._last_ns = dict.fromkeys((machine.there, machine.back), 0)
        self._under_way: dict[LinkDirection, deque[Callable[[], object]]] = {
            direction: deque() for direction in self._last_ns
        }
        self._connect()

    def _after(
        self, direction: LinkDirection, size: int, callback: Callable[..., object], *args: object
    ) -> None:
        """Schedule a call at the other end, after everything already sent in this direction."""
        due_ns = self._last_ns[direction] = max(
            self._last_ns[direction], direction.arrival_ns(size)
        )
        self._under_way[direction].append(partial(callback, *args))
        self._loop.call_at_ns(due_ns, self._next, direction, context=self._engine.copy())

    def _next(self, direction: LinkDirection) -> None:
        """Run the oldest pending call; timers due at the same moment are interchangeable."""
        self._under_way[direction].popleft()()

    # --- the engine's end ---

    def _connect(self) -> None:
        if not self.closed:
            self._after(self._machine.there, GREETING_BYTES, self._answer)

    def _answer(self) -> None:
        if self._machine.boot is None:
            due_ns = self._loop.now_ns() + CONNECT_RETRY_NS
            self._loop.call_at_ns(due_ns, self._connect, context=self._engine.copy())
            return
        self.boot = self._machine.boot
        self._after(self._machine.back, GREETING_BYTES, self._greet)

    def _greet(self) -> None:
        if not self.closed:
            self._greeted = True
            said, self._said = self._said, []
            for frame in said:
                self.send(frame)

    def send(self, frame: bytes) -> bool:
        """Send a frame, or queue it until the handshake is done."""
        if self._greeted:
            self._after(self._machine.there, len(frame), self._arrive, frame)
        else:
            self._said.append(frame)
        return not self.closed

    def _arrive(self, frame: bytes) -> None:
        boot = self._machine.boot
        if boot is not None and boot is self.boot:
            boot.queue_frame(self.identity, frame)
        elif boot is not None:  # the restarted host does not know this connection
            self._after(self._machine.back, 0, self.cut)

    def read(self) -> None:
        """No-op: frames are handled on arrival."""

    def cut(self) -> None:
        """Report to the engine that the connection broke."""
        if not self.closed:
            self._on_cut("closed the connection")

    def close(self) -> None:
        """Stop receiving; frames already sent still arrive."""
        if not self.closed:
            self.closed = True
            self._after(self._machine.there, 0, self._hang_up)

    def _hang_up(self) -> None:
        self.gone = True

    # --- the host's end ---

    def reply(self, frame: bytes) -> bool:
        """Send a frame to the engine; return False if the host knows that the engine's end is closed."""
        if not self.gone:
            self._after(self._machine.back, len(frame), self._receive, frame)
        return not self.gone

    def _receive(self, frame: bytes) -> None:
        if self.closed:
            self._after(self._machine.there, 0, self._hang_up)
        else:
            self._on_frame(frame)

    def break_off(self) -> None:
        """Close the connection after the host's process has ended."""
        self._after(self._machine.back, 0, self.cut)


class Boot:
    """One run of a host: its `vsched host` process and the ranks started by it.

    Attributes:
        ended: Whether the process has ended; its frames are dropped.
    """

    def __init__(self, machine: FailingHost, number: int) -> None:
        self.ended = False
        self._machine = machine
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._context = copy_context()
        self._context.run(PLACE.set, self)
        run_dir = f"{RUN_DIR}/{machine.name}-{number}"
        launcher = SimulatedLauncher(machine.world, run_dir, machine.ranks)
        self._server = HostServer(
            launcher,
            send=self._send,
            read=self._read,
            name=machine.name,
            cores=1,
            window_bytes=machine.profile.window_bytes,
        )

    def queue_frame(self, peer: bytes, frame: bytes) -> None:
        """Queue an arrived frame, to be read when the host runs."""
        self._inbox.append((peer, frame))
        self._machine.world.loop.call_soon(self._read, context=self._context.copy())

    def _read(self) -> None:
        while self._inbox and not self.ended:
            self._server.receive(*self._inbox.popleft())

    def _send(self, peer: bytes, frame: bytes) -> bool:
        return self.ended or self._machine.connections[peer].reply(frame)

    async def close(self) -> None:
        """Stop `vsched host` and its ranks.

        Blocks: no virtual time, unless the host is stalled.
        """
        await self._server.close()


class FailingHost:
    """Another host and the link to it.

    Attributes:
        there: The direction from the engine to the host.
        back: The direction from the host to the engine.
        boot: The current run; None while the host is down.
        connections: All connections ever opened, by the identity of the engine's end.
        ranks: All ranks ever started on it.
    """

    def __init__(
        self, world: World, name: str, profile: HostLinkProfile, ranks: list[SimulatedRank]
    ) -> None:
        self.world = world
        self.name = name
        self.profile = profile
        self.ranks = ranks
        self.connections: dict[bytes, Connection] = {}
        self.strikes: list[Strike] = []
        self.there, self.back = (
            LinkDirection(
                world.loop,
                world.generator(f"lane {name} {direction}"),
                world.injector,
                name,
                profile,
            )
            for direction in ("there", "back")
        )
        self._boots = 0
        self._down_until_ns = 0
        self._closing: list[asyncio.Task[None]] = []
        self.boot: Boot | None = None
        self._start()
        for fault in world.injector.plan.faults:
            if isinstance(fault, HostCrash | HostStall | HostCut) and fault.host == name:
                world.loop.call_at_ns(fault.at_ns, self._strike, fault)

    def _start(self) -> None:
        if self.boot is None and self.world.loop.now_ns() >= self._down_until_ns:
            self._boots += 1
            self.boot = Boot(self, self._boots)

    def connect(
        self, on_frame: Callable[[bytes], None], on_cut: Callable[[str], None]
    ) -> Connection:
        """Open a connection; see `vsched.aio.hosts.remote.Connect`."""
        identity = str(len(self.connections)).encode()
        made = self.connections[identity] = Connection(self, identity, on_frame, on_cut)
        return made

    def _strike(self, fault: HostCrash | HostStall | HostCut) -> None:
        boot, loop = self.boot, self.world.loop
        if boot is None:
            return
        served = [one for one in self.connections.values() if one.boot is boot and not one.closed]
        groups = tuple(group for one in served for group in one.groups)
        self.strikes.append(Strike(loop.now_ns(), fault, groups))
        if isinstance(fault, HostStall):
            self.world.injector.record_effect(fault)
            loop.stand_still(boot, fault.end_ns)
        elif isinstance(fault, HostCrash):
            self.world.injector.record_effect(fault)
            self.boot = None
            boot.ended = True
            self._closing.append(loop.create_task(boot.close()))
            self._down_until_ns = fault.end_ns
            loop.call_at_ns(fault.end_ns, self._start)
            for one in served if fault.mode == "killed" else ():
                one.break_off()

    async def close(self) -> None:
        """Stop the host for good."""
        if self.boot is not None:
            await self.boot.close()
        await asyncio.gather(*self._closing)


class SimulatedCluster:
    """Starts ranks as configured, on the engine's host or on simulated machines. Implements `Launcher`.

    Attributes:
        ranks: All ranks ever started, on all hosts.
        machines: Other hosts, by name.
        hosts: The other hosts on which each group has run.
    """

    def __init__(self, world: World, config: Config, profile: HostLinkProfile) -> None:
        """Create the machines.

        Raises:
            ConfigError: When a fault names an unknown host, or ranks are placed by Ray.
        """
        self.ranks: list[SimulatedRank] = []
        self.hosts: defaultdict[str, set[str]] = defaultdict(set)
        self._world = world
        own = SimulatedLauncher(world, ranks=self.ranks)
        self.run_dir = own.run_dir
        self.machines = {
            name: FailingHost(world, name, profile, self.ranks) for name in config.cluster.hosts
        }
        for fault in world.injector.plan.faults:
            if isinstance(fault, HostFault) and fault.host not in self.machines:
                known = ", ".join(self.machines) or "none"
                raise ConfigError(f"{fault.host}: no such host in cluster.hosts. Known: {known}")
        if config.on_ray:
            raise ConfigError(
                "cluster.ray: a simulated engine has no Ray. Remedy: list its hosts in cluster.hosts"
            )
        self._launcher: Launcher = own
        if config.cluster.elsewhere:
            hosts = {name: machine.connect for name, machine in self.machines.items()}
            self._launcher = PlacedLauncher(config, own, hosts, window_bytes=profile.window_bytes)

    def choose_host(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> Host:
        """Return the next host for these groups."""
        self._world.launches.update(groups)
        host = self._launcher.choose_host(groups, arena, on_lost)
        if host.name:
            made = [*self.machines[host.name].connections.values()][-1]
            made.groups = tuple(groups)
            for group in groups:
                self.hosts[group].add(host.name)
        return host

    def close(self) -> None:
        """Release everything; all ranks have ended."""
        self._launcher.close()

    @property
    def strikes(self) -> list[Strike]:
        """Faults that hit hosts, with the groups that ran there."""
        return [strike for machine in self.machines.values() for strike in machine.strikes]

    async def stop_machines(self) -> None:
        """Stop all machines."""
        for machine in self.machines.values():
            await machine.close()
