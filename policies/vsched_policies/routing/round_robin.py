"""Replicas in turn."""

from __future__ import annotations

from vsched.policy import RoutingPolicy, RoutingView


class RoundRobin(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replicas in turn; if none is healthy, a request waits in a replica's queue."""

    def choose(self, view: RoutingView) -> int:
        """Return the next replica in turn."""
        replicas = range(len(view.replicas))
        healthy = [index for index in replicas if view.replicas[index].healthy]
        turns = healthy or replicas
        return turns[view.routed % len(turns)]
