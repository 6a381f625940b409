"""Pruning policies: the tokens of a video that are left out of the prompt."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from vsched.policy import PruningPolicy, PruningView


class MostChanged(PruningPolicy, frozen=True, kw_only=True):
    """Efficient Video Sampling (EVS): keeps the most changed tokens, of equal ones the earlier.

    Source: Bagrov et al., "Efficient Video Sampling: Pruning Temporally Redundant Tokens for Faster VLM Inference"
    (arXiv 2510.14624). As there, changes are mean differences of pixels; vLLM compares embeddings.
    """

    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Minimum change of a token that is kept, as in `PruningView.changes`."""

    def prune(self, view: PruningView) -> bytes:
        changes = np.asarray(view.changes).reshape(-1)
        order = np.argsort(-changes, kind="stable")[: view.tokens_max]
        kept = np.zeros(len(changes), bool)
        kept[order] = changes[order] >= self.threshold
        return kept.tobytes()
