"""A shell with in-process ranks: real worker groups, leaders and logs over an in-memory wire.

A rank reports when the test says so, so tests control the events between any two steps. Sampled tokens follow from the
tokens before them, so a stream that resumed after a loss differs from one that restarted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from tests.patience import NEVER_S
from tests.unit.rank.fake_plugin import Behaviour, FakeEncoder, FakeGenerator, expected_tokens
from tests.unit.rank.worker_groups import Place, Text, generate, read, start_groups
from vsched.aio.launcher import OwnHost, OwnLauncher
from vsched.aio.shell import Shell
from vsched.config import Config
from vsched.config.sections import DeadlinesConfig
from vsched.engine import Engine, RunningParts
from vsched.errors import RequestFailed
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import Event
from vsched.memory import Sized
from vsched.policy import Reservation
from vsched.testing import make_request
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import OnFrame, rank_identity
from vsched.types import FinishReason, Request, stage_of
from vsched.wire import (
    AcceptKv,
    EncodeResult,
    FollowerLog,
    GenerateResult,
    Hello,
    Loaded,
    LogEntry,
    RankReport,
    Ready,
    SizeKv,
    StepCheck,
    check_of,
    encode_report,
)
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.sizing import measure_rank
from vsched.worker.spec import GenerateRole, RankSpec
from vsched.worker.stage_rank import EncodeRank

BLOCKS = 100
DRAIN_S = 0.02
"""Short: only a test of the deadline waits for it."""
LIMITS = DeadlinesConfig(ready_s=NEVER_S, step_s=60, heartbeat_s=60, rank_timeout_s=60)
SEPARATE = (("encode",), ("generate",))
TOGETHER = (("encode", "generate"),)
TWO_GENERATE = (("encode",), ("generate-0",), ("generate-1",))
TWO_OF_EACH = (("encode-0",), ("encode-1",), ("generate-0",), ("generate-1",))
TWO_TOGETHER = (("encode-0", "generate-0"), ("encode-1", "generate-1"))
Groups = Sequence[Sequence[str]]
Result = GenerateResult | EncodeResult


class Wire:
    """A leader's link, and the frames sent to each rank."""

    def __init__(self, ranks: Ranks, address: str, on_frame: OnFrame) -> None:
        self.group = group_of(address)
        self.receive = on_frame
        self.frames: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._ranks = ranks
        ranks.wires[self.group] = self

    def send(self, rank: int, frame: bytes) -> bool:
        serves = stage_of(self.group) == "encode" or self._ranks.of(self.group, rank).serves
        if serves and (self.group, rank) in self._ranks.backlogged:
            self._ranks.backlogged.discard((self.group, rank))
            return False
        self.frames[rank].append(frame)
        asyncio.get_running_loop().call_soon(self._ranks.follow_orders, self.group, rank)
        return True

    def carry(self, entry: LogEntry) -> None: ...

    def read(self) -> None: ...

    def close(self) -> None:
        self.frames.clear()


def group_of(address: str) -> str:
    """Name of the group at a socket address, whose last part counts the starts."""
    return Path(address).name.rpartition("-")[0]


class Rank:
    """A rank without a process."""

    def __init__(self, ranks: Ranks, spec: RankSpec, on_exit: Callable[[int], None]) -> None:
        self.pid = ranks.starts
        self.exit = on_exit
        self.ended = False
        self.serves = False
        self.spec = spec
        self.number = spec.rank
        self._memory = measure_rank(FakeEncoder(), spec.rank)
        self._blocks = ranks.blocks
        arena = ranks.home.arena
        self._logs = {"encode": FollowerLog(), "generate": FollowerLog()}
        self._encode = EncodeRank(FakeEncoder(), arena.embeddings, arena.read)
        self._generate = None if spec.generate is None else _generate_rank(ranks, spec.generate)
        self.groups = [
            group_of(role.address) for role in (spec.encode, spec.generate) if role is not None
        ]

    def enter(self, ranks: Ranks) -> None:
        if self.ended:
            return
        for group in self.groups:
            ranks.say(group, Hello(self.number, self.spec.secret), self.number)
            if stage_of(group) == "encode":
                reservation = Reservation(
                    rank=self.number, pool=self._memory.pool, growth_bytes=0, held=False
                )
                ranks.say(group, Loaded(self._memory, reservation), self.number)
                ranks.say(group, Ready(0, {}), self.number)
            elif group not in ranks.mute:
                ranks.say(group, Loaded(self._memory), self.number)

    def follow_order(self, ranks: Ranks, group: str, frame: bytes) -> None:
        """Carry out an order about the KV cache, without building one."""
        match self._logs["generate"].accept(frame):
            case SizeKv():
                ranks.say(group, Sized("fits", "", self._memory), self.number)
            case AcceptKv():
                self.serves = True
                ranks.say(group, Ready(self._blocks, {}), self.number)

    def step(self, group: str, frame: bytes) -> Result | None:
        """Carry out an entry; a heartbeat has no result."""
        entry = self._logs[stage_of(group)].accept(frame)
        if isinstance(entry, EncodeDecision):
            return cast("EncodeResult", self._encode.apply(entry))  # never pauses
        if isinstance(entry, GenerateDecision):
            assert self._generate is not None
            return self._generate.apply(entry)
        return None

    async def wait_exit(self, *, grace_s: float) -> None:
        self.ended = True


def _generate_rank(ranks: Ranks, role: GenerateRole) -> GenerateRank:
    return GenerateRank(
        FakeGenerator(Behaviour()),
        ranks.home.arena.embeddings,
        slots=role.limits.slots,
        context_tokens=role.limits.context_tokens,
        block_size=role.limits.block_size,
    )


class FarHost(OwnHost):
    """The place of the ranks of one start, which may be lost."""

    name = "far"
    ranks: Ranks

    def close(self) -> None:
        self.ranks.places_closed += 1


class Ranks(OwnLauncher):
    """All ranks of a shell, past and present.

    Attributes:
        blocks: KV blocks that ranks report from now on.
        failures: Errors raised by the next starts, first to last; None for a start that succeeds.
        broken: Groups whose ranks cannot start.
        mute: Generate groups whose ranks never report that they have loaded.
        backlogged: Groups and ranks that do not take their next decision.
        lose_host: Loses the host of the last start, with a reason.
        places: Starts of worker groups; `places_closed` are those whose host was given back.
        pauses_s: Pauses between attempts to restart; none takes time while `pause_over` is set.
    """

    home: Place

    def __init__(self, run_dir: str) -> None:
        super().__init__(run_dir)
        self.lose_host: Callable[[str], None]
        self.places = self.places_closed = 0
        self.wires: dict[str, Wire] = {}
        self.made: list[Rank] = []
        self.blocks = BLOCKS
        self.failures: deque[Exception | None] = deque()
        self.broken: set[str] = set()
        self.mute: set[str] = set()
        self.backlogged: set[tuple[str, int]] = set()
        self.pauses_s: list[float] = []
        self.pause_over = asyncio.Event()
        self.pause_over.set()

    @property
    def starts(self) -> int:
        return len(self.made)

    def close(self) -> None:
        """No-op."""

    def choose_host(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> FarHost:
        self.lose_host = on_lost
        self.places += 1
        host = FarHost(self, arena, self.places)
        host.ranks = self
        return host

    def listen(self, address: str, on_frame: OnFrame) -> Wire:
        return Wire(self, address, on_frame)

    def start(self, spec: RankSpec, on_exit: Callable[[int], None]) -> Rank:
        failure = self.failures.popleft() if self.failures else None
        if failure is not None:
            raise failure
        rank = Rank(self, spec, on_exit)
        if self.broken.intersection(rank.groups):
            raise OSError("the device is gone")
        self.made.append(rank)
        asyncio.get_running_loop().call_soon(rank.enter, self)
        return rank

    def of(self, group: str, number: int = 0) -> Rank:
        """The latest rank of a group with this number."""
        return next(
            one for one in reversed(self.made) if group in one.groups and one.number == number
        )

    def say(self, group: str, report: RankReport, rank: int = 0) -> None:
        self.wires[group].receive(rank_identity(rank), encode_report(report))

    def follow_orders(self, group: str, number: int) -> None:
        """Let a rank that does not serve yet carry out its orders; later frames wait for `step`."""
        if stage_of(group) == "generate":
            rank, frames = self.of(group, number), self.wires[group].frames[number]
            while frames and not rank.serves:
                rank.follow_order(self, group, frames.popleft())

    def step(self, group: str = "generate", number: int = 0) -> Result:
        """Carry out the next decision of a group, without reporting the result."""
        result = None
        while result is None:
            result = self._next(group, number)
        return result

    def _next(self, group: str, number: int) -> Result | None:
        frame = self.wires[group].frames[number].popleft()
        return self.of(group, number).step(group, frame)

    def turn(self, group: str) -> None:
        """Have every rank of a group carry out the next entry, and report it."""
        wire = self.wires[group]
        result = self._next(group, 0)
        if result is not None:
            self.say(group, result)
        for number in [number for number, frames in wire.frames.items() if number and frames]:
            result = self._next(group, number)
            if result is not None:
                self.say(group, StepCheck(result.step, check_of(result)), number)

    def run(self, steps: int = 10_000, *, groups: Sequence[str] = ()) -> None:
        """Carry out and report pending decisions of all groups, or of some, encoders first."""
        for _ in range(steps):
            due = sorted(name for name in groups or self.wires if self._is_due(name))
            if not due:
                return
            self.turn(due[0])

    def run_all(self, steps: int) -> None:
        """Carry out this number of decisions of each group, if there are any."""
        for _ in range(steps):
            for name in list(self.wires):
                if self._is_due(name):
                    self.turn(name)

    def _is_due(self, group: str) -> bool:
        """Return True if a group has a decision to carry out and is not just loading."""
        serves = stage_of(group) == "encode" or self.of(group).serves
        return serves and bool(self.wires[group].frames[0])

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until a condition holds."""
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("the condition never held")


class Stream:
    """A submitted request, and the number of times it ended."""

    def __init__(
        self,
        shell: Shell,
        request: Request,
        *,
        max_tokens: int = 10,
        text: Text | None = None,
        end_error: Exception | None = None,
    ) -> None:
        self.ends = 0
        self.prompt = request.prompt_token_ids
        self._end_error = end_error
        self.generation = generate(
            shell, request, max_tokens=max_tokens, text=text, on_end=self._on_end
        )

    def _on_end(self) -> None:
        self.ends += 1
        if self._end_error is not None:
            raise self._end_error

    @property
    def reason(self) -> FinishReason | None:
        return self.generation.reason

    async def tokens(self) -> list[int]:
        """Read a stream to its end, which must have come."""
        assert self.ends == 1, "it has not ended, or ended more than once"
        return await read(self.generation)

    async def error(self) -> RequestFailed:
        """Read a stream that has failed."""
        with pytest.raises(RequestFailed) as caught:
            await self.tokens()
        return caught.value


async def check_tokens(streams: Sequence[Stream]) -> None:
    """Assert that all streams have the tokens that follow from their prompts."""
    for stream in streams:
        assert await stream.tokens() == expected_tokens(stream.prompt, 10)


class ShellHarness:
    """A started shell and its ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.ranks = Ranks(str(run_dir))
        self._place = self.ranks.home = Place(run_dir, self.ranks)
        self.shell: Shell
        real = asyncio.sleep

        async def sleep(delay_s: float, result: Any = None) -> Any:
            if delay_s:
                self.ranks.pauses_s.append(delay_s)
                await self.ranks.pause_over.wait()
            return await real(0, result)

        monkeypatch.setattr(asyncio, "sleep", sleep)

    async def start(self, groups: Groups = SEPARATE, *, ranks: int = 1) -> None:
        """Start worker groups for these groups, each with this number of ranks."""
        self.shell = await start_groups(
            self._place, groups, ranks=ranks, limits=LIMITS, drain_s=DRAIN_S
        )

    def engine(self) -> Engine:
        """Return an engine that serves with this shell alone."""
        engine = Engine(Config())
        absent: Any = Mock(spec=["check", "clear", "close"], check=AsyncMock())
        engine._running = RunningParts(
            arena=absent,
            launcher=absent,
            shell=self.shell,
            media=absent,
            grammars=absent,
            computes_prompt_logprobs=False,
            adapters=absent,
        )
        engine._state = "ready"
        return engine

    async def recover(self) -> None:
        """Wait until all groups are up."""
        await self.ranks.until(lambda: self.shell.healthy)

    async def run_out(self, streams: Sequence[Stream]) -> None:
        """Carry everything out, and assert that all streams have their tokens."""
        self.ranks.run()
        await check_tokens(streams)

    async def stop(self) -> None:
        """Stop, and forget the ranks, which have ended."""
        await self.shell.stop()
        assert all(rank.ended for rank in self.ranks.made), "a rank outlives its shell"
        self.ranks.made.clear()
        self.ranks.wires.clear()

    async def close(self) -> None:
        await self.stop()
        self._place.arena.close()


def fail_on(monkeypatch: pytest.MonkeyPatch, kind: type[Event]) -> None:
    """Let the scheduler raise at an event of this kind."""
    real = Scheduler.handle

    def handle(kernel: Scheduler, event: Event, now_ns: int) -> list[Command]:
        if isinstance(event, kind):
            raise KeyError("a state that cannot be")
        return real(kernel, event, now_ns)

    monkeypatch.setattr(Scheduler, "handle", handle)


PROMPTS = ([11, 12], [21, 22, 23], [31], [41, 42])
ITEM = (0, 6, b"a")


def streams_of(
    played: ShellHarness, count: int = 4, *, named: str = "r", steps: int = 0, **odd: Any
) -> list[Stream]:
    """Submit requests, which go to several generate groups in turn, and run steps; the second one is odd."""
    streams = [
        Stream(played.shell, make_request(f"{named}{index}", prompt), **(odd if index == 1 else {}))
        for index, prompt in enumerate(PROMPTS[:count])
    ]
    played.ranks.run_all(steps)
    return streams


def image_stream(
    played: ShellHarness, name: str = "image", item: tuple[int, int, bytes] = ITEM
) -> Stream:
    return Stream(played.shell, make_request(name, [7], [item]))


async def check_image_tokens(image: Stream) -> None:
    assert await image.tokens() == expected_tokens([5] * 6 + [7], 10)


def state_of(played: ShellHarness, group: str) -> object:
    """State of a group, on which shell and kernel must agree."""
    row = next(row for row in played.shell.group_rows() if row["name"] == group)
    kernel = played.shell.statistics()[stage_of(group)]["groups"][group]
    assert row["state"] == kernel["state"]
    return row["state"]
