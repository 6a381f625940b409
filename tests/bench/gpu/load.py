"""Batches for standalone workers: a KV cache, requests in it, images to encode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.bench.gpu.costs import MERGE, PATCH, grid_of
from tests.bench.gpu.shapes import Model
from vsched.types import ItemPlace, SamplingParams
from vsched.worker.contract import Batch, Chunk, EncodeJob, ItemRows, SequenceState
from vsched_workers.families.qwen_image import image_plan

BLOCK_SIZE = 16
PAGE_ROWS = 64
TEXT_TOKENS = 64
"""Tokens of text around each image of a conversation."""


@dataclass
class DecodeRows:
    """Requests that decode together, step after step."""

    model: Model
    tables: npt.NDArray[np.int32]
    sequences: list[SequenceState]
    tokens: npt.NDArray[np.int32]
    position: int

    def step(self) -> None:
        """Run one step; its tokens are the input of the next one."""
        count = len(self.sequences)
        batch = Batch(
            decode_slots=np.arange(count, dtype=np.int32),
            decode_tokens=self.tokens,
            decode_positions=np.full(count, self.position, dtype=np.int32),
            decode_sequences=self.sequences,
            block_tables=self.tables,
            embeddings=np.empty((0, PAGE_ROWS, self.model.info.embedding_row_bytes), np.uint8),
        )
        self.tokens = self.model.language.step(batch).tokens
        self.position += 1


class Load:
    """A KV cache for `slots` requests of `context` tokens, and batches on it."""

    def __init__(self, model: Model, *, slots: int, context: int) -> None:
        """Build the cache with blocks in shuffled order."""
        self._model = model
        width = -(-context // BLOCK_SIZE)
        model.language.build_kv(blocks=slots * width, block_size=BLOCK_SIZE)
        chance = np.random.default_rng(0)
        blocks = chance.permutation(slots * width).astype(np.int32)
        self._tables = blocks.reshape(slots, width)
        self._chance = chance
        self._context = context

    def decode_rows(self, context: int) -> DecodeRows:
        """Return requests in all slots with `context` earlier tokens each."""
        sequences = [self._sequence([], 8, number) for number in range(len(self._tables))]
        tokens = np.ones(len(sequences), dtype=np.int32)
        return DecodeRows(self._model, self._tables, sequences, tokens, context)

    def prefill(
        self, first: int, rows: int, image: tuple[int, int] | None = None
    ) -> Callable[[], object]:
        """Return a function that computes positions [first, first + rows) of a prompt, full of such images if any."""
        stop, items, embeddings = first + rows, [], self._pages(0)
        if image is not None:
            grid = grid_of(image)
            plan = image_plan(grid, merge=MERGE, patch=PATCH, channels=3)
            tokens = plan.tokens
            each = tokens + TEXT_TOKENS
            items = [ItemPlace(at, tokens, plan.metadata) for at in range(1, stop - tokens, each)]
            embeddings = self._pages(tokens)
        sequence = self._sequence(items, stop, 0)
        pages = list(range(len(embeddings)))
        covered = [
            ItemRows(index, position - first, row, row + count, pages)
            for index, place in enumerate(items)
            for position, row, count in place.rows(first, stop)
        ]
        none = np.empty(0, dtype=np.int32)
        batch = Batch(
            decode_slots=none,
            decode_tokens=none,
            decode_positions=none,
            decode_sequences=[],
            block_tables=self._tables,
            embeddings=embeddings,
            chunks=[Chunk(0, sequence, first, stop, samples=True, items=covered)],
        )
        return lambda: self._model.language.step(batch)

    def encode(self, size: tuple[int, int], count: int) -> Callable[[], object]:
        """Return a function that encodes `count` images of one size in one batch."""
        plan = image_plan(grid_of(size), merge=MERGE, patch=PATCH, channels=3)
        pixels, levels = plan.arrays
        arrays = {
            pixels.name: self._chance.integers(0, 256, pixels.shape, np.uint8),
            levels.name: self._chance.standard_normal(levels.shape, np.float32),
        }
        embeddings = self._pages(plan.tokens)
        job = EncodeJob(b"", plan.tokens, arrays, plan.metadata, range(len(embeddings)))
        return lambda: self._model.vision.encode([job] * count, embeddings)

    def _pages(self, tokens: int) -> npt.NDArray[np.uint8]:
        row = self._model.info.embedding_row_bytes
        return np.zeros((-(-tokens // PAGE_ROWS), PAGE_ROWS, row), dtype=np.uint8)

    def _sequence(self, items: list[ItemPlace], length: int, number: int) -> SequenceState:
        info = self._model.info
        tokens = self._chance.integers(0, 256, length).astype(np.int32)
        for place in items:
            tokens[place.offset : place.offset + place.tokens] = info.placeholder
        sequence = SequenceState(
            number=number,
            tokens=tokens,
            length=length,
            prompt_length=length,
            items=items,
            sampling=SamplingParams(temperature=0.0),
            stop_token_ids=frozenset(),
        )
        self._model.language.prepare(sequence)
        return sequence
