"""A replica whose ranks live in this process: the real crews, leaders and logs over a wire that is a list.

A rank answers when it is told to, so a test says what happens between any two steps. What it samples follows from the
tokens before, so that a stream that went on after a loss can be told from one that began anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.rank.crews import Place, kv_sizing, sizes
from tests.unit.rank.fake_plugin import Behaviour, FakeEncoder, FakeGenerator
from vsched.aio import crew as crew_module
from vsched.aio import leader as leader_module
from vsched.aio.leader import Deadlines
from vsched.aio.replica import Replica
from vsched.aio.stream import Generation
from vsched.errors import RequestFailed
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.policy import RankMemory, Reservation
from vsched.testing import default_policies
from vsched.transport.zmq_link import rank_identity
from vsched.types import FinishReason, Request, SamplingParams
from vsched.wire import (
    AcceptKv,
    EncodeResult,
    FollowerLog,
    GenerateResult,
    Hello,
    Loaded,
    Ready,
    Report,
    Reserved,
    Sized,
    SizeKv,
    encode_report,
)
from vsched.worker.encode_rank import EncodeRank
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.spec import GenerateRole, RankSpec

BLOCKS = 100
LIMITS = Deadlines(ready_s=5, step_s=60, heartbeat_s=60, rank_timeout_s=60)
SEPARATE = (("encode",), ("generate",))
TOGETHER = (("encode", "generate"),)
Groups = Sequence[Sequence[str]]
Result = GenerateResult | EncodeResult


class Wire:
    """A leader's link; `deaf` is a rank that does not read."""

    def __init__(
        self, ranks: Ranks, address: str, on_frame: Callable[[bytes, bytes], None]
    ) -> None:
        self.group = Path(address).name.partition("-")[0]
        self.hear = on_frame
        self.frames: deque[list[bytes]] = deque()
        self._ranks = ranks
        ranks.wires[self.group] = self

    def send(self, rank: int, frames: list[bytes]) -> bool:
        serves = self.group == "encode" or self._ranks.of(self.group).serves
        if serves and self.group in self._ranks.deaf:
            self._ranks.deaf.discard(self.group)
            return False
        self.frames.append(frames)
        asyncio.get_running_loop().call_soon(self._ranks.follow_orders, self.group)
        return True

    def close(self) -> None:
        self.frames.clear()


class Rank:
    """A rank process that is none."""

    def __init__(self, ranks: Ranks, spec: RankSpec, on_exit: Callable[[int], None]) -> None:
        self.pid = ranks.starts
        self.exit = on_exit
        self.ended = False
        self.serves = False
        self._memory = RankMemory(
            rank=0,
            pool="fake",
            total_bytes=1 << 30,
            available_bytes=1 << 30,
            reserved_bytes=0,
            weights_bytes=0,
        )
        self._spec = spec
        self._blocks = ranks.blocks
        arena, info = ranks.place.arena, spec.info
        self._logs = {"encode": FollowerLog(), "generate": FollowerLog()}
        self._encode = EncodeRank(
            FakeEncoder(Behaviour()), arena.embeddings, arena.read, patch_values=info.patch_values
        )
        role = spec.generate
        self._generate = None if role is None else _generate_rank(ranks, role)
        self.groups = [
            group
            for group, role in (("encode", spec.encode), ("generate", spec.generate))
            if role is not None
        ]

    def enter(self, ranks: Ranks) -> None:
        if self.ended:
            return
        for group in self.groups:
            ranks.say(group, Hello(0, self._spec.secret))
            if group == "encode":
                reservation = Reservation(rank=0, pool="fake", growth_bytes=0, held=False)
                ranks.say(group, Reserved(self._memory, reservation))
                ranks.say(group, Ready(0, {}))
            else:
                ranks.say(group, Loaded(self._memory))

    def follow_order(self, ranks: Ranks, frames: list[bytes]) -> None:
        """Carry out an order about the KV cache, of which nothing is built."""
        match self._logs["generate"].accept(frames):
            case SizeKv():
                ranks.say("generate", Sized("fits", "", self._memory))
            case AcceptKv():
                self.serves = True
                ranks.say("generate", Ready(self._blocks, {}))

    def step(self, group: str, frames: list[bytes]) -> Result | None:
        """Carry out an entry; a heartbeat has no result."""
        entry = self._logs[group].accept(frames)
        if isinstance(entry, EncodeDecision):
            return self._encode.apply(entry)
        if isinstance(entry, GenerateDecision):
            assert self._generate is not None
            return self._generate.apply(entry)
        return None

    async def end(self, *, grace_s: float) -> None:
        self.ended = True


def _generate_rank(ranks: Ranks, role: GenerateRole) -> GenerateRank:
    return GenerateRank(
        FakeGenerator(Behaviour()),
        ranks.place.arena.embeddings,
        slots=role.load.slots,
        context_tokens=role.load.context_tokens,
        block_size=role.load.block_size,
    )


class Ranks:
    """All ranks of a replica, past and present.

    Attributes:
        blocks: KV blocks that ranks report from now on.
        failures: What the next starts raise, first to last.
        deaf: Groups whose next decision is not taken.
        pauses_s: Pauses between attempts to restart; none takes time while `pause_over` is set.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.wires: dict[str, Wire] = {}
        self.made: list[Rank] = []
        self.blocks = BLOCKS
        self.failures: deque[Exception] = deque()
        self.deaf: set[str] = set()
        self.pauses_s: list[float] = []
        self.pause_over = asyncio.Event()
        self.pause_over.set()

    @property
    def starts(self) -> int:
        return len(self.made)

    def start(self, spec: RankSpec, *, threads: int, on_exit: Callable[[int], None]) -> Rank:
        if self.failures:
            raise self.failures.popleft()
        self.made.append(Rank(self, spec, on_exit))
        asyncio.get_running_loop().call_soon(self.made[-1].enter, self)
        return self.made[-1]

    def of(self, group: str) -> Rank:
        """The latest rank of a group."""
        return next(rank for rank in reversed(self.made) if group in rank.groups)

    def say(self, group: str, report: Report) -> None:
        self.wires[group].hear(rank_identity(0), encode_report(report))

    def follow_orders(self, group: str) -> None:
        """Let a rank that does not serve yet carry out what it is sent; what comes later waits for `step`."""
        frames = self.wires[group].frames
        while group == "generate" and frames and not self.of(group).serves:
            self.of(group).follow_order(self, frames.popleft())

    def step(self, group: str = "generate") -> Result:
        """Carry out the next decision of a group, and keep the result back."""
        result = None
        while result is None:
            result = self.of(group).step(group, self.wires[group].frames.popleft())
        return result

    def run(self, steps: int = 10_000) -> None:
        """Carry out what is decided, the encoder first, and report it."""
        for _ in range(steps):
            due = [name for name in ("encode", "generate") if self.wires[name].frames]
            if not due:
                return
            self.say(due[0], self.step(due[0]))

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until something holds."""
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to that")


class Text:
    """A detokenizer that raises at this many tokens, or at the end."""

    def __init__(self, *, push_at: int = 0, flush: Exception | None = None) -> None:
        self._push_at = push_at
        self._flush = flush
        self._taken = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._taken += len(token_ids)
        if self._taken == self._push_at:
            raise ValueError("no such token")
        return "." * len(token_ids)

    def flush(self) -> str:
        if self._flush is not None:
            raise self._flush
        return ""


class Stream:
    """A submitted request, and how often it ended."""

    def __init__(
        self,
        replica: Replica,
        request: Request,
        *,
        max_tokens: int = 10,
        text: Text | None = None,
        end_error: Exception | None = None,
    ) -> None:
        self.ends = 0
        self._end_error = end_error
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.generation = Generation(
            request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
            detokenizer=text or Text(),
            stop=(),
            stop_token_ids=frozenset(),
            logprobs=False,
            on_stop=replica.end,
            on_end=self._on_end,
        )
        replica.submit(msgspec.structs.replace(request, sampling=sampling), (), self.generation)

    def _on_end(self) -> None:
        self.ends += 1
        if self._end_error is not None:
            raise self._end_error

    @property
    def reason(self) -> FinishReason | None:
        return self.generation.reason

    async def tokens(self) -> list[int]:
        """Read a stream to its end, which must have come."""
        assert self.ends == 1, "it has not ended, or more than once"
        async with asyncio.timeout(1):
            return [token async for delta in self.generation for token in delta.token_ids]

    async def error(self) -> RequestFailed:
        """Read a stream that has failed."""
        with pytest.raises(RequestFailed) as caught:
            await self.tokens()
        return caught.value


class Played:
    """A started replica and its ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self._place = Place(run_dir)
        self.ranks = Ranks(self._place)
        real_context, self._place.context = self._place.context, self.ranks  # type: ignore[assignment]
        real_context.destroy(linger=0)
        self.replica: Replica
        monkeypatch.setattr(leader_module, "LeaderLink", Wire)
        monkeypatch.setattr(crew_module, "RankProcess", self.ranks.start)
        self._skip_pauses(monkeypatch)

    def _skip_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = asyncio.sleep

        async def sleep(delay_s: float, result: Any = None) -> Any:
            if delay_s:
                self.ranks.pauses_s.append(delay_s)
                await self.ranks.pause_over.wait()
            return await real(0, result)

        monkeypatch.setattr(asyncio, "sleep", sleep)

    async def start(self, groups: Groups = SEPARATE) -> None:
        sizing = kv_sizing(groups)
        self.replica = Replica(
            lambda events: [
                self._place.crew(events, groups=names, limits=LIMITS, sizing=sizing)
                for names in groups
            ],
            size=sizes,
            policies=default_policies(),
            on_progress=lambda *_: None,
        )
        await self.replica.start()

    async def close(self) -> None:
        await self.replica.stop()
        assert all(rank.ended for rank in self.ranks.made), "a rank outlives its replica"
        self._place.arena.close()
