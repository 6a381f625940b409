"""One replica: a kernel, the crews that carry its decisions out, and the streams of its requests.

Everything here runs on the event loop, and nothing between an event and the effects of its commands awaits. An event
that arises while commands are carried out (a stop string found in a token, say) waits until they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vsched.aio.crew import STOP_GRACE_S, Crew, CrewEvents
from vsched.aio.stream import Generation
from vsched.aio.streams import StreamTable, int32_array
from vsched.errors import GroupLost as GroupLostError
from vsched.errors import RequestRefused, limit_message
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
LOSSES_WINDOW_S = 60.0
LOSSES_MAX = len(RESTART_DELAYS_S) + 1
"""Losses within the window skip the shorter pauses; so many in it, and the replica is given up."""
LIVE_SHOWN_MAX = 100
"""Live requests that statistics explain, oldest first."""
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
        self._streams = StreamTable(lambda request_id: self.end(request_id, FinishReason.ERROR))
        self._arriving: Generation | None = None
        self._refused: Refuse | None = None
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._down: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._losses_s: deque[float] = deque(maxlen=LOSSES_MAX)
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
        starts = [self._loop.create_task(crew.start()) for crew in self._crews]
        try:
            # One that fails ends the others: they may be waiting for what it will never tell.
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for start in starts:
                start.cancel()
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
        errors: list[BaseException] = [one for one in outcomes if isinstance(one, Exception)]
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

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End every request and every rank.

        Blocks: at most the grace; then ranks are killed.
        """
        self._stopping = True
        await self._end_restarts()
        try:
            if self._kernel is not None:
                self.handle(Cleared("the server is stopping", "stopping"))
        finally:
            await asyncio.gather(*(crew.stop(grace_s=grace_s) for crew in self._crews))

    # --- requests ---

    def submit(
        self, request: Request, stop_token_ids: tuple[int, ...], generation: Generation
    ) -> None:
        """Hand a request to the kernel; its tokens and its end go to `generation`.

        Raises:
            RequestRefused: When the kernel refuses it, or no group is left to serve it.
        """
        if self.given_up:
            raise self._unavailable()
        # It gets its id once it is accepted: a refused one may carry the id of another that runs.
        self._arriving = generation
        self._refused = None
        self.handle(Submitted(request, stop_token_ids))
        self._arriving = None
        if self.given_up:
            raise self._unavailable()
        refused = self._take_refused()
        if refused is not None:
            raise RequestRefused(
                refused.message,
                code=refused.code,
                status=refused.status,
                retry_after_s=refused.retry_after_s,
            )

    def _take_refused(self) -> Refuse | None:
        refused, self._refused = self._refused, None
        return refused

    def _unavailable(self) -> RequestRefused:
        message = f"{self.given_up}. Remedy: restart the server."
        return RequestRefused(message, code="given_up", status=503)

    async def wait_idle(self) -> None:
        """Wait until no request is live.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._streams.wait_idle()

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request early: its client left, or a stop string was found."""
        self.handle(Aborted(request_id, reason))

    def clear(self) -> None:
        """Interrupt every running and waiting request (E20)."""
        if self._kernel is not None:
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
            while self._events and not self.given_up:
                commands = self._kernel.handle(self._events.popleft(), self._now_ns())
                self._carry_out(commands)
        except Exception:
            logger.exception("the scheduler failed; every request is ended")
            self._give_up("the scheduler failed")
        finally:
            self._events.clear()
            self._handling = False

    def _give_up(self, reason: str) -> None:
        """Serve nothing more: every stream gets its end, and the ranks are stopped."""
        self.given_up = reason
        self._streams.fail_all(reason, code="given_up")
        if not self._stopping:
            self._ending = self._loop.create_task(self._end_crews())

    async def _end_restarts(self) -> None:
        restarts = list(self._restarts.values())
        for task in restarts:
            task.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)

    async def _end_crews(self) -> None:
        await self._end_restarts()  # or one would bring ranks back that nobody uses
        await asyncio.gather(*(crew.stop(grace_s=0) for crew in self._crews))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        # Decisions first: ranks work while tokens are detokenized.
        for command in commands:
            if isinstance(command, Decide):
                self._crew_of(command.group).decide(command.group, command.decision)
        for command in commands:
            match command:
                case EmitTokens():
                    assert self._result is not None
                    self._streams.emit(self._result)
                case Finish():
                    self._streams.finish(command)
                case Accept(_, number):
                    assert self._arriving is not None, "accepted what nobody submitted"
                    self._streams.add(number, self._arriving)
                case Refuse():
                    self._refused = command
                case SetTimer(deadline_ns):
                    self._set_timer(deadline_ns)
                case Notice(message):
                    logger.warning("%s", message)
                case RestartGroup(group):
                    self._begin_restart(self._crew_of(group))

    def _set_timer(self, deadline_ns: int) -> None:
        """There is one timer: a new one takes the place of the old."""
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (deadline_ns - self._now_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self.handle, Timer())

    def _crew_of(self, group: str) -> Crew:
        return next(crew for crew in self._crews if group in crew.groups)

    # --- ranks ---

    def _on_result(self, group: str, result: GenerateResult | EncodeResult) -> None:
        if self._stopping or self.given_up or group in self._down:
            return
        self._busy_ns[group] += result.busy_ns
        if isinstance(result, EncodeResult):
            failed = EncodeFailed(result.step, result.error)
            self.handle(failed if result.error else Encoded(result.step))
            return
        expected = 4 * self.sizes.slots
        if not len(result.tokens) == len(result.numbers) == expected:
            self._crew_of(group).lose(f"a result of {len(result.tokens)} bytes, not {expected}")
            return
        self._result = result
        tokens = int32_array(result.tokens)
        self.handle(Stepped(result.step, tokens, result.finished, result.busy_ns))

    def _on_lost(self, groups: list[str], reason: str) -> None:
        if self._stopping or self.given_up:
            return
        if self._kernel is None:
            self._lost_early = reason  # `start` waits for other crews still, and raises
            return
        self._down.update(groups)
        for group in groups:
            self.handle(GroupLost(group, reason))

    def _begin_restart(self, crew: Crew) -> None:
        """Restart a crew once, though each of its groups asks for it."""
        if id(crew) not in self._restarts and not self._stopping:
            self._restarts[id(crew)] = self._loop.create_task(self._restart(crew))

    async def _restart(self, crew: Crew) -> None:
        """Bring a lost crew back; its requests go on where they were."""
        names = " and ".join(crew.groups)
        self._losses_s.append(self._loop.time())
        for delay_s in RESTART_DELAYS_S[self._recent_losses() - 1 :]:
            await asyncio.sleep(delay_s)
            try:
                await crew.stop(grace_s=0)
                self._check_size(await crew.start())
            except Exception as error:  # noqa: BLE001 - whatever it was, the next attempt may do
                logger.warning("%s did not come back: %s", names, error)
                continue
            self._down.difference_update(crew.groups)
            del self._restarts[id(crew)]
            logger.warning("%s: back", names)
            for group in crew.groups:
                if group not in self._down:  # else it was lost again within this loop
                    self.handle(GroupReady(group))
            return
        logger.error("%s: could not be restarted; every request is ended", names)
        self._give_up(f"{names} could not be restarted")

    def _recent_losses(self) -> int:
        """Return how many losses, this one included, came in quick succession."""
        since_s = self._loop.time() - LOSSES_WINDOW_S
        return sum(1 for lost_s in self._losses_s if lost_s >= since_s)

    def _check_size(self, reports: dict[str, list[Ready]]) -> None:
        """The kernel goes on with the blocks that it knows: a group with fewer cannot serve it."""
        blocks = min((ready.kv_blocks for ready in reports.get("generate", [])), default=None)
        if blocks is not None and blocks < self.sizes.blocks:
            raise GroupLostError(
                limit_message(
                    "the generate group came back with a smaller KV cache",
                    value=f"{blocks} blocks",
                    limit=f"at least {self.sizes.blocks} blocks",
                    remedy="see what else takes the device's memory, or pin a smaller size",
                )
            )

    # --- views ---

    @property
    def healthy(self) -> bool:
        """Whether every group is up, and serves."""
        return self._kernel is not None and not self._down and not self.given_up

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
        return self._streams.tokens()

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
        ids = self._streams.request_ids(LIVE_SHOWN_MAX)
        live = [{"request_id": one, "state": self._kernel.explain(one)} for one in ids]
        return {**self._kernel.statistics(), "ranks": memory, "busy_ms": busy_ms, "live": live}

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [pid for crew in self._crews for pid in crew.pids]
