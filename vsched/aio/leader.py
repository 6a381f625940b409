"""The deciding side of one group: its log, its link to the ranks, its heartbeat and its deadlines.

One timer serves all of it, due one interval after the last entry was sent. When it fires, the leader sends a heartbeat
if nothing was sent meanwhile, and looks whether a deadline has passed: of a step that is out, or of a rank that owes an
answer. So a gap is never longer than one interval, whatever the leader was doing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq

from vsched.kernel.decisions import Decision
from vsched.policy import RankMemory
from vsched.transport.zmq_link import LeaderLink, rank_identity
from vsched.wire import (
    AcceptKv,
    Beat,
    EncodeResult,
    Entry,
    Failure,
    GenerateResult,
    Heartbeat,
    Hello,
    LeaderLog,
    Loaded,
    Loading,
    Ready,
    Report,
    Reserved,
    Sized,
    SizeKv,
    Stop,
    decode_report,
)

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for ranks, in seconds; see the configuration section of the same name."""

    ready_s: float
    step_s: float
    heartbeat_s: float
    rank_timeout_s: float


class StepOut(NamedTuple):
    """A step whose result is due, and since when the ranks could have been working on it."""

    step: int
    since_s: float


class Presence:
    """When each rank was last heard, and the steps that are out: shared by the leaders of the same processes.

    A process that serves two groups answers one leader while the other waits: what either hears proves that it lives,
    and while a step of either is out, that step's deadline is the one that counts.
    """

    def __init__(self) -> None:
        self.heard_s: dict[int, float] = {}
        self.steps_out = 0


class _Roll(Generic[Answer]):
    """One answer of each rank; `complete` holds them, by rank, once there is none left to wait for."""

    def __init__(self, ranks: int) -> None:
        loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[list[Answer]] = loop.create_future()
        self._ranks = ranks
        self._answers: dict[int, Answer] = {}

    def answer(self, rank: int, answer: Answer) -> None:
        """Take the answer of a rank; the first counts."""
        self._answers.setdefault(rank, answer)
        if len(self._answers) == self._ranks and not self.complete.done():
            self.complete.set_result([self._answers[rank] for rank in range(self._ranks)])


class Leader:
    """Leads the ranks of one group.

    `on_result` gets each step's result once; `on_lost` is called once, with the reason, when the group cannot go on.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        secret: str,
        ranks: int,
        deadlines: Deadlines,
        on_result: Callable[[GenerateResult | EncodeResult], None],
        on_lost: Callable[[str], None],
        on_progress: Callable[[str, float], None],
        presence: Presence | None = None,
    ) -> None:
        assert secret, "an empty secret would let anybody in"
        self.name = name
        self.memory: dict[int, dict[str, int]] = {}
        self.loaded = _Roll[RankMemory](ranks)
        self.reserved = _Roll[Reserved](ranks)
        self.ready: asyncio.Future[list[Ready]] = asyncio.get_running_loop().create_future()
        self._votes = _Roll[Sized](ranks)
        self._secret = secret
        self._ranks = ranks
        self._deadlines = deadlines
        self._on_result = on_result
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._log = LeaderLog()
        self._link = LeaderLink(context, address, self._on_frame)
        self._known = {rank_identity(rank): rank for rank in range(ranks)}
        self._presence = presence or Presence()
        self._proved: set[int] = set()
        self._ready: dict[int, Ready] = {}
        self._sent_s = self._loop.time()
        self._steps_out: deque[StepOut] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    # --- sending ---

    def decide(self, decision: Decision) -> None:
        """Append a decision to the log and send it to every rank."""
        self._steps_out.append(StepOut(decision.step, self._loop.time()))
        self._presence.steps_out += 1
        self._append(decision)

    async def size(self, order: SizeKv) -> list[Sized]:
        """Have every rank carry out an order about its KV cache; return the votes of all, by rank.

        Blocks: as long as the slowest takes; whoever waits for the ranks to be ready has the deadline.
        """
        self._votes = _Roll[Sized](self._ranks)
        self._append(order)
        return await self._votes.complete

    def accept(self, blocks: int) -> None:
        """Tell the ranks to serve with the KV cache that stands."""
        self._append(AcceptKv(blocks))

    def stop(self) -> None:
        """Tell the ranks to finish and exit."""
        if not self._over:
            self._append(Stop())

    def _append(self, entry: Entry) -> None:
        frames = self._log.append(entry)
        self._sent_s = self._loop.time()
        for rank in range(self._ranks):
            if not self._link.send(rank, frames):
                self.lose(f"rank {rank} does not read its decisions")
                return

    def close(self) -> None:
        """Stop leading: no more callbacks."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        for waited_for in (self.ready, *(roll.complete for roll in self._rolls())):
            waited_for.cancel()
        self._link.close()

    def lose(self, reason: str) -> None:
        """Give the group up."""
        if not self._over:
            self._over = True
            self._on_lost(f"{self.name}: {reason}")

    # --- hearing ---

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        rank = self._known.get(identity)
        if rank is None or self._over:
            return
        try:
            report = decode_report(frame)
        except (msgspec.DecodeError, ValueError):
            if rank in self._proved:
                self.lose(f"rank {rank} sent a frame that is no report")
            return
        if isinstance(report, Hello):
            said, secret = report.secret.encode(), self._secret.encode()
            if report.rank == rank and hmac.compare_digest(said, secret):
                self._proved.add(rank)
                self._presence.heard_s[rank] = self._loop.time()
            return
        if rank not in self._proved:
            logger.warning("%s: dropped a report of a peer that did not prove itself", self.name)
            return
        self._presence.heard_s[rank] = self._loop.time()
        self._on_report(rank, report)

    def _on_report(self, rank: int, report: Report) -> None:
        match report:
            case GenerateResult() | EncodeResult():
                if rank == 0:  # all ranks compute the same; the first speaks for the group
                    self._take_result(report)
            case Beat(_, memory):
                self.memory[rank] = {**self.memory.get(rank, {}), **memory}
            case Loading(what, fraction):
                if rank == 0:
                    self._on_progress(what, fraction)
            case Loaded(memory):
                self.loaded.answer(rank, memory)
            case Reserved():
                self.reserved.answer(rank, report)
            case Sized():
                self._votes.answer(rank, report)
            case Ready():
                self.memory[rank] = report.memory
                self._ready[rank] = report
                if len(self._ready) == self._ranks and not self.ready.done():
                    self._begin()
            case Failure(kind, message):
                self.lose(f"rank {rank} stopped with {kind}: {message}")

    def _rolls(self) -> tuple[_Roll[Any], ...]:
        return self.loaded, self.reserved, self._votes

    def _begin(self) -> None:
        """All ranks are ready: from now on they owe answers, however early they were."""
        self._presence.heard_s.update(dict.fromkeys(self._proved, self._loop.time()))
        self._timer = self._loop.call_later(self._deadlines.heartbeat_s, self._tick)
        self.ready.set_result([self._ready[rank] for rank in range(self._ranks)])

    def _take_result(self, result: GenerateResult | EncodeResult) -> None:
        wanted = GenerateResult if self.name == "generate" else EncodeResult
        if not self._steps_out or not isinstance(result, wanted):
            self.lose("rank 0 sent a result of no step that is out")
            return
        out = self._steps_out.popleft()
        self._presence.steps_out -= 1
        if result.step != out.step:
            self.lose(f"rank 0 sent the result of step {result.step}, due was {out.step}")
            return
        if self._steps_out:
            # The next begins when the one before it is done.
            self._steps_out[0] = self._steps_out[0]._replace(since_s=self._loop.time())
        self._on_result(result)

    def _tick(self) -> None:
        if self._over:
            return
        now_s = self._loop.time()
        limits = self._deadlines
        if self._steps_out:
            waited_s = now_s - self._steps_out[0].since_s
            if waited_s > limits.step_s:
                self.lose(
                    f"a step took {waited_s:.0f} s, limit {limits.step_s:g} (deadlines.step_s)"
                )
                return
        elif not self._presence.steps_out:
            for rank, heard_s in self._presence.heard_s.items():
                if now_s - heard_s > limits.rank_timeout_s + limits.heartbeat_s:
                    self.lose(f"rank {rank} was silent for {now_s - heard_s:.0f} s")
                    return
        if now_s >= self._sent_s + limits.heartbeat_s:
            self._append(Heartbeat())
        due_s = self._sent_s + limits.heartbeat_s
        self._timer = self._loop.call_later(due_s - now_s, self._tick)
