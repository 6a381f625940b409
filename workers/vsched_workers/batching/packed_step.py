"""Construction of a packed batch: the decode rows, one token each, then the tokens of each chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import Spans
from vsched.worker.contract import Batch, SequenceState
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep, Segment
from vsched_workers.batching.step_rows import chunk_positions


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
    mutual: Callable[[SequenceState], Spans] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, PagedStep]:
    """Build token ids [rows], positions [4, 1, rows] and the attention metadata of a step.

    `mutual` returns the spans of a sequence with bidirectional attention; None if there are none.
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
                mutual=() if mutual is None else mutual(chunk.sequence),
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
