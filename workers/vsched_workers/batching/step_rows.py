"""The rows of a packed step: their positions, the rows that are sampled, and the special rows among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsched.types import ModelInfo, Spans
from vsched.worker.contract import Batch, Chunk, SequenceState
from vsched_workers.batching.sampling import SpecialRow


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """The mrope positions of a request, which the worker keeps.

    `positions` are the prompt's, int64 [3, prompt tokens]; a later token's position is its index plus `delta`,
    on all three axes.
    """

    positions: npt.NDArray[np.int64]
    delta: int


def chunk_positions(chunk: Chunk, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the mrope positions [3, tokens] of a chunk, which may extend beyond the prompt after a recompute."""
    state: PromptPositions = chunk.sequence.state
    prompt = chunk.sequence.prompt_length
    if chunk.stop <= prompt:
        return state.positions[:, chunk.start : chunk.stop]
    later = np.broadcast_to(index + state.delta, (3, len(index)))
    if chunk.start >= prompt:
        return later
    inside = prompt - chunk.start
    return np.concatenate([state.positions[:, chunk.start :], later[:, inside:]], axis=1)


def sampling_rows(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the packed rows that are sampled: the decode rows, then the last row of each chunk that samples."""
    decode_rows = len(batch.decode_slots)
    last: list[int] = []
    row = decode_rows
    for chunk in batch.chunks:
        row += chunk.stop - chunk.start
        if chunk.samples:
            last.append(row - 1)
    return np.concatenate([np.arange(decode_rows), np.array(last, dtype=np.int64)])


def special_rows(batch: Batch) -> list[SpecialRow]:
    """Pair each special row with the index of its new token."""
    if not batch.special:
        return []
    decode_rows = len(batch.decode_slots)
    ends = [chunk.stop for chunk in batch.chunks if chunk.samples]
    return [
        SpecialRow(
            row=row,
            position=int(batch.decode_positions[row]) + 1
            if row < decode_rows
            else ends[row - decode_rows],
            sequence=sequence,
        )
        for row, sequence in batch.special
    ]


def mutual_spans(info: ModelInfo) -> Callable[[SequenceState], Spans] | None:
    """Return a function for a sequence's spans with bidirectional attention; None if there are none."""
    if info.prompt_atomic:
        return lambda sequence: ((0, sequence.prompt_length),)
    if info.item_atomic:
        return lambda sequence: tuple(
            span
            for item in sequence.items
            for span in (item.runs if item.attention is None else item.attention)
        )
    return None
