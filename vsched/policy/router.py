"""Policies about routing requests to replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from vsched.policy.base import Policy
from vsched.policy.measured import NOTHING_MEASURED, Measured


class Replica(Protocol):
    """One generate replica, as a request finds it. What nobody reads is not worked out.

    `load_tokens` is the prompt and output tokens of every request that it has: not yet pulled, waiting and running.
    `healthy` says whether it takes requests: up, and not draining. `prefix_tokens` at the front of the request's
    prompt are in its KV cache, and `items_seen` of the request's items were last sent there, as far as that is
    remembered. `measured` is what was measured there.
    """

    @property
    def index(self) -> int: ...
    @property
    def load_tokens(self) -> int: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def items_seen(self) -> int: ...
    @property
    def measured(self) -> Measured: ...


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A `Replica` of plain values, for tests of policies."""

    index: int
    load_tokens: int
    healthy: bool
    prefix_tokens: int = 0
    items_seen: int = 0
    measured: Measured = NOTHING_MEASURED


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """What a routing policy sees: the replicas, the request, and how many requests were routed before it.

    `load_limit_tokens` is what one replica can run at once: the tokens of its KV cache. `measured` is of all
    replicas together, and `state` what the policy remembers, to be changed in place.
    """

    replicas: Sequence[Replica]
    prompt_tokens: int
    item_keys: Sequence[bytes]
    routed: int
    load_limit_tokens: int = 0
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class RoutingPolicy(Policy, frozen=True, kw_only=True):
    """Decides which replica serves a request."""

    def choose(self, view: RoutingView) -> int:
        """Return an index into `view.replicas`; called again for a waiting request whose replica went down."""
        raise NotImplementedError
