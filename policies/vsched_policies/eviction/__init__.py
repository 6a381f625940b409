"""Eviction policies: the order in which cached embeddings or prefix blocks are evicted."""

from vsched_policies.eviction.keep_nothing import KeepNothing
from vsched_policies.eviction.lru import Lru
from vsched_policies.eviction.s3_fifo import S3Fifo

__all__ = ["KeepNothing", "Lru", "S3Fifo"]
