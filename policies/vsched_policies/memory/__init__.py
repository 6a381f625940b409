"""Memory policies: the size of the KV cache."""

from vsched_policies.memory.auto_profile import AutoProfile
from vsched_policies.memory.fraction import Fraction
from vsched_policies.memory.pinned import Pinned

__all__ = ["AutoProfile", "Fraction", "Pinned"]
