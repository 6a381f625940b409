"""Fair sharing of tokens between tenants, with a virtual counter for each."""

from __future__ import annotations

import msgspec

from vsched.policy import Admission, AdmissionView, EncodeLimits, PositiveCount, RequestPolicy
from vsched_policies.admission.packing import pack

TENANTS_MAX = 256
"""Maximum number of counters; the lowest are dropped first, since a returning tenant starts at the floor anyway."""


class ServedTokens(msgspec.Struct):
    """Tokens served to each tenant in ended requests; `seen_ns` is the end of the last counted one."""

    tokens: dict[str, float] = {}
    waited: list[str] = []
    floor: float = 0.0
    seen_ns: int = 0


class FairShare(RequestPolicy, frozen=True, kw_only=True):
    """Admits the tenant with the fewest served tokens, and its first request.

    A tenant that arrives or returns starts at the minimum of the waiting tenants: idle time earns
    no credit. Running requests count as they are computed, so a tenant with many long requests does
    not get its slots before they are counted.

    Source: Sheng et al., Fairness in Serving Large Language Models (VTC), OSDI 2024.

    Attributes:
        output_weight: Weight of an output token; a prompt token has weight 1.
        max_items: Maximum number of requests that join in one step; None means the free slots.
    """

    state_type = ServedTokens
    output_weight: PositiveCount = 2
    max_items: PositiveCount | None = None

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch of images."""
        return EncodeLimits(self.max_items)

    def admit(self, view: AdmissionView) -> Admission:
        """Return requests in the order of their tenants' counters, each counted as soon as it is chosen."""
        served: ServedTokens = view.state
        self._count_ends(view, served)
        queues: dict[str, list[int]] = {}
        for index, entry in enumerate(view.waiting):
            queues.setdefault(entry.tenant, []).append(index)
        self._lift(served, list(queues))
        counts = {tenant: served.tokens[tenant] for tenant in queues}
        for tenant, tokens in view.measured.tokens_running.items():
            if tenant in counts:
                counts[tenant] += tokens
        order: list[int] = []
        while queues and len(order) < view.entries_free:
            tenant = min(queues, key=lambda one: (counts[one], queues[one][0]))
            index = queues[tenant].pop(0)
            order.append(index)
            counts[tenant] += view.waiting[index].tokens or 1
            if not queues[tenant]:
                del queues[tenant]
        return Admission(pack(view, order=order, items_max=self.max_items))

    def _count_ends(self, view: AdmissionView, served: ServedTokens) -> None:
        for end in view.measured.ends:
            if end.ended_ns > served.seen_ns:
                tokens = end.prompt_tokens + self.output_weight * end.output_tokens
                served.tokens[end.tenant] = served.tokens.get(end.tenant, served.floor) + tokens
        if view.measured.ends:
            served.seen_ns = view.measured.ends[-1].ended_ns

    def _lift(self, served: ServedTokens, waiting: list[str]) -> None:
        """Lift the counters of newly waiting tenants to the minimum of those that waited already."""
        stayed = [served.tokens[one] for one in waiting if one in served.waited]
        served.floor = max(served.floor, min(stayed, default=served.floor))
        for tenant in waiting:
            if tenant not in served.waited:
                served.tokens[tenant] = max(served.tokens.get(tenant, 0.0), served.floor)
        if len(served.tokens) > TENANTS_MAX:
            most = sorted(served.tokens, key=lambda one: (one not in waiting, -served.tokens[one]))
            served.tokens = {one: served.tokens[one] for one in most[:TENANTS_MAX]}
        served.waited = [one for one in waiting if one in served.tokens]
