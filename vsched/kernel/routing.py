"""Which generate group a request goes to: the routing policy proposes, from what the kernel remembers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.policy_calls import ask_routing
from vsched.kernel.policy_seats import PolicySeat
from vsched.kernel.request import RequestState
from vsched.measured import Measured
from vsched.policy import ReplicaView, RoutingPolicy, RoutingView

ITEMS_MAX = 8192
"""Items of which it is remembered where they went; the one that was sent longest ago is forgotten first."""


class RouterState(msgspec.Struct):
    """The state of a `Router`: how many requests it routed, and which items went to which replica."""

    routed: int
    sent: dict[bytes, int]


class Router:
    """Finds groups for requests."""

    def __init__(
        self, seat: PolicySeat[RoutingPolicy], limits: SchedulerLimits, measured: Measured
    ) -> None:
        self._seat = seat
        self._measured = measured
        self._limits = limits
        self._routed = 0
        self._sent: dict[bytes, int] = {}

    def choose(self, state: RequestState, groups: Sequence[GenerateGroup]) -> GenerateGroup:
        """Return the group of a request: one that takes work, or else one that will come back."""
        usable = [group for group in groups if group.open] or [
            group for group in groups if not group.retired
        ]
        chosen = usable[0] if len(usable) == 1 else self._ask(state, groups, usable)
        self._routed += 1
        if len(groups) > 1:
            self._remember(state, groups.index(chosen))
        return chosen

    def state(self) -> RouterState:
        """Return the state."""
        return RouterState(self._routed, self._sent)

    def restore(self, state: RouterState) -> None:
        """Take over a state."""
        self._routed, self._sent = state.routed, state.sent

    def _ask(
        self,
        state: RequestState,
        groups: Sequence[GenerateGroup],
        usable: Sequence[GenerateGroup],
    ) -> GenerateGroup:
        keys = [item.key for item in state.items]
        view = RoutingView(
            replicas=[
                ReplicaView(
                    index=index,
                    load_tokens=group.load_tokens,
                    healthy=group.open,
                    prefix_tokens=group.cached_tokens(state),
                    items_seen=sum(self._sent.get(key) == index for key in keys),
                    measured=group.measured,
                )
                for index, group in enumerate(groups)
            ],
            prompt_tokens=state.prompt_length,
            item_keys=keys,
            routed=self._routed,
            load_limit_tokens=self._limits.blocks * self._limits.block_size,
            tenant=state.request.tenant,
            measured=self._measured,
            state=self._seat.state,
        )
        chosen = groups[ask_routing(self._seat, view)]
        if chosen in usable:
            return chosen
        return min(usable, key=lambda group: group.load_tokens)  # the first of equals

    def _remember(self, state: RequestState, index: int) -> None:
        for item in state.items:
            self._sent.pop(item.key, None)  # it becomes the most recent
            self._sent[item.key] = index
        while len(self._sent) > ITEMS_MAX:
            del self._sent[next(iter(self._sent))]
