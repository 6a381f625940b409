"""Simulated rank processes: the production rank as a task, on a clock that runs ahead of the loop while it computes.

Between two waits, a rank runs at a single moment of loop time. Meanwhile its own clock advances by
the cost of its steps, and its messages leave once the loop has caught up. So ranks run the same
code as in a process, without waiting for time to pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from vsched.aio.launcher import OwnLauncher
from vsched.errors import CheckpointError, DeviceOutOfMemory, VschedError
from vsched.sim.faults import Hang, OutOfMemory, Slowdown, WorkerCrash
from vsched.sim.network.links import RankEnd, SimulatedLeaderEnd, wait_readable
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.plugin import RankPlugin
from vsched.sim.ranks.symbolic_workers import Process
from vsched.sim.world import World
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import OnFrame
from vsched.wire import Hello, Pulse, Stop, encode_report
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.member import (
    PULSES_PER_TIMEOUT,
    Member,
    Rank,
    RankHost,
)
from vsched.worker.spec import RankSpec

logger = logging.getLogger(__name__)
DEVICE_BYTES = 4 << 30
KILLED = -9
CRASHED = -11
LINGER_S = 0.02
"""Lifetime of a failing process, so that its last messages are delivered."""
RUN_DIR = "/simulated"


class SimulatedLink:
    """A rank's end of a link that sends frames at the rank's time."""

    def __init__(self, end: RankEnd, rank: SimulatedRank) -> None:
        self.end = end
        self._rank = rank

    def send(self, frame: bytes) -> None:
        """Send a report now, or when the loop has caught up."""
        self._rank.send(self.end, frame)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Return an arrived frame, or None."""
        return self.end.receive(timeout_s)

    def close(self) -> None:
        """Close the link."""
        self.end.close()


class Collective:
    """Barrier of the ranks of one start of a worker group: a step runs once all have arrived."""

    def __init__(self, world: World, ranks: int) -> None:
        self._world = world
        self._ranks = ranks
        self._missing: set[int] = set(range(ranks))
        self._met: asyncio.Future[None] = world.loop.create_future()
        self._lacking: set[int] | None = None

    async def meet(self, rank: int) -> None:
        """Wait until all ranks have reached this step; each arrives once before any arrives again."""
        self._missing.discard(rank)
        if self._missing:
            await asyncio.shield(self._met)
            return
        self._lacking = None
        self._met.set_result(None)
        self._met = self._world.loop.create_future()
        self._missing = set(range(self._ranks))

    def has_memory(self, rank: int, group: str) -> bool:
        """Return True if all ranks have memory for their common step; otherwise each fails once."""
        if self._lacking is None:
            faults = [
                self._world.injector.take_fault(
                    OutOfMemory, group=group, rank=one, such=lambda fault: fault.during == "step"
                )
                for one in range(self._ranks)
            ]
            found = all(fault is None for fault in faults)
            self._lacking = set() if found else set(range(self._ranks))
        if rank not in self._lacking:
            return True
        self._lacking.discard(rank)
        return False


class _Crashed(Exception):
    """The process ends without an error report."""


class SimulatedRank(Process):
    """One rank process; has the interface of `vsched.aio.launcher.RankProcess`."""

    def __init__(
        self,
        world: World,
        spec: RankSpec,
        *,
        collective: Collective,
        on_exit: Callable[[int], None],
    ) -> None:
        self.pid = world.next_pid()
        self.serving = False
        self.memory = SimulatedMemory(DEVICE_BYTES, pool=f"device of {self.pid}")
        self._world = world
        self._arena = Arena(spec.arena_fd, spec.layout)
        self._spec = spec
        self._collective = collective
        self._on_exit = on_exit
        self._ahead_ns = 0
        self._noise = world.generator(f"rank {self.pid}")
        self._outbox: deque[tuple[int, RankEnd, bytes]] = deque()
        self._at_end: list[Callable[[], None]] = []
        self._stopped_until_ns = 0
        self._groups: dict[str, str] = {}
        self._current = ""
        self._members: list[Member[SimulatedLink]] = []
        self._exited = world.loop.create_future()
        self._task = world.loop.create_task(self._live())

    # --- lifecycle ---

    async def wait_exit(self, *, grace_s: float) -> None:
        """Wait for the rank to end; kill it after the grace period."""
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._exited)
        except TimeoutError:
            self._task.cancel()
            await asyncio.shield(self._exited)

    async def _live(self) -> None:
        code = KILLED
        try:
            code = await self._run_rank()
        except asyncio.CancelledError:
            pass
        except _Crashed:
            code = CRASHED
        finally:
            for member in self._members:
                member.link.close()
            self._exited.set_result(code)
            self._on_exit(code)

    async def _run_rank(self) -> int:
        """Run like `vsched.rank.run`; return the exit code."""
        spec, world = self._spec, self._world
        host = RankHost(
            now_ns=self.now_ns,
            memory=dict,
            collect=int,
            load_worker=lambda _: RankPlugin(world, self),
        )
        for stage, role in spec.roles.items():
            end = world.network.connect(role.address, spec.rank)
            self._groups[stage] = end.group
            self._members.append(Member(spec, SimulatedLink(end, self), host))
        pulse = world.loop.create_task(self._pulse(self._members[0].link.end.address))
        try:
            rank = Rank(spec, self._arena, self._members, host)
            rank.load()
            await self._catch_up()
            await self._follow(rank)
        except _Crashed:
            raise
        except Exception as error:  # noqa: BLE001 - it is the rank's last word, whatever it is
            for member in self._members:
                member.report_failure(error)
            await self._catch_up()
            await asyncio.sleep(LINGER_S)
            return self._code_of(error)
        finally:
            pulse.cancel()
        return 0

    def _code_of(self, error: Exception) -> int:
        if not isinstance(error, VschedError):
            logger.error("a rank failed", exc_info=error)
            self._world.violate(f"{self._name} failed: {error!r}")
        return 2 if isinstance(error, CheckpointError | DeviceOutOfMemory) else 1

    @property
    def _name(self) -> str:
        return f"{' and '.join(self._groups.values())} rank {self._spec.rank}"

    async def _follow(self, rank: Rank[SimulatedLink]) -> None:
        while not rank.over:
            self.serving = rank.serving
            member = rank.next
            if member is None:
                await self._listen(rank)
                continue
            entry = member.entry
            self._current = member.link.end.group
            self._note_digest(member)
            is_step = member.log.turn > 0
            if is_step:
                await self._collective.meet(self._spec.rank)
            rank.advance()
            if is_step:
                await self._finish_step()
            elif not isinstance(entry, Stop):
                await self._catch_up()
        await self._catch_up()

    async def _listen(self, rank: Rank[SimulatedLink]) -> None:
        awaited = rank.awaited()
        ends = [member.link.end for member in awaited]
        received = await wait_readable(ends, rank.left_s()) or await wait_readable(
            ends, rank.grace_s
        )
        for member in awaited:
            member.listen(0)
        if not received:
            rank.received_nothing()

    def _note_digest(self, member: Member[SimulatedLink]) -> None:
        """Check that all ranks of a group have the same log."""
        log = member.log
        known = self._world.digests.setdefault((member.link.end.address, log.seq), log.digest)
        self._world.expect(
            known == log.digest,
            f"{self._name}: entry {log.seq} has different digests on two ranks",
        )

    # --- time ---

    def now_ns(self) -> int:
        """Return the rank's time: loop time plus the computing time since its last wait."""
        return self._world.loop.now_ns() + self._ahead_ns

    def send(self, end: RankEnd, frame: bytes) -> None:
        """Send a report now, or when the loop has caught up."""
        if self._ahead_ns or self._outbox:
            self._outbox.append((self.now_ns(), end, frame))
        else:
            end.send(frame)

    async def _finish_step(self) -> None:
        """Report a step at its end time, unless the process crashes before or after it."""
        await self._wait_for_loop(self.now_ns())
        for call in self._at_end:
            call()
        self._at_end.clear()
        self._crash("before_reply")
        await self._catch_up()
        self._crash("after_reply")

    def _crash(self, moment: str) -> None:
        fault = self._world.injector.take_fault(
            WorkerCrash,
            group=self._current,
            rank=self._spec.rank,
            such=lambda one: one.moment == moment,
        )
        if fault is not None:
            raise _Crashed

    async def _catch_up(self) -> None:
        """Wait until the loop reaches the rank's time, sending queued frames at their times."""
        until_ns = self.now_ns()
        while self._outbox:
            at_ns, end, frame = self._outbox[0]
            await self._wait_for_loop(at_ns)
            self._outbox.popleft()
            if not end.closed:
                end.send(frame)
        await self._wait_for_loop(until_ns)

    async def _wait_for_loop(self, until_ns: int) -> None:
        loop = self._world.loop
        if (left_ns := until_ns - loop.now_ns()) > 0:
            waiter = loop.create_future()
            timer = loop.call_at_ns(until_ns, waiter.set_result, None)
            try:
                await waiter
            finally:
                timer.cancel()
            self._ahead_ns = max(0, self._ahead_ns - left_ns)

    async def _pulse(self, address: str) -> None:
        """Send heartbeats as `PulseThread` does, except while the process hangs."""
        spec, loop = self._spec, self._world.loop
        end = self._world.network.connect(address, spec.rank, pulse=True)
        try:
            end.send(encode_report(Hello(spec.rank, spec.secret)))
            while True:
                await asyncio.sleep(spec.timeout_s / PULSES_PER_TIMEOUT)
                if loop.now_ns() >= self._stopped_until_ns:
                    end.send(encode_report(Pulse()))
        finally:
            end.close()

    # --- queries ---

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return not self._exited.done()

    def sequences(self, group: str) -> set[int] | None:
        """Return the numbers of the requests it holds for a generate group; None if it does not serve the group."""
        for member in self._members if self.serving else ():
            if member.link.end.group == group and isinstance(member.stage, GenerateRank):
                return set(member.stage.sequences)
        return None

    # --- calls by workers ---

    def spend(self, duration_ns: float) -> None:
        """Advance this rank's clock."""
        self._ahead_ns += int(duration_ns)

    def spend_step(self, duration_ns: float) -> None:
        """Advance the clock by a step, including slowdowns and hangs."""
        injector, group, rank = self._world.injector, self._current, self._spec.rank
        duration_ns *= 1 + self._world.delays.noise * self._noise.random()
        for slow in injector.active_faults(Slowdown, group=group, rank=rank):
            duration_ns *= slow.factor
        hang = injector.take_fault(Hang, group=group, rank=rank)
        if hang is not None:
            self._stopped_until_ns = max(self._stopped_until_ns, hang.end_ns)
        stopped_ns = max(0, self._stopped_until_ns - self.now_ns())
        self.spend(duration_ns + stopped_ns)

    def at_end(self, call: Callable[[], None]) -> None:
        """Schedule a call for the end of the step; it is dropped if the process ends before."""
        self._at_end.append(call)

    def has_memory(self, stage: str, during: str) -> bool:
        """Return False if an `OutOfMemory` fault is due."""
        group = self._groups[stage]
        if during == "step":
            return self._collective.has_memory(self._spec.rank, group)
        fault = self._world.injector.take_fault(
            OutOfMemory,
            group=group,
            rank=self._spec.rank,
            such=lambda one: one.during == during,
        )
        return fault is None


class SimulatedLauncher(OwnLauncher):
    """Starts simulated ranks, connected to their leaders over the simulated network.

    Attributes:
        ranks: All ranks ever started.
    """

    def __init__(
        self, world: World, run_dir: str = RUN_DIR, ranks: list[SimulatedRank] | None = None
    ) -> None:
        """Create a launcher with the host's `run_dir`; new ranks are appended to `ranks`."""
        super().__init__(run_dir)
        self.ranks: list[SimulatedRank] = [] if ranks is None else ranks
        self._world = world
        self._collectives: dict[str, Collective] = {}

    def listen(self, address: str, on_frame: OnFrame) -> SimulatedLeaderEnd:
        """Listen for the ranks of a group."""
        return self._world.network.listen(address, on_frame)

    def start(self, spec: RankSpec, on_exit: Callable[[int], None]) -> SimulatedRank:
        """Start a rank."""
        role = next(iter(spec.roles.values()))
        place = role.address
        if place not in self._collectives:
            self._collectives[place] = Collective(self._world, role.settings.ranks)
        together = self._collectives[place]
        rank = SimulatedRank(self._world, spec, collective=together, on_exit=on_exit)
        self.ranks.append(rank)
        return rank

    def close(self) -> None:
        """No-op."""
