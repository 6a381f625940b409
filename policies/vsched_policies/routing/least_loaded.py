"""The replica with the lowest load."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import RoutingPolicy, RoutingView


class LeastLoaded(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replica with the fewest tokens; ties go round robin.

    A replica's load is the tokens of all requests given to it that have not finished: queued,
    waiting and running. Requests not yet pulled by the replica count, so that a burst spreads
    before its first request runs. If no replica is healthy, the request waits in the queue of the
    least loaded one.
    """

    def choose(self, view: RoutingView) -> int:
        """Return the replica with the lowest load."""
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
