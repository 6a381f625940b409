"""Routing policies: the replica that serves a request."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from vsched.policy import Fraction, RoutingPolicy, RoutingView


class LeastLoaded(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replica with the fewest tokens; ties go round robin.

    A replica's load is the tokens of all requests given to it that have not finished: queued,
    waiting and running. Requests not yet pulled by the replica count, so that a burst spreads
    before its first request runs. If no replica is healthy, the request waits in the queue of the
    least loaded one.
    """

    def choose(self, view: RoutingView) -> int:
        return least_loaded(view, candidates(view))


def candidates(view: RoutingView) -> Sequence[int]:
    """Return the indices of the healthy replicas, or of all of them if none is healthy."""
    every = range(len(view.replicas))
    return [index for index in every if view.replicas[index].healthy] or every


def least_loaded(view: RoutingView, among: Sequence[int]) -> int:
    """Return the replica with the lowest load; ties go round robin."""
    loads = [view.replicas[index].load_tokens for index in among]
    least = min(loads)
    equals = [index for index, load in zip(among, loads, strict=True) if load == least]
    return equals[view.routed % len(equals)]


class ImageAffinity(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replica with most of the prompt cached, within a bound on load.

    A replica whose load exceeds the lowest load by more than the bound is left out, whatever it has
    cached: a popular image must not attract all requests to one replica. Among the others, the one
    with the largest share of the prompt in its KV cache is chosen; being the last replica to
    receive the request's images counts half as much, because it makes a cached prefix likely but
    not certain. Ties are broken by a rendezvous hash of the first image, so that requests with
    equal new images meet on one replica, and stay there when other replicas come or go; without
    images, by load.

    Attributes:
        imbalance: Maximum load above the least loaded replica, as a share of the capacity of a
            replica.
    """

    imbalance: Fraction = 0.03

    def choose(self, view: RoutingView) -> int:
        healthy = candidates(view)
        least = min(view.replicas[index].load_tokens for index in healthy)
        limit = least + self.imbalance * view.load_limit_tokens
        within = [index for index in healthy if view.replicas[index].load_tokens <= limit]
        most = max(_known(view, index) for index in within)
        equals = [index for index in within if _known(view, index) == most]
        if not view.item_keys:
            return least_loaded(view, equals)
        return max(equals, key=lambda index: _weight(view.item_keys[0], view.replicas[index].index))


def _known(view: RoutingView, index: int) -> int:
    """Return the share of the prompt in the KV cache, plus half the share of the images, times twice both sizes."""
    replica = view.replicas[index]
    images = max(len(view.item_keys), 1)
    return 2 * replica.prefix_tokens * images + replica.items_seen * view.prompt_tokens


def _weight(key: bytes, replica: int) -> bytes:
    """Return the rendezvous hash of a replica for an image, which does not depend on other replicas."""
    return blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()


class RoundRobin(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replicas in turn; if none is healthy, a request waits in a replica's queue."""

    def choose(self, view: RoutingView) -> int:
        turns = candidates(view)
        return turns[view.routed % len(turns)]
