"""Construction of a packed batch: the decode rows, one token each, then the tokens of each chunk.

With a large vocabulary, the logits of a long chunk would take gigabytes. So log-probabilities of prompt tokens, from
the logits of the row before each, are computed and dropped a few rows at a time, half the number of slots: sampling for
all slots, which the profiling run measures, takes more memory. As for sampled tokens, they are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import ModelInfo, Spans
from vsched.worker.contract import Batch, Chunk, PromptLogprobs, SequenceState
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep, Segment
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


def bidirectional_spans_of(info: ModelInfo) -> Callable[[SequenceState], Spans] | None:
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


@dataclass(frozen=True, slots=True)
class Images:
    """The image rows of a packed batch: their row numbers, and embedding levels [levels, image rows, hidden]."""

    rows: npt.NDArray[np.int64]
    levels: torch.Tensor


class DeviceInputs(Protocol):
    """Transfer of a step's inputs to a device, implemented by backends.

    Attributes:
        device: The device's name in torch.
        keeps_indices: Whether the layers of a step share the slots and the mask of a chunk (see `Segment`).
    """

    device: str
    keeps_indices: bool

    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copy a small array to the device."""
        ...

    def fetch_rows(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Copy rows of host memory, [rows, bytes], to the device, [wanted, bytes]."""
        ...


def pack(
    batch: Batch,
    cache: KvCache,
    attention: AttentionKernels,
    inputs: DeviceInputs,
    bidirectional_spans: Callable[[SequenceState], Spans] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, PagedStep]:
    """Build token ids [rows], positions [4, 1, rows] and the attention metadata of a step.

    `bidirectional_spans` returns the spans of a sequence with bidirectional attention; None if there are none.
    """
    size = cache.block_size
    decode_rows = len(batch.decode_slots)
    tables = batch.block_tables[batch.decode_slots]
    at = batch.decode_positions
    total = decode_rows + sum(chunk.stop - chunk.start for chunk in batch.chunks)
    ids = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    positions = np.empty((4, 1, total), dtype=np.int64)
    if decode_rows:
        ids[:decode_rows] = batch.decode_tokens
        blocks = tables[np.arange(decode_rows), at // size].astype(np.int64)
        slots[:decode_rows] = blocks * size + at % size
        positions[0, 0, :decode_rows] = at
        deltas = [sequence.state.delta for sequence in batch.decode_sequences]
        positions[1:, 0, :decode_rows] = at + np.array(deltas, dtype=np.int64)
    segments = []
    row = decode_rows
    for chunk in batch.chunks:
        end = row + chunk.stop - chunk.start
        table = batch.block_tables[chunk.slot]
        index = np.arange(chunk.start, chunk.stop)
        ids[row:end] = chunk.sequence.tokens[chunk.start : chunk.stop]
        slots[row:end] = table[index // size].astype(np.int64) * size + index % size
        positions[0, 0, row:end] = index
        positions[1:, 0, row:end] = chunk_positions(chunk, index)
        segments.append(
            Segment(
                table,
                start=row,
                first=chunk.start,
                last=chunk.stop,
                block_size=size,
                device=inputs.device,
                keeps_indices=inputs.keeps_indices,
                prompt_length=chunk.sequence.prompt_length,
                bidirectional_spans=bidirectional_spans(chunk.sequence)
                if bidirectional_spans
                else (),
            )
        )
        row = end
    step = PagedStep(
        cache=cache,
        decode=attention.decode,
        prefill=attention.prefill,
        slots=inputs.send(slots),
        decode_rows=decode_rows,
        tables=tables,
        contexts=at + 1,
        segments=segments,
    )
    return inputs.send(ids), inputs.send(positions), step


def fetch_images(
    batch: Batch, inputs: DeviceInputs, *, dtype: torch.dtype, levels: int, hidden: int
) -> Images | None:
    """Copy the embedding rows that the chunks cover from the arena to the device, and only those."""
    places: list[npt.NDArray[np.int64]] = []
    sources: list[npt.NDArray[np.int64]] = []
    per_page = batch.embeddings.shape[1]
    row = len(batch.decode_slots)
    for chunk in batch.chunks:
        for item in chunk.items:
            wanted = np.arange(item.row_start, item.row_stop)
            pages = np.asarray(item.pages, dtype=np.int64)
            sources.append(pages[wanted // per_page] * per_page + wanted % per_page)
            first = row + item.chunk_start
            places.append(np.arange(first, first + len(wanted)))
        row += chunk.stop - chunk.start
    if not sources:
        return None
    flat = batch.embeddings.reshape(-1, batch.embeddings.shape[2])
    raw = inputs.fetch_rows(flat, np.concatenate(sources))
    return Images(
        rows=np.concatenate(places),
        levels=raw.view(dtype).reshape(len(raw), levels, hidden).transpose(0, 1),
    )


Logits = Callable[[torch.Tensor, int], torch.Tensor]
"""Compute logits [rows, vocabulary] from hidden states [rows, hidden] and the number of rows."""


def has_prompt_logprobs(batch: Batch) -> bool:
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
