"""A request rate limit for each tenant."""

from __future__ import annotations

from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.errors import limit_message
from vsched.policy import (
    Admit,
    ArrivalDecision,
    ArrivalView,
    Hold,
    PositiveCount,
    RequestPolicy,
    Seconds,
    Shed,
)

TENANTS_MAX = 200
"""Maximum number of stored buckets; the fullest ones are dropped first."""


class Buckets(msgspec.Struct):
    """For each tenant whose bucket is not full, the time when it will be."""

    full_ns: dict[str, int] = {}


class TokenBucket(RequestPolicy, frozen=True, kw_only=True):
    """Allows each tenant `rate` requests per second, and bursts of `burst`; further requests are held or shed.

    A request that gets its token within `wait_s` takes it at once and is held until then, so the
    requests of a tenant are admitted in order. Requests without a tenant share one bucket.

    Attributes:
        rate: Requests per second of a tenant.
        burst: Number of requests that an idle tenant may send at once.
        rates: Other rates, by tenant.
        wait_s: Maximum time to hold a request rather than shed it; at most 60.
    """

    state_type = Buckets
    rate: Annotated[float, Meta(gt=0)] = 10.0
    burst: PositiveCount = 20
    rates: dict[str, Annotated[float, Meta(gt=0)]] = msgspec.field(default_factory=dict)
    wait_s: Annotated[Seconds, Meta(le=60)] = 0.0

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        """Return whether the tenant has a token, or how long until it has one."""
        if view.request.asks:
            return Admit()  # it took its token on arrival
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
        return Hold(now_ns + wait_ns) if wait_ns > 0 else Admit()

    def _forget(self, buckets: Buckets, now_ns: int) -> None:
        """Drop full buckets, which are equivalent to none."""
        kept = sorted((at_ns, name) for name, at_ns in buckets.full_ns.items() if at_ns > now_ns)
        buckets.full_ns = {name: at_ns for at_ns, name in kept[-TENANTS_MAX:]}
