"""Reclaim policies: ready embeddings to drop for an image of an older request."""

from vsched_policies.reclaim.best_fit import BestFit
from vsched_policies.reclaim.least_urgent import LeastUrgent
from vsched_policies.reclaim.youngest_embedding import YoungestEmbedding

__all__ = ["BestFit", "LeastUrgent", "YoungestEmbedding"]
