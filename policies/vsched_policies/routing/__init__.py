"""Routing policies: the replica that serves a request."""

from vsched_policies.routing.image_affinity import ImageAffinity
from vsched_policies.routing.least_loaded import LeastLoaded
from vsched_policies.routing.round_robin import RoundRobin

__all__ = ["ImageAffinity", "LeastLoaded", "RoundRobin"]
