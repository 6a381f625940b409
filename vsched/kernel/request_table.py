"""The request table: live requests by number, and counters of ended and refused ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from vsched.kernel.commands import RefusalCode
from vsched.kernel.request import Phase, RequestState
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.types import FinishReason, Request

Counted = TypeVar("Counted", bound=Hashable)


class RequestTable(Restorable):
    """The live requests of a scheduler.

    Attributes:
        live: The requests by number, oldest first.
        live_bytes: Host memory of all of them.
        finished: Number of ended requests by reason.
        refused: Number of refused requests by code.
        tenants: Number of live requests by tenant.
        priorities: Number of live requests by priority.
        expiries: Deadlines for the first step, and request numbers, in order.
    """

    live: Saved[dict[int, RequestState]]
    finished: Saved[dict[str, int]]
    refused: Saved[dict[str, int]]
    expiries: Saved[deque[tuple[int, int]]]
    _arrivals: Saved[int] = 0

    def __init__(self, waiting_ns: int) -> None:
        """Create an empty table; `waiting_ns` is the limit for the wait for the first step, 0 for none."""
        self.live = {}
        self.live_bytes = 0
        self.finished = {reason.value: 0 for reason in FinishReason}
        self.refused = {}
        self.tenants: dict[str, int] = {}
        self.priorities: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self._waiting_ns = waiting_ns
        self.expiries = deque()

    def add(
        self,
        request: Request,
        stop_token_ids: tuple[int, ...],
        now_ns: int,
        *,
        scope: str,
        root: bytes | None,
        first: int,
        choices: int,
        emitted: Sequence[int] = (),
    ) -> RequestState:
        """Add a request, or one of its choices, and return its state."""
        self._arrivals += 1
        state = RequestState.arrived(
            request,
            self._arrivals,
            stop_token_ids,
            now_ns,
            scope=scope,
            root=root,
            first=first,
            choices=choices,
            emitted=emitted,
        )
        self.live[state.number] = state
        self.live_bytes += state.host_bytes
        self._numbers[request.request_id] = state.number
        self._count(request, 1)
        if self._waiting_ns:
            self.expiries.append((now_ns + self._waiting_ns, state.number))
        return state

    @property
    def next_number(self) -> int:
        """The number of the next request."""
        return self._arrivals + 1

    def choices_with(self, state: RequestState) -> list[RequestState]:
        """Return the live choices of the same request, in order."""
        numbers = range(state.first, state.first + state.choices)
        return [self.live[number] for number in numbers if number in self.live]

    def remove(self, state: RequestState, reason: FinishReason) -> None:
        """Remove a request that ended."""
        self.live_bytes -= state.host_bytes
        del self.live[state.number]
        del self._numbers[state.request.request_id]
        self._count(state.request, -1)
        self.finished[reason.value] += 1

    def _count(self, request: Request, change: int) -> None:
        add_to(self.tenants, request.tenant, change)
        add_to(self.priorities, request.priority, change)

    def count_refusal(self, code: RefusalCode) -> None:
        """Count a refused request."""
        self.refused[code.value] = self.refused.get(code.value, 0) + 1

    def find(self, request_id: str) -> RequestState | None:
        """Return the live request of this id; None when there is none."""
        number = self._numbers.get(request_id)
        return None if number is None else self.live[number]

    def get_all(self, numbers: Iterable[int]) -> list[RequestState]:
        """Return live requests by their numbers."""
        return [self.live[number] for number in numbers]

    def of_replica(self, replica: int, *phases: Phase) -> list[RequestState]:
        """Return the requests of a generate group, of all or some phases, oldest first."""
        return [
            state
            for state in self.live.values()
            if state.replica == replica and (not phases or state.phase in phases)
        ]

    def take_expired(self, now_ns: int) -> list[RequestState]:
        """Remove and return the requests that waited too long for their first step, oldest first."""
        expired = []
        while self.expiries and self.expiries[0][0] <= now_ns:
            state = self.live.get(self.expiries.popleft()[1])
            if state is not None and not state.admitted_ns:
                expired.append(state)
        return expired

    def rebuild(self) -> None:
        for one in self.live.values():
            self._numbers[one.request.request_id] = one.number
            self.live_bytes += one.host_bytes
            self._count(one.request, 1)


def add_to(counts: dict[Counted, int], key: Counted, change: int) -> None:
    """Change the count of a key; keys with a count of 0 are removed."""
    count = counts.get(key, 0) + change
    if count:
        counts[key] = count
    else:
        del counts[key]


def at_least(counts: dict[int, int], priority: int) -> int:
    """Return the sum of the counts of this priority and higher ones."""
    return sum(count for one, count in counts.items() if one >= priority)
