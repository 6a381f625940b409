"""A rate of requests for each tenant."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.errors import limit_message
from vsched.policy import (
    FrontDoorAnswer,
    FrontDoorPolicy,
    FrontDoorView,
    Hold,
    LetIn,
    PositiveCount,
    Seconds,
    Shed,
)

TENANTS_MAX = 200
"""Tenants whose buckets are remembered; those that are nearly full again are forgotten first."""


class Buckets(msgspec.Struct):
    """When the bucket of each tenant would be full again, of those that are not."""

    full_ns: dict[str, int] = {}


class TokenBucket(FrontDoorPolicy, frozen=True, kw_only=True):
    """Lets each tenant send `rate` requests a second, and `burst` at once; the next ones wait or are shed.

    A request that would be in time within `wait_s` takes its token at once and is held until then, so those of a tenant
    come in in order. Requests without a tenant have one bucket together.

    Attributes:
        rate: Requests a second of a tenant.
        burst: Requests that a tenant that was idle may send at once.
        rates: Other rates, by tenant.
        wait_s: How long a request is held rather than shed; at most 60.
    """

    state_type = Buckets
    rate: Annotated[float, Meta(gt=0)] = 10.0
    burst: PositiveCount = 20
    rates: dict[str, Annotated[float, Meta(gt=0)]] = msgspec.field(default_factory=dict)
    wait_s: Annotated[Seconds, Meta(le=60)] = 0.0

    def receive(self, view: FrontDoorView) -> FrontDoorAnswer:
        """Return whether the tenant has a token, or how long until it has one."""
        if view.request.asks:
            return LetIn()  # it took its token when it came
        buckets: Buckets = view.state
        now_ns, tenant = view.now_ns, view.request.tenant
        rate = self.rates.get(tenant, self.rate)
        token_ns = int(1e9 / rate)
        full_ns = max(buckets.full_ns.get(tenant, 0), now_ns) + token_ns
        wait_ns = full_ns - now_ns - self.burst * token_ns
        if wait_ns > self.wait_s * 1e9:
            retry_s = ceil((wait_ns - self.wait_s * 1e9) / 1e9)
            whose = f"tenant {tenant} sends" if tenant else "requests without a tenant are sent"
            text = limit_message(
                f"{whose} too fast",
                value=f"over {self.burst} requests at once",
                limit=f"{rate:g} a second",
                remedy=f"try again in {retry_s} s",
            )
            return Shed(text.removesuffix("."), retry_s)
        buckets.full_ns[tenant] = full_ns
        self._forget(buckets, now_ns)
        return Hold(now_ns + wait_ns) if wait_ns > 0 else LetIn()

    def _forget(self, buckets: Buckets, now_ns: int) -> None:
        """Drop buckets that are full again; a full one and none are the same."""
        kept = sorted((at_ns, name) for name, at_ns in buckets.full_ns.items() if at_ns > now_ns)
        buckets.full_ns = {name: at_ns for at_ns, name in kept[-TENANTS_MAX:]}
