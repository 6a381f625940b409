"""Which items of a request are encoded now."""

from vsched_policies.encoding.chunk_aware import ChunkAware

__all__ = ["ChunkAware"]
