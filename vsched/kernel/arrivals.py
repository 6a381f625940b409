"""Admission of arriving requests, before any work is done for them.

Preparing a request takes processor time and memory, so the arrival policy decides before. The kernel gets two events
for a request: `Arrived`, and `Submitted` with its tokens. In between, the shell prepares it, which is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.errors import limit_message
from vsched.kernel.commands import AdmitArrival, Command, RejectArrival
from vsched.kernel.events import Arrived, Withdrawn
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestTable
from vsched.kernel.request_moves import Loads
from vsched.policy import Admit, ArrivalView, ArrivingRequest, Hold, Redirect
from vsched.policy.measured import Measured
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.snapshot import Restorable, Saved

PREPARED = (
    "its prompt and images are being prepared. "
    "Remedy: more media.threads, or a larger arena.pixel_bytes, if this takes long"
)
OUTCOMES = ("admitted", "held", "shed", "redirected")


class HeldRequest(msgspec.Struct):
    """A held request, the end of the hold, and the number of answers so far."""

    arrived: Arrived
    arrived_ns: int
    asks: int = 0
    until_ns: int = 0


class ArrivalGate(Restorable):
    """Calls the arrival policy for each arriving request, and again at the end of a hold.

    Attributes:
        due_ns: The end of the next hold; None without held requests.
        counts: Number of answers of each kind.
    """

    _held: Saved[dict[int, HeldRequest]]
    _preparing: Saved[dict[int, Arrived]]
    counts: Saved[dict[str, int]]

    def __init__(
        self,
        seat: PolicySeat,
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
        self.due_ns: int | None = None
        self.counts = dict.fromkeys(OUTCOMES, 0)

    def handle_arrival(self, event: Arrived | Withdrawn, now_ns: int) -> list[Command]:
        """Decide about an arriving request, or remove a withdrawn one."""
        if isinstance(event, Arrived):
            return self._ask(HeldRequest(event, now_ns), now_ns)
        self.leave(event.arrival_id)
        return []

    def ask_again(self, now_ns: int, *, all_held: bool = False) -> list[Command]:
        """Decide about the requests whose hold is over, or with a new policy about all of them, those due first."""
        commands: list[Command] = []
        if not all_held and (self.due_ns is None or self.due_ns > now_ns):
            return commands
        for _, arrival_id in sorted(
            (one.until_ns, arrival_id)
            for arrival_id, one in self._held.items()
            if all_held or one.until_ns <= now_ns
        ):
            commands += self._ask(self._held.pop(arrival_id), now_ns)
        self._look_ahead()
        return commands

    def leave(self, arrival_id: int) -> None:
        """Remove a request that is submitted, or whose client has disconnected."""
        self._preparing.pop(arrival_id, None)
        if self._held.pop(arrival_id, None) is not None:
            self._look_ahead()

    def _look_ahead(self) -> None:
        self.due_ns = min((one.until_ns for one in self._held.values()), default=None)

    def _ask(self, request: HeldRequest, now_ns: int) -> list[Command]:
        arrival_id = request.arrived.arrival_id
        view = self._view(request, now_ns)
        answer = self._seat.decide(view, now_ns, request.arrived_ns, view.hold_max_ns)
        match answer:
            case Admit():
                self.counts["admitted"] += 1
                self._preparing[arrival_id] = request.arrived
                return [AdmitArrival(arrival_id)]
            case Redirect(base_url):
                self.counts["redirected"] += 1
                return [RejectArrival(arrival_id, base_url=base_url)]
            case Hold(until_ns):
                if len(self._held) >= self._limits.waiting:
                    self._seat.overrule("as many requests are held as may be")
                    return [self._reject_full(arrival_id)]
                self.counts["held"] += not request.asks
                request.asks += 1
                request.until_ns = self._seat.lengthen_hold(until_ns, now_ns)
                self._held[arrival_id] = request
                self._look_ahead()
                return []
        self.counts["shed"] += 1
        return [RejectArrival(arrival_id, answer.reason, answer.status, answer.retry_after_s)]

    def _reject_full(self, arrival_id: int) -> RejectArrival:
        self.counts["shed"] += 1
        limit = self._limits.waiting
        remedy = "try again later, or raise generate.max_waiting"
        what = "too many requests are held on arrival"
        text = limit_message(what, value=limit + 1, limit=limit, remedy=remedy)
        return RejectArrival(arrival_id, text.removesuffix("."))

    def _view(self, request: HeldRequest, now_ns: int) -> ArrivalView:
        arrived, table = request.arrived, self._table
        tenant, target_ms = arrived.tenant, arrived.ttft_target_ms
        loads = self._loads.refresh()
        running = loads.slots_total
        return ArrivalView(
            now_ns=now_ns,
            request=ArrivingRequest(
                tenant=tenant,
                session=arrived.session,
                priority=arrived.priority,
                arrived_ns=request.arrived_ns,
                target_ns=None if target_ms is None else request.arrived_ns + target_ms * 1_000_000,
                images=arrived.images,
                choices=arrived.choices,
                outputs_max=arrived.outputs_max,
                asks=request.asks,
            ),
            held=len(self._held),
            preparing=len(self._preparing),
            waiting=len(table.live) - running,
            as_urgent=self._as_urgent(arrived.priority, running),
            running=running,
            waiting_max=self._limits.waiting,
            tenant_requests=table.tenants.get(tenant, 0)
            + sum(one.tenant == tenant for one in self._inside()),
            load_tokens=loads.tokens_total,
            load_limit_tokens=sum(loads.blocks) * self._limits.block_size,
            hold_max_ns=self._limits.passed_over_ns,
            measured=self._measured,
            state=self._seat.state,
        )

    def _as_urgent(self, priority: int, running: int) -> int:
        """Return the number of requests without a slot of this priority or higher; `running` have a slot."""
        live = self._table.priorities
        if len(live) > 1:  # else all running ones have the same
            running = sum(group.slots_held_from(priority) for group in self._groups)
        elif max(live, default=priority) < priority:
            running = 0
        submitted = sum(count for one, count in live.items() if one >= priority)
        return submitted - running + sum(one.priority >= priority for one in self._inside())

    def _inside(self) -> list[Arrived]:
        """Return the requests that are held or prepared."""
        return [*self._preparing.values(), *(one.arrived for one in self._held.values())]

    def explain(self, arrival_id: int, now_ns: int) -> str:
        """Return why a request is not submitted yet; empty if it is not one of these."""
        held = self._held.get(arrival_id)
        if held is not None:
            wait_s = max(held.until_ns - now_ns, 0) / 1e9
            return (
                f"the arrival policy holds it for another {wait_s:.1f} s. "
                "Remedy: other fields of arrival, or another policy"
            )
        return PREPARED if arrival_id in self._preparing else ""

    def statistics(self) -> dict[str, int]:
        """Return the number of answers of each kind, and of held and prepared requests."""
        return {
            **self.counts,
            "held_now": len(self._held),
            "preparing_now": len(self._preparing),
        }

    def check(self) -> None:
        """Assert that all holds will end, and that requests are counted."""
        assert not self._held or self.due_ns is not None, "requests are held, and none is due"
        assert not self._held.keys() & self._preparing.keys(), "a request is held and admitted"
        inside = len(self._held) + len(self._preparing)
        assert self._as_urgent(-(2**62), sum(group.slots_held for group in self._groups)) == (
            inside + len(self._table.live) - sum(group.slots_held for group in self._groups)
        ), "those of any priority are not all"

    def rebuild(self) -> None:
        self._look_ahead()
