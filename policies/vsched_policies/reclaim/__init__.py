"""Reclaim policies: ready embeddings to drop for an image of an older request."""

from vsched_policies.reclaim.youngest_embedding import YoungestEmbedding

__all__ = ["YoungestEmbedding"]
