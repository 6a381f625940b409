"""Routing: choosing the generate group of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.groups import Loads
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.policy import ReplicaView, RoutingView
from vsched.policy.measured import Measured
from vsched.policy.router import default_replica
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.snapshot import Restorable, Saved

ITEMS_MAX = 8192
"""Items whose replica is remembered; the one sent longest ago is dropped first."""


class RoutingContext:
    """The request that is routed, the number of its items last sent to each replica, and the loads of all replicas."""

    __slots__ = ("loads", "seen", "state")

    state: RequestState
    seen: Counter[int]

    def __init__(self, loads: Loads) -> None:
        self.loads = loads


class RoutedGroup(msgspec.Struct, frozen=True, eq=False):
    """View of a generate group for routing policies; what depends on the request is computed when it is read."""

    index: int
    _group: GenerateGroup
    _context: RoutingContext

    @property
    def load_tokens(self) -> int:
        """Tokens of all its requests."""
        return self._context.loads.tokens[self.index]

    @property
    def healthy(self) -> bool:
        """Whether it takes requests."""
        return self._context.loads.open[self.index]

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the request that are cached there."""
        return self._group.cached_tokens(self._context.state)

    @property
    def items_seen(self) -> int:
        """Items of the request that were last sent there."""
        return self._context.seen[self.index]

    @property
    def measured(self) -> Measured:
        """Measured times of the group."""
        return self._group.measured

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in ReplicaView.__struct_fields__}
        return repr(ReplicaView(**values))


class Router(Restorable):
    """Chooses groups for requests.

    Attributes:
        _routed: Requests that it has routed.
        _sent: The replica that each item was sent to last.
    """

    _routed: Saved[int] = 0
    _sent: Saved[dict[bytes, int]]

    def __init__(
        self,
        seat: PolicySeat,
        limits: SchedulerLimits,
        groups: Sequence[GenerateGroup],
        measured: Measured,
        loads: Loads,
    ) -> None:
        self._seat = seat
        self._groups = groups
        self._loads = loads
        self._context = RoutingContext(loads)
        self._replicas = tuple(RoutedGroup(group.index, group, self._context) for group in groups)
        self._measured = measured
        self._limits = limits
        self._sent = {}

    def choose(self, state: RequestState) -> GenerateGroup:
        """Return the group of a request: one that takes work, or else one that will be restarted."""
        groups, opened = self._groups, self._loads.refresh().open
        usable = [index for index, is_open in enumerate(opened) if is_open] or [
            group.index for group in groups if not group.retired
        ]
        chosen = groups[usable[0] if len(usable) == 1 else self._ask(state, usable)]
        self._routed += 1
        if len(groups) > 1:
            self._remember(state, chosen.index)
        return chosen

    def _ask(self, state: RequestState, usable: Sequence[int]) -> int:
        keys = tuple([item.key for item in state.items])
        self._context.state = state
        self._context.seen = Counter(self._sent[key] for key in keys if key in self._sent)
        view = RoutingView(
            replicas=self._replicas,
            prompt_tokens=state.prompt_length,
            item_keys=keys,
            routed=self._routed,
            load_limit_tokens=self._limits.blocks * self._limits.block_size,
            max_tokens=state.request.sampling.max_tokens,
            priority=state.request.priority,
            tenant=state.request.tenant,
            session=state.request.session,
            measured=self._measured,
            state=self._seat.state,
        )
        count, loads = len(self._groups), self._loads.tokens
        chosen: int = self._seat.decide(view, count, usable, loads)
        if self._loads.open[chosen] or chosen in usable:
            return chosen
        self._seat.overrule("the replica takes no requests")
        return default_replica(count, usable, loads)

    def _remember(self, state: RequestState, index: int) -> None:
        for item in state.items:
            self._sent.pop(item.key, None)  # it becomes the most recent
            self._sent[item.key] = index
        while len(self._sent) > ITEMS_MAX:
            del self._sent[next(iter(self._sent))]
