"""Encoding policies: the images of a request to encode now."""

from vsched_policies.encoding.chunk_aware import ChunkAware
from vsched_policies.encoding.combined import Combined
from vsched_policies.encoding.eager import Eager

__all__ = ["ChunkAware", "Combined", "Eager"]
