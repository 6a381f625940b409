"""Which cached embeddings or prefix blocks go."""

from vsched_policies.eviction.lru import Lru

__all__ = ["Lru"]
