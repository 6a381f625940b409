"""Pruning policies: the tokens of a video that are left out of the prompt."""

from vsched_policies.pruning.most_changed import MostChanged

__all__ = ["MostChanged"]
