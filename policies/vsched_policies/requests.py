"""Fair sharing between tenants at arrival, admission, prefill and preemption, with one counter for each tenant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from vsched.errors import limit_message
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    EncodeLimits,
    Hold,
    PositiveCount,
    Preemption,
    PreemptionMode,
    PreemptionView,
    RequestPolicy,
    Seconds,
    Shed,
    StepShares,
    StepView,
)
from vsched.policy.checks import HOLD_MIN_NS
from vsched.policy.measured import Measured
from vsched.policy.requests import RETRY_AFTER_MAX_S
from vsched_policies.admission import pack

AnyNumber = TypeVar("AnyNumber", int, float)
TENANTS_MAX = 128
"""Maximum number of counters. The lowest are dropped first: a returning tenant starts at the floor anyway."""
NAMES_BYTES_MAX = 5400
"""Maximum size of a field with names: three of them fit into the state of a policy."""
ENTRY_BYTES = 11
"""Maximum size of an entry without its name."""
ABSENT_NS = 10_000_000_000
"""Time without an arrival after which finished requests are counted in admission."""


class ServedTokens(msgspec.Struct):
    """Counters of tenants.

    Attributes:
        tokens: Tokens served to each tenant in finished requests, output tokens weighted.
        full_ns: For each tenant whose bucket of requests is not full, the time when it will be.
        floor: Counter of a tenant that arrives or returns.
        waited: Tenants that waited at the last admission.
        seen_ns: End of the last finished request that was counted.
        arrived_ns: Time of the latest arrival, at which finished requests of all replicas are counted.
    """

    tokens: dict[str, float] = {}
    full_ns: dict[str, int] = {}
    floor: float = 0.0
    waited: list[str] = []
    seen_ns: int = 0
    arrived_ns: int = 0


class TenantFair(RequestPolicy, frozen=True, kw_only=True):
    """Serves the tenant with the fewest served tokens first, in admission and prefill.

    The waiting tenant with the lowest counter is admitted next, and gets the next
    `quantum_tokens` of a prefill step. The victim of a preemption is a request of the tenant with
    the highest counter. Running requests count as they are computed. A tenant that arrives or
    returns starts at the minimum of the waiting tenants: idle time earns no credit. Requests
    without a tenant count as one tenant.

    With `rate`, a tenant may send that many requests per second after a burst; further requests are
    held for up to `wait_s`, or shed. Held requests of a tenant are admitted in order.

    Sources: Sheng et al., Fairness in Serving Large Language Models (VTC), OSDI 2024; Shreedhar and
    Varghese, Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995.

    Attributes:
        output_weight: Weight of an output token; a prompt token has weight 1.
        max_items: Maximum number of entries that join in one step. None means the free slots for
            requests; for images 8, or 1 on a CPU.
        quantum_tokens: Prompt tokens that a tenant gets at a time; a lower number is fairer, and
            cuts prompts into more chunks.
        mode: How a preempted request resumes: `recompute` or `swap`.
        rate: Requests per second of a tenant; None for no limit.
        burst: Number of requests that an idle tenant may send at once.
        rates: Other rates, by tenant.
        wait_s: Maximum time to hold a request rather than shed it; at most 60, and at most
            `policies.passed_over_max_s`.
    """

    state_type = ServedTokens
    output_weight: PositiveCount = 2
    max_items: PositiveCount | None = None
    quantum_tokens: PositiveCount = 256
    mode: PreemptionMode = "recompute"
    rate: Annotated[float, Meta(gt=0)] | None = None
    burst: PositiveCount = 20
    rates: dict[str, Annotated[float, Meta(gt=0)]] = msgspec.field(default_factory=dict)
    wait_s: Annotated[Seconds, Meta(le=60)] = 0.0

    def needs(self) -> Sequence[str]:
        return ("swap",) if self.mode == "swap" else ()

    # --- arrival ---

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        served: ServedTokens = view.state
        served.arrived_ns = view.now_ns
        self._count_ends(view.measured, served)
        tenant = view.request.tenant
        rate = self.rates.get(tenant, self.rate)
        if rate is None or view.request.asks:  # a held request took its token on arrival
            return Admit()
        now_ns, token_ns = view.now_ns, int(1e9 / rate)
        full_ns = max(served.full_ns.get(tenant, 0), now_ns) + token_ns
        wait_ns = full_ns - now_ns - self.burst * token_ns
        hold_ns = min(self.wait_s * 1e9, view.hold_max_ns)
        if wait_ns > hold_ns:
            retry_s = ceil((wait_ns - hold_ns) / 1e9)
            sender = f"tenant {tenant} sends" if tenant else "requests without a tenant are sent"
            text = limit_message(
                f"{sender} too fast",
                value=f"over {self.burst} requests at once",
                limit=f"{rate:g} a second",
                remedy=f"try again in {retry_s} s",
            )
            return Shed(text.removesuffix("."), min(retry_s, RETRY_AFTER_MAX_S))
        known = tenant in served.full_ns
        served.full_ns[tenant] = full_ns
        if not known:
            served.full_ns = _largest(
                {one: at for one, at in served.full_ns.items() if at > now_ns}
            )
        return Hold(now_ns + max(wait_ns, HOLD_MIN_NS)) if wait_ns > 0 else Admit()

    # --- admission ---

    def encode_limits(self) -> EncodeLimits:
        return EncodeLimits(self.max_items)

    def admit(self, view: AdmissionView) -> Admission:
        served: ServedTokens = view.state
        queues = _by_tenant([entry.tenant for entry in view.waiting])
        if view.stage == "generate":
            # Another policy may decide at arrival, from the start or by now.
            if view.now_ns - served.arrived_ns > ABSENT_NS or not served.arrived_ns:
                self._count_ends(view.measured, served)
            _lift(served, list(queues))
        counts = _counts(served, view.measured, queues)
        order: list[int] = []
        while queues and len(order) < view.entries_free:
            tenant = min(queues, key=lambda one: (counts[one], queues[one][0]))
            index = queues[tenant].pop(0)
            order.append(index)
            counts[tenant] += view.waiting[index].tokens or 1
            if not queues[tenant]:
                del queues[tenant]
        return Admission(pack(view, order=order, items_max=self.max_items))

    # --- prefill and preemption ---

    def share(self, view: StepView) -> StepShares:
        queues = _by_tenant(request.tenant for request in view.prefilling)
        counts = _counts(view.state, view.measured, queues)
        left = [request.tokens for request in view.prefilling]
        given: dict[int, int] = {}
        room = self._prefill_room(view)
        while queues and room > 0:
            tenant = min(queues, key=lambda one: (counts[one], queues[one][0]))
            index = queues[tenant][0]
            tokens = min(left[index], self.quantum_tokens, room)
            given[index] = given.get(index, 0) + tokens
            left[index] -= tokens
            counts[tenant] += tokens
            room -= tokens
            if not left[index]:
                queues[tenant].pop(0)
                if not queues[tenant]:
                    del queues[tenant]
        return StepShares([*given], [*given.values()])

    def _prefill_room(self, view: StepView) -> int:
        """Token budget of the prefill step: the free tokens, limited by the time of the step."""
        computed = max((one.computed for one in view.prefilling), default=0)
        slowest_ns = view.token_ns + view.pair_ns * computed
        if view.time_ns is None or not slowest_ns:
            return view.tokens_free
        return min(view.tokens_free, max(int(view.time_ns / slowest_ns), self.quantum_tokens))

    def victim(self, view: PreemptionView) -> Preemption:
        tenants = [view.running[index].tenant for index in view.eligible]
        counts = _counts(view.state, view.measured, tenants)
        index = max(view.eligible, key=lambda one: (counts[view.running[one].tenant], one))
        return Preemption(index, self.mode)

    def _count_ends(self, measured: Measured, served: ServedTokens) -> None:
        known = len(served.tokens)
        for end in measured.ends:
            if end.ended_ns > served.seen_ns:
                tokens = end.prompt_tokens + self.output_weight * end.output_tokens
                served.tokens[end.tenant] = served.tokens.get(end.tenant, served.floor) + tokens
        if measured.ends:
            served.seen_ns = max(served.seen_ns, measured.ends[-1].ended_ns)
        if len(served.tokens) > known:
            served.tokens = _largest(served.tokens)


def _by_tenant(tenants: Iterable[str]) -> dict[str, list[int]]:
    queues: defaultdict[str, list[int]] = defaultdict(list)
    for index, tenant in enumerate(tenants):
        queues[tenant].append(index)
    return queues


def _counts(served: ServedTokens, measured: Measured, tenants: Iterable[str]) -> dict[str, float]:
    """Return the counters of tenants, with the computed tokens of their running requests."""
    running = measured.tokens_running
    return {one: served.tokens.get(one, served.floor) + running.get(one, 0) for one in {*tenants}}


def _lift(served: ServedTokens, waiting: list[str]) -> None:
    """Lift the counters of newly waiting tenants to the minimum of the other waiting tenants."""
    waited, known = {*served.waited}, len(served.tokens)
    stayed = [served.tokens.get(one, served.floor) for one in waiting if one in waited]
    served.floor = max(served.floor, min(stayed, default=served.floor))
    for tenant in waiting:
        if tenant not in waited and served.tokens.get(tenant, 0.0) < served.floor:
            served.tokens[tenant] = served.floor
    served.waited = _fitting(waiting)
    if len(served.tokens) > known:
        served.tokens = _largest(served.tokens)


def _largest(values: dict[str, AnyNumber]) -> dict[str, AnyNumber]:
    """Return the values without the lowest, which do not fit."""
    most = _fitting(sorted(values, key=values.__getitem__, reverse=True))
    return {one: values[one] for one in most}


def _fitting(names: Sequence[str]) -> list[str]:
    """Return the first names that a field of the state can have, without any that are too long."""
    left, kept = NAMES_BYTES_MAX, list[str]()
    for name in names:
        size = len(name.encode()) + ENTRY_BYTES
        if size <= left and len(kept) < TENANTS_MAX:
            left -= size
            kept.append(name)
    return kept
