"""The front door: requests that have been read and for which nothing has been done yet.

Preparing a request takes processor time and memory, so whether it is worth that is decided before. The kernel is told
of a request twice: when it knocks, and when it is submitted, with its tokens. In between it is in preparation, which is
the shell's, and here only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import msgspec

from vsched.errors import limit_message
from vsched.kernel.commands import Command, Enter, TurnAway
from vsched.kernel.events import Knocked, Withdrawn
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.groups import Loads
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.policy_calls import ask_front_door
from vsched.kernel.policy_seats import PolicySeat
from vsched.kernel.request_table import RequestTable, add_to, at_least
from vsched.kernel.snapshot import Restorable, Saved
from vsched.policy import ArrivalView, FrontDoorView, Hold, LetIn, Redirect, RequestPolicy
from vsched.policy.measured import Measured

OUTCOMES = ("let_in", "held", "shed", "redirected")


class HeldRequest(msgspec.Struct):
    """A request that is held, until when, and how often the policy was asked about it."""

    knocked: Knocked
    arrived_ns: int
    asks: int = 0
    until_ns: int = 0


class FrontDoor(Restorable):
    """Asks the policy about requests that knock, and again about those that it holds.

    Attributes:
        due_ns: When the next request that is held must be asked about again; None where none is held.
        counts: How often each answer was given.
    """

    _held: Saved[dict[int, HeldRequest]]
    _preparing: Saved[dict[int, Knocked]]
    counts: Saved[dict[str, int]]

    def __init__(
        self,
        seat: PolicySeat[RequestPolicy],
        limits: SchedulerLimits,
        table: RequestTable,
        groups: Sequence[GenerateGroup],
        measured: Measured,
        loads: Loads,
    ) -> None:
        self._seat = seat
        self._limits = limits
        self._table = table
        self._groups = groups
        self._measured = measured
        self._loads = loads
        self._held = {}
        self._preparing = {}
        self._tenants: dict[str, int] = {}
        self._priorities: dict[int, int] = {}
        self._due: list[tuple[int, int]] = []
        self.due_ns: int | None = None
        self.counts = dict.fromkeys(OUTCOMES, 0)

    def hear(self, event: Knocked | Withdrawn, now_ns: int) -> list[Command]:
        """Ask about a request that has come, or forget one that has left."""
        if isinstance(event, Knocked):
            return self._ask(HeldRequest(event, now_ns), now_ns)
        self.leave(event.knock)
        return []

    def ask_again(self, now_ns: int) -> list[Command]:
        """Ask about the requests whose hold is over, those first that were to wait least long."""
        commands: list[Command] = []
        while self.due_ns is not None and self.due_ns <= now_ns:
            _, knock = heappop(self._due)
            request = self._held.pop(knock)
            self._count(request.knocked, -1)
            commands += self._ask(request, now_ns)
            self._look_ahead()
        return commands

    def leave(self, knock: int) -> None:
        """Forget a request: it is submitted, or its client has left."""
        knocked = self._preparing.pop(knock, None)
        held = self._held.pop(knock, None)
        if held is not None:
            knocked = held.knocked
            self._look_ahead()
        if knocked is not None:
            self._count(knocked, -1)

    def _count(self, knocked: Knocked, change: int) -> None:
        add_to(self._tenants, knocked.tenant, change)
        add_to(self._priorities, knocked.priority, change)

    def _look_ahead(self) -> None:
        while self._due and self._due[0][1] not in self._held:
            heappop(self._due)
        self.due_ns = self._due[0][0] if self._due else None

    def _ask(self, request: HeldRequest, now_ns: int) -> list[Command]:
        knock = request.knocked.knock
        answer = ask_front_door(self._seat, self._view(request, now_ns))
        match answer:
            case LetIn():
                return [self._let_in(request)]
            case Redirect(base_url):
                self.counts["redirected"] += 1
                return [TurnAway(knock, base_url=base_url)]
            case Hold(until_ns):
                if len(self._held) >= self._limits.waiting:
                    return [self._turn_away_full(knock)]
                self.counts["held"] += not request.asks
                request.asks += 1
                request.until_ns = until_ns
                self._held[knock] = request
                self._count(request.knocked, 1)
                heappush(self._due, (until_ns, knock))
                self._look_ahead()
                return []
        self.counts["shed"] += 1
        return [TurnAway(knock, answer.reason, answer.status, answer.retry_after_s)]

    def _let_in(self, request: HeldRequest) -> Enter:
        self.counts["let_in"] += 1
        self._preparing[request.knocked.knock] = request.knocked
        self._count(request.knocked, 1)
        return Enter(request.knocked.knock)

    def _turn_away_full(self, knock: int) -> TurnAway:
        self.counts["shed"] += 1
        limit = self._limits.waiting
        remedy = "try again later, or raise generate.max_waiting"
        what = "too many requests are held at the front door"
        text = limit_message(what, value=limit + 1, limit=limit, remedy=remedy)
        return TurnAway(knock, text.removesuffix("."))

    def _view(self, request: HeldRequest, now_ns: int) -> FrontDoorView:
        knocked, table, groups = request.knocked, self._table, self._groups
        tenant, target_ms = knocked.tenant, knocked.ttft_target_ms
        loads = self._loads.refresh()
        running = loads.slots_total
        return FrontDoorView(
            now_ns=now_ns,
            request=ArrivalView(
                tenant=tenant,
                priority=knocked.priority,
                arrived_ns=request.arrived_ns,
                target_ns=None if target_ms is None else request.arrived_ns + target_ms * 1_000_000,
                images=knocked.images,
                answers=knocked.answers,
                outputs_max=knocked.outputs_max,
                asks=request.asks,
            ),
            held=len(self._held),
            preparing=len(self._preparing),
            waiting=len(table.live) - running,
            as_urgent=self._as_urgent(knocked.priority, running),
            running=running,
            waiting_max=self._limits.waiting,
            tenant_requests=table.tenants.get(tenant, 0) + self._tenants.get(tenant, 0),
            load_tokens=loads.tokens_total,
            load_limit_tokens=self._limits.blocks * self._limits.block_size * len(groups),
            measured=self._measured,
            state=self._seat.state,
        )

    def _as_urgent(self, priority: int, running: int) -> int:
        """Return how many that hold no slot yet have this priority or a higher one; `running` hold one."""
        live = self._table.priorities
        if len(live) > 1:  # else all that run are alike
            running = sum(group.slots_held_from(priority) for group in self._groups)
        elif max(live, default=priority) < priority:
            running = 0
        return at_least(live, priority) - running + at_least(self._priorities, priority)

    def statistics(self) -> dict[str, int]:
        """Return how often each answer was given, and how many requests are held and prepared now."""
        return {
            **self.counts,
            "held_now": len(self._held),
            "preparing_now": len(self._preparing),
        }

    def check(self) -> None:
        """Assert that every request that is held will be asked about."""
        timed = {knock for _, knock in self._due}
        assert timed >= self._held.keys(), "a request is held, and has no time"
        assert not self._held or self.due_ns is not None, "requests are held, and none is due"
        assert not self._held.keys() & self._preparing.keys(), "a request is held and let in"
        inside = len(self._held) + len(self._preparing)
        assert sum(self._tenants.values()) == inside, "requests of tenants are counted wrongly"
        assert sum(self._priorities.values()) == inside, "priorities are counted wrongly"
        assert self._as_urgent(-(2**62), sum(group.slots_held for group in self._groups)) == (
            inside + len(self._table.live) - sum(group.slots_held for group in self._groups)
        ), "those of any priority are not all"

    def rebuild(self) -> None:
        held = [one.knocked for one in self._held.values()]
        for knocked in (*self._preparing.values(), *held):
            self._count(knocked, 1)
        self._due = [(one.until_ns, knock) for knock, one in self._held.items()]
        heapify(self._due)
        self._look_ahead()
