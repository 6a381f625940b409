"""Which running request gives way when KV blocks run out."""

from vsched_policies.preemption.cheapest import Cheapest
from vsched_policies.preemption.youngest import Youngest

__all__ = ["Cheapest", "Youngest"]
