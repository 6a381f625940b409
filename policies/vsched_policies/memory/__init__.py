"""How large the KV cache is."""

from vsched_policies.memory.pinned import Pinned

__all__ = ["Pinned"]
