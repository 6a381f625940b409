"""Policies for routing requests to replicas."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.policy.base import Policy, PolicyKey, RequestView, decides
from vsched.policy.checks import check_index
from vsched.policy.measured import Measured, Measurements


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One generate replica. In the server, attributes are computed on access: an unread attribute costs nothing.

    Attributes:
        index: Its index in `view.replicas`.
        load_tokens: Prompt and output tokens of all its waiting and running requests.
        healthy: Whether it accepts requests: it is up and not draining.
        prefix_tokens: Leading prompt tokens of the request that are in its KV cache.
        items_seen: Images of the request that were last sent to it; the router remembers a limited number of images.
        measured: Measurements of this replica.
    """

    index: int
    load_tokens: int
    healthy: bool
    prefix_tokens: int = 0
    items_seen: int = 0
    measured: Measured = msgspec.field(default_factory=Measurements)


class RoutingView(RequestView, frozen=True, kw_only=True):
    """Input of a routing policy: the replicas and the request.

    Attributes:
        replicas: All generate replicas; those that are not `healthy` are not chosen while another one is.
        prompt_tokens: Tokens in the prompt of the request.
        item_keys: Content hashes of its images, in prompt order; empty for none.
        routed: Number of requests routed before it.
        load_limit_tokens: Tokens that one replica can run at the same time: the size of the smallest KV cache.
        max_tokens: Maximum output tokens of the request.
    """

    replicas: Sequence[ReplicaView]
    prompt_tokens: int
    item_keys: Sequence[bytes]
    routed: int
    load_limit_tokens: int = 0
    max_tokens: int = 0


def check_replica(returned: int, count: int, usable: Sequence[int], loads: Sequence[int]) -> int:
    """Return the checked index of one of `count` replicas."""
    del usable, loads
    return check_index(returned, count)


def default_replica(count: int, usable: Sequence[int], loads: Sequence[int]) -> int:
    """Choose the usable replica with the fewest tokens, the first of equals."""
    del count
    return min(usable, key=loads.__getitem__)


class RoutingPolicy(Policy, frozen=True, kw_only=True):
    """Decides which replica serves a request."""

    @decides(
        "routing",
        PolicyKey("routing", "least-loaded", "Choice of the replica for a request."),
        check=check_replica,
        default=default_replica,
    )
    def choose(self, view: RoutingView) -> int:
        """Return an index into `view.replicas`.

        Called if more than one replica can take the request: when it arrives, and again while it waits if its replica
        went down.
        """
        raise NotImplementedError
