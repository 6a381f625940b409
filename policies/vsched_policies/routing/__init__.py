"""Which replica serves a request."""

from vsched_policies.routing.round_robin import RoundRobin

__all__ = ["RoundRobin"]
