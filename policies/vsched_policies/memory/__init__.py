"""How large the KV cache is."""

from vsched_policies.memory.auto_profile import AutoProfile
from vsched_policies.memory.fraction import Fraction
from vsched_policies.memory.pinned import Pinned

__all__ = ["AutoProfile", "Fraction", "Pinned"]
