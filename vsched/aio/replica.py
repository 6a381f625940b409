"""One replica: a kernel, the crews that carry its decisions out, and the streams of its requests.

Everything here runs on the event loop, and nothing between an event and the effects of its commands awaits. An event
that arises while commands are carried out (a stop string found in a token, say) waits until they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vsched.aio.crew import Crew, CrewEvents
from vsched.aio.stream import Generation, TokenLogprob
from vsched.errors import GroupLost as GroupLostError
from vsched.errors import RequestRefused, VschedError
from vsched.kernel import KernelPolicies, Scheduler, Sizes
from vsched.kernel.commands import (
    Accept,
    Command,
    Decide,
    EmitTokens,
    Finish,
    Notice,
    Refuse,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.events import (
    Aborted,
    Cleared,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    Stepped,
    Submitted,
    Timer,
)
from vsched.types import FinishReason, Request
from vsched.wire import EncodeResult, GenerateResult, Ready

logger = logging.getLogger(__name__)
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0)
"""Pauses before attempts to bring a lost crew back; after the last, the replica stays down."""
CrewFactory = Callable[[CrewEvents], list[Crew]]


class Replica:
    """Serves requests with one encode and one generate group."""

    def __init__(
        self,
        crews: CrewFactory,
        *,
        size: Callable[[int], Sizes],
        policies: KernelPolicies,
        on_progress: Callable[[str, str, float], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Prepare a replica; `size` gives the kernel's limits for a number of KV blocks.

        `now_ns` is the kernel's clock; a simulation hands in its own. (An event loop's clock may
        be as coarse as a millisecond.)
        """
        self._now_ns = now_ns
        self._size = size
        self._policies = policies
        self._crews = crews(
            CrewEvents(on_result=self._on_result, on_lost=self._on_lost, on_progress=on_progress)
        )
        self._loop = asyncio.get_running_loop()
        self._kernel: Scheduler | None = None
        self._events: deque[Event] = deque()
        self._handling = False
        self._result: GenerateResult | None = None
        self._streams: dict[str, Generation] = {}
        self._by_number: dict[int, Generation] = {}
        self._arriving: Generation | None = None
        self._refused: Refuse | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._down: set[str] = set()
        self._busy_ns = {"encode": 0, "generate": 0}
        self._stopping = False
        self._lost_early = ""
        self.given_up = ""

    # --- life ---

    async def start(self) -> None:
        """Start all crews in parallel and wait until they are ready.

        Blocks: up to the deadline for readiness.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLost: When a crew cannot start; the others are stopped.
        """
        outcomes = await asyncio.gather(
            *(crew.start() for crew in self._crews), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if self._lost_early:
            errors.append(GroupLostError(self._lost_early))
        if errors:
            await self.stop()
            raise errors[0]
        reports: dict[str, list[Ready]] = {}
        for outcome in outcomes:
            assert isinstance(outcome, dict)
            reports.update(outcome)
        blocks = min(ready.kv_blocks for ready in reports["generate"])
        self._kernel = Scheduler(self._size(blocks), self._policies)
        for group in reports:
            self.handle(GroupReady(group))

    async def stop(self) -> None:
        """End every request and every rank.

        Blocks: at most the crews' grace.
        """
        self._stopping = True
        restarts = list(self._restarts.values())
        for task in restarts:
            task.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        if self._kernel is not None:
            self.handle(Cleared())
        await asyncio.gather(*(crew.stop() for crew in self._crews))

    # --- requests ---

    def submit(
        self, request: Request, stop_token_ids: tuple[int, ...], generation: Generation
    ) -> None:
        """Hand a request to the kernel; its tokens and its end go to `generation`.

        Raises:
            RequestRefused: When the kernel refuses it, or no group is left to serve it.
        """
        if self.given_up:
            message = f"{self.given_up}. Remedy: restart the server."
            raise RequestRefused(message, code="given_up", status=503)
        # It gets its id once it is accepted: a refused one may carry the id of another that runs.
        self._arriving = generation
        self._refused = None
        self.handle(Submitted(request, stop_token_ids))
        self._arriving = None
        self._raise_refused()

    def _raise_refused(self) -> None:
        refused = self._refused
        if refused is not None:
            raise RequestRefused(
                refused.message,
                code=refused.code,
                status=refused.status,
                retry_after_s=refused.retry_after_s,
            )

    def _drop(self, request_id: str) -> Generation:
        generation = self._streams.pop(request_id)
        if not self._streams:
            self._idle.set()
        return generation

    async def wait_idle(self) -> None:
        """Wait until no request is live.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._idle.wait()

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request early: its client left, or a stop string was found."""
        self.handle(Aborted(request_id, reason))

    def clear(self) -> None:
        """Interrupt every running and waiting request (E20)."""
        self.handle(Cleared())

    # --- events and commands ---

    def handle(self, event: Event) -> None:
        """Hand an event to the kernel and carry its commands out; re-entrant calls wait in line."""
        self._events.append(event)
        if self._handling:
            return
        assert self._kernel is not None, "an event before the replica is ready"
        self._handling = True
        try:
            while self._events:
                commands = self._kernel.handle(self._events.popleft(), self._now_ns())
                self._carry_out(commands)
        finally:
            self._handling = False

    def _carry_out(self, commands: Sequence[Command]) -> None:
        # Decisions first: ranks work while tokens are detokenized.
        for command in commands:
            if isinstance(command, Decide):
                self._crew_of(command.group).decide(command.group, command.decision)
        for command in commands:
            match command:
                case EmitTokens():
                    self._emit()
                case Finish():
                    self._by_number.pop(command.number)
                    self._drop(command.request_id).finish(command)
                case Accept(request_id, number):
                    assert self._arriving is not None, "accepted what nobody submitted"
                    self._by_number[number] = self._streams[request_id] = self._arriving
                    self._idle.clear()
                case Refuse():
                    self._refused = command
                case SetTimer(deadline_ns):
                    delay_s = max(0.0, (deadline_ns - self._now_ns()) / 1e9)
                    self._loop.call_later(delay_s, self.handle, Timer())
                case Notice(message):
                    logger.warning("%s", message)
                case RestartGroup(group):
                    self._begin_restart(self._crew_of(group))

    def _emit(self) -> None:
        """Hand the tokens of a step to their streams."""
        result = self._result
        assert result is not None
        logprobs = {one.slot: TokenLogprob(0, one.logprob, one.top) for one in result.logprobs}
        pairs = zip(_int32(result.numbers), _int32(result.tokens), strict=True)
        for slot, (number, token) in enumerate(pairs):
            if token < 0:
                continue
            stream = self._by_number.get(number)
            if stream is None:
                continue  # it was aborted while the step was out
            logprob = logprobs.get(slot)
            if logprob is not None:
                logprob = TokenLogprob(token, logprob.logprob, logprob.top)
            stream.push(token, logprob)

    def _crew_of(self, group: str) -> Crew:
        return next(crew for crew in self._crews if group in crew.groups)

    # --- ranks ---

    def _on_result(self, group: str, result: GenerateResult | EncodeResult) -> None:
        if self._stopping or group in self._down:
            return
        self._busy_ns[group] += result.busy_ns
        if isinstance(result, GenerateResult):
            self._result = result
            self.handle(Stepped(result.step, _int32(result.tokens), result.finished))
        elif result.error:
            self.handle(EncodeFailed(result.step, result.error))
        else:
            self.handle(Encoded(result.step))

    def _on_lost(self, groups: list[str], reason: str) -> None:
        if self._stopping:
            return
        if self._kernel is None:
            self._lost_early = reason  # `start` waits for other crews still, and raises
            return
        self._down.update(groups)
        for group in groups:
            self.handle(GroupLost(group, reason))

    def _begin_restart(self, crew: Crew) -> None:
        """Restart a crew once, though each of its groups asks for it."""
        running = self._restarts.get(id(crew))
        if running is None or running.done():
            self._restarts[id(crew)] = self._loop.create_task(self._restart(crew))

    async def _restart(self, crew: Crew) -> None:
        """Bring a lost crew back; its requests go on where they were."""
        for delay_s in RESTART_DELAYS_S:
            await asyncio.sleep(delay_s)
            await crew.stop(grace_s=0)
            try:
                await crew.start()
            except (VschedError, OSError) as error:
                logger.warning("%s did not come back: %s", " and ".join(crew.groups), error)
                continue
            self._down.difference_update(crew.groups)
            logger.warning("%s: back", " and ".join(crew.groups))
            for group in crew.groups:
                self.handle(GroupReady(group))
            return
        self.given_up = f"{' and '.join(crew.groups)} could not be restarted"
        logger.error("%s: every request is ended", self.given_up)
        self.clear()

    # --- views ---

    @property
    def healthy(self) -> bool:
        """Whether every group is up."""
        return self._kernel is not None and not self._down

    @property
    def sizes(self) -> Sizes:
        """The kernel's limits; the replica has started."""
        assert self._kernel is not None
        return self._kernel.sizes

    def explain(self, request_id: str) -> str:
        """Return where a request is and why, in words."""
        return self._kernel.explain(request_id) if self._kernel is not None else ""

    def load_tokens(self) -> int:
        """Return tokens that are waiting or running, for routing."""
        return sum(stream.prompt_tokens + stream.output_tokens for stream in self._streams.values())

    def statistics(self) -> dict[str, Any]:
        """Return the kernel's counters and the ranks' memory."""
        if self._kernel is None:
            return {}
        memory = {
            group: {str(rank): dict(fields) for rank, fields in ranks.items()}
            for crew in self._crews
            for group, ranks in crew.memory().items()
        }
        busy_ms = {group: spent_ns / 1e6 for group, spent_ns in self._busy_ns.items()}
        return {**self._kernel.statistics(), "ranks": memory, "busy_ms": busy_ms}

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [pid for crew in self._crews for pid in crew.pids]


def _int32(data: bytes) -> array[int]:
    values = array("i")
    values.frombytes(data)
    return values
