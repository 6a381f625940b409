"""Decode steps that are captured once and started again: CUDA graphs, one for each of a few numbers of rows.

A captured step reads and writes fixed memory, and prepares its own successor: the tokens that it samples are the next
step's input, and every position moves on by one. So as long as the same rows decode, the host sends nothing, and a
step need not wait until the host has seen the tokens of the one before. What the host does send, it sends whole: one
header and the block tables, from pinned memory.

Rows are padded to the next number that was captured. Padding sits at position 0 of a spare block that belongs to
nobody, stays there, and is dropped.

**One step ahead.** A step is started before the host has read the one before it, when decoding has been steady and when
no row enters another block: which block that is, a decision has yet to say. The next batch then asks for what is under
way, or for fewer rows of it (some have finished), and gets it. Otherwise the step is dropped. That does no harm: it
wrote the keys and values of tokens that were sampled, at their place, in blocks that were their row's when it was
started; whoever gets these blocks writes later on the same stream and reads only what it wrote.

**Sampled rows.** Their tokens are drawn behind the captured step, on the same stream, and take the place of the argmax
as the next step's input. What a draw depends on, the host says when it starts the step; it knows all of it but the last
token, which is on the device (`StagedDraw`). So nothing is kept there from step to step, a dropped step has changed
nothing, and a recomputed one draws the same. Rows whose draw the host must prepare with that last token in hand, as
those with a grammar, keep the step from being started ahead (`is_foreseeable`).

A captured step holds on to the KV cache. It is captured in the first step over a cache, so while the size of the cache
is measured, and its memory counts as that of any other step.

Not yet run on a GPU; everything but the capture itself was tested on a CPU.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched.errors import DeviceOutOfMemory
from vsched.worker.contract import Batch, Sampled, SequenceState
from vsched_workers.backends.base import RunModel
from vsched_workers.backends.cuda.graph_stream import Act, GraphStream, row_counts
from vsched_workers.batching.device_sampling import StagedDraw, is_foreseeable
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep
from vsched_workers.batching.sampling import SpecialRow, with_logprobs
from vsched_workers.batching.step_rows import special_rows
from vsched_workers.memory.out_of_memory import typed_out_of_memory

logger = logging.getLogger(__name__)

STEADY_STEPS = 2
"""Steps of nothing but decode after which steps run ahead: while requests come and go, that would be in vain."""

_TOKEN, _AT, _DELTA, _GROWS, _HEADER = 0, 1, 2, 3, 4
_HOST_BUFFERS = 2


@dataclass
class _GraphRows:
    """What a start of a captured step computes; `tokens` are its input, None until the host has read them."""

    slots: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    sequences: Sequence[SequenceState]
    special: Sequence[tuple[int, SequenceState]]
    tokens: npt.NDArray[np.int32] | None

    def later(self) -> _GraphRows:
        """Return the same rows, one token on."""
        return _GraphRows(self.slots, self.positions + 1, self.sequences, self.special, None)

    def drawn(self) -> list[SpecialRow]:
        """Return the special rows, each with the index of the token that is drawn."""
        return [
            SpecialRow(row, int(self.positions[row]) + 1, sequence)
            for row, sequence in self.special
        ]

    def places(self, batch: Batch) -> npt.NDArray[np.int64] | None:
        """Return where each row of a batch is among these; None when one is not, or is not the same."""
        if self.tokens is None:
            return None
        found = np.searchsorted(self.slots, batch.decode_slots)
        if found[-1] >= len(self.slots):
            return None
        same = self.slots[found] == batch.decode_slots
        same &= self.positions[found] == batch.decode_positions
        same &= self.tokens[found] == batch.decode_tokens
        if not same.all():
            return None
        pairs = zip(found.tolist(), batch.decode_sequences, strict=True)
        return found if all(self.sequences[one] is other for one, other in pairs) else None


@dataclass
class _InFlightStep:
    """A step that was started: its rows, those of the step that would follow, and its results once `wait` is over."""

    rows: _GraphRows
    following: _GraphRows
    logits: torch.Tensor
    tokens: torch.Tensor
    wait: Act
    draw: StagedDraw | None

    def read(self) -> npt.NDArray[np.int32]:
        """Return the tokens, int32 [rows], when they are there; they are what the following step was given.

        Raises:
            FloatingPointError: When there was nothing to draw one from.
        """
        self.wait()
        found: npt.NDArray[np.int32] = self.tokens.numpy()[: len(self.rows.slots)].copy()
        if self.draw is not None:
            self.draw.check(found[self.draw.rows])
        self.following.tokens = found
        return found


class DecodeGraphs:
    """The captured decode steps over one KV cache."""

    def __init__(
        self,
        stream: GraphStream,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        *,
        reserved: Callable[[], int],
    ) -> None:
        """Prepare; the cache has a spare block. `reserved` tells the memory that is taken, for the log."""
        self._stream = stream
        self._cache = cache
        self._attention = attention
        self._run = run
        self._reserved = reserved
        self._off = False
        self._captured: dict[int, tuple[Act, torch.Tensor]] = {}
        self._header: torch.Tensor
        self._tables: torch.Tensor
        self._tokens: torch.Tensor
        self._host: list[tuple[torch.Tensor, torch.Tensor, list[Act]]] = []
        self._read: list[torch.Tensor] = []
        self._next_read = 0
        self._next: _GraphRows | None = None
        self._in_flight: _InFlightStep | None = None
        self._steady = 0

    def step(self, batch: Batch) -> Sampled | None:
        """Run a step; None when this one has to be run otherwise, which it then may be at once.

        Blocks: until the step is done.

        Raises:
            DeviceOutOfMemory: When the memory does not suffice to capture.
        """
        if self._off or (not self._captured and not self._capture(*batch.block_tables.shape)):
            return None
        if not self._fits(batch):
            self._yield_stream()
            return None
        step, self._in_flight = self._in_flight, None
        picked = step.rows.places(batch) if step is not None and _foreseen(batch) else None
        if step is None or picked is None:
            if step is not None:
                self._steady = 0
            step, picked = self._begin(batch), None
        self._steady += 1
        if self._may_go_ahead(batch, step):
            self._in_flight = self._start(step.following, ahead=True)
        tokens = step.read()
        if picked is not None:
            return Sampled(tokens=tokens[picked])
        return with_logprobs(tokens, step.logits, special_rows(batch))

    def drop(self) -> None:
        """Forget what was captured, and what it points to."""
        self._in_flight = None
        self._captured.clear()
        self._stream.forget()

    def _fits(self, batch: Batch) -> bool:
        rows, (rows_max, width) = len(batch.decode_slots), self._tables.shape
        if batch.chunks or not 0 < rows <= rows_max:
            return False
        if any(sequence.adapter for sequence in batch.decode_sequences):
            return False  # captured without adapters: which rows have one, and the adapters, change from step to step
        return bool(batch.decode_positions.max() < width * self._cache.block_size)

    def _yield_stream(self) -> None:
        """Let what runs elsewhere next come after the step that is under way here."""
        if self._in_flight is not None:
            self._stream.let_others_wait()
        self._in_flight = None
        self._next = None
        self._steady = 0

    # --- steps ---

    def _begin(self, batch: Batch) -> _InFlightStep:
        """Start the step of a batch, sending what the device does not have."""
        self._stream.wait_for_others()
        rows = self._next
        if rows is None or not self._goes_on(batch, rows):
            rows = self._upload(batch)
        rows.special = list(batch.special)
        return self._start(rows)

    def _goes_on(self, batch: Batch, rows: _GraphRows) -> bool:
        """Return whether the device is prepared for this batch; a block that a row enters it does not know."""
        if len(rows.slots) != len(batch.decode_slots) or rows.places(batch) is None:
            return False
        return bool((batch.decode_positions % self._cache.block_size).all())

    def _may_go_ahead(self, batch: Batch, step: _InFlightStep) -> bool:
        if self._steady <= STEADY_STEPS or not _foreseen(batch):
            return False
        if len(step.rows.slots) != len(batch.decode_slots):
            return False
        return bool((step.following.positions % self._cache.block_size).all())

    def _start(self, rows: _GraphRows, *, ahead: bool = False) -> _InFlightStep:
        """Start the step that the device is prepared for, and have its tokens read back.

        With `ahead`, the host has not read the tokens of the step before.
        """
        count = len(rows.slots)
        replay, logits = self._captured[self._bucket(count)]
        draw = None
        if rows.special:
            draw = StagedDraw(rows.drawn(), logits.shape[1], ahead=ahead)
            replay = functools.partial(self._draw, replay, draw, logits, ahead=ahead)
        self._stream.start(replay)
        read = self._read[self._next_read]
        self._next_read = (self._next_read + 1) % len(self._read)
        wait = self._stream.download(self._tokens, read)
        step = _InFlightStep(rows, rows.later(), logits[:count], read, wait, draw)
        self._next = step.following
        return step

    def _draw(self, replay: Act, draw: StagedDraw, logits: torch.Tensor, *, ahead: bool) -> None:
        """Run a captured step, and put what is drawn in the place of its argmax."""
        token = self._header[_TOKEN]
        last = token.clone() if ahead else None
        replay()
        drawn = draw.run(logits, last)
        rows = draw.rows_on(logits.device)
        self._tokens[rows] = drawn
        token[rows] = drawn.clamp(min=0)

    def _bucket(self, count: int) -> int:
        return min(rows for rows in self._captured if rows >= count)

    def _upload(self, batch: Batch) -> _GraphRows:
        """Send the rows of a batch, padded."""
        header, tables, pending = self._host[0]
        self._host.append(self._host.pop(0))
        while pending:
            pending.pop()()
        count = len(batch.decode_slots)
        padded = self._bucket(count)
        filled = header.numpy()
        filled[:] = 0
        filled[_TOKEN, :count] = batch.decode_tokens
        filled[_AT, :count] = batch.decode_positions
        filled[_DELTA, :count] = [sequence.state.delta for sequence in batch.decode_sequences]
        filled[_GROWS, :count] = 1
        blocks = int(batch.decode_positions.max()) // self._cache.block_size + 1
        rows: Any = tables.numpy()
        rows[:count, :blocks] = batch.block_tables[batch.decode_slots, :blocks]
        rows[count:padded, 0] = self._cache.blocks
        pending.append(self._stream.upload(header, self._header))
        pending.append(self._stream.upload(tables[:padded], self._tables[:padded]))
        return _GraphRows(
            batch.decode_slots.copy(),
            batch.decode_positions.copy(),
            list(batch.decode_sequences),
            list(batch.special),
            batch.decode_tokens.copy(),
        )

    # --- capture ---

    def _capture(self, slots: int, width: int) -> bool:
        """Capture a step for each number of rows, the largest first: the others fit into its memory."""
        started_s, before = time.perf_counter(), self._reserved()
        device = self._cache.keys[0].device
        whole = {"dtype": torch.int32, "device": device}
        try:
            with typed_out_of_memory("capturing decode steps"):
                self._header = torch.zeros((_HEADER, slots), **whole)
                self._tables = torch.full((slots, width), self._cache.blocks, **whole)
                self._tokens = torch.zeros(slots, **whole)
                self._host = [
                    (self._stream.host(_HEADER, slots), self._stream.host(slots, width), [])
                    for _ in range(_HOST_BUFFERS)
                ]
                self._read = [self._stream.host(slots) for _ in range(_HOST_BUFFERS)]
                captured = {
                    rows: self._stream.capture(functools.partial(self._compute, rows))
                    for rows in reversed(row_counts(slots))
                }
        except DeviceOutOfMemory:
            self._stream.forget()
            raise
        except RuntimeError as error:
            self._stream.forget()
            self._off = True
            logger.warning("decode steps run without CUDA graphs, which is slower: %s", error)
            return False
        self._captured = captured
        spent_s, taken = time.perf_counter() - started_s, self._reserved() - before
        logger.info(
            "captured decode steps of up to %d rows in %.1f s, %d MiB", slots, spent_s, taken >> 20
        )
        return True

    def _compute(self, rows: int) -> torch.Tensor:
        """Run one step over the fixed memory, and prepare the next; this is what is captured."""
        size = self._cache.block_size
        token, at, delta, grows = self._header[:, :rows]
        tables, index = self._tables[:rows], at.long()
        blocks = tables.gather(1, (index // size)[:, None])[:, 0].long()
        contexts = at + 1
        step = PagedStep(
            cache=self._cache,
            decode=self._attention.decode,
            prefill=self._attention.prefill,
            slots=blocks * size + index % size,
            decode_rows=rows,
            tables=_NO_TABLES,
            contexts=_NO_CONTEXTS,
            segments=[],
            on_device=(tables, contexts),
        )
        moved = index + delta
        positions = torch.stack((index, moved, moved, moved))[:, None]
        logits = self._run(token.long(), positions, step)
        chosen = logits.argmax(dim=-1).int()
        self._tokens[:rows].copy_(chosen)
        token.copy_(chosen)
        at.add_(grows)
        return logits


def _foreseen(batch: Batch) -> bool:
    """Return whether all draws can be staged before the last tokens are known."""
    return all(is_foreseeable(sequence) for _, sequence in batch.special)


_NO_TABLES: npt.NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
_NO_CONTEXTS: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
