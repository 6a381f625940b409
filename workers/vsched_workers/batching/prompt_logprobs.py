"""Log-probabilities of prompt tokens, from the logits of the row before each.

With a large vocabulary, the logits of a long chunk would take gigabytes. So they are computed and dropped a few rows at
a time, half the number of slots: sampling for all slots, which the profiling run measures, takes more memory. As for
sampled tokens, log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vsched.worker.contract import Batch, Chunk, PromptLogprobs

Logits = Callable[[torch.Tensor, int], torch.Tensor]
"""Compute logits [rows, vocabulary] from hidden states [rows, hidden] and the number of rows."""


def tells_prompts(batch: Batch) -> bool:
    """Return whether a chunk of a batch needs prompt log-probabilities."""
    return any(chunk.reported for chunk in batch.chunks)


def prompt_logprobs(
    batch: Batch, hidden: torch.Tensor, logits: Logits, *, rows_max: int
) -> list[PromptLogprobs]:
    """Return the prompt log-probabilities of a batch's chunks.

    Shape: hidden [rows, hidden], of all rows of the step; `logits` gets at most `rows_max` of them at a time.
    """
    found = []
    row = len(batch.decode_slots)
    for index, chunk in enumerate(batch.chunks):
        if chunk.reported:
            pieces = [
                _piece(logits(hidden[row + first : row + last], last - first), chunk, first)
                for first, last in _ranges(chunk.reported, rows_max)
            ]
            logprobs, ranks, ids, top = (np.concatenate(one) for one in zip(*pieces, strict=True))
            found.append(PromptLogprobs(index, logprobs, ranks, ids, top))
        row += chunk.stop - chunk.start
    return found


def _ranges(count: int, size: int) -> Sequence[tuple[int, int]]:
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _piece(
    logits: torch.Tensor, chunk: Chunk, first: int
) -> tuple[
    npt.NDArray[np.float32],
    npt.NDArray[np.int32],
    npt.NDArray[np.int32],
    npt.NDArray[np.float32],
]:
    """Return log-probabilities, ranks, and the best tokens with theirs, for rows of a chunk from `first` on."""
    start = chunk.start + 1 + first
    following = chunk.sequence.tokens[start : start + len(logits)].astype(np.int64)
    raw = logits.float()
    reported = torch.from_numpy(following).to(raw.device)[:, None]
    own = raw.gather(1, reported)
    ranks = (raw > own).sum(dim=1) + 1
    total = raw.logsumexp(dim=1, keepdim=True)
    count = min(chunk.sequence.sampling.prompt_logprobs or 0, raw.shape[1])
    best, ids = raw.topk(count, dim=1)
    return (
        (own - total)[:, 0].cpu().numpy(),
        ranks.cpu().numpy().astype(np.int32),
        ids.cpu().numpy().astype(np.int32),
        (best - total).cpu().numpy(),
    )
