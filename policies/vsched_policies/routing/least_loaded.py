"""The replica with the least to do."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import RoutingPolicy, RoutingView


class LeastLoaded(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replica with the fewest tokens; equals take turns.

    A replica's load is what it was given and has not finished: not pulled, waiting and running, in tokens. What it has
    not pulled yet counts, so that a burst spreads before the first of it is seen running. With none healthy, the queue
    of the least loaded holds the request.
    """

    def choose(self, view: RoutingView) -> int:
        """Return the replica with the smallest load."""
        return least_loaded(view, candidates(view))


def candidates(view: RoutingView) -> Sequence[int]:
    """Return the indices of the healthy replicas, or of all of them when none is healthy."""
    every = range(len(view.replicas))
    return [index for index in every if view.replicas[index].healthy] or every


def least_loaded(view: RoutingView, among: Sequence[int]) -> int:
    """Return the one with the smallest load, of several the one whose turn it is."""
    loads = [view.replicas[index].load_tokens for index in among]
    least = min(loads)
    equals = [index for index, load in zip(among, loads, strict=True) if load == least]
    return equals[view.routed % len(equals)]
