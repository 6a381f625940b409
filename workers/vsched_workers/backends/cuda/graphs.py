"""Captured decode steps: CUDA graphs for a few batch sizes.

A captured step reads and writes fixed memory, and prepares its own successor: the tokens that it samples are the next
step's input, and every position advances by one. So as long as the same sequences decode, the host sends nothing, and a
step need not wait until the host has read the tokens of the step before. Otherwise the host sends everything: one
header and the block tables, from pinned memory.

Batches are padded to the next captured size. Padding rows stay at position 0 of a spare block that no sequence uses,
and their results are dropped.

**One step ahead.** In steady decoding, a step is started before the host has read the results of the step before it, if
no sequence enters a new block, which the kernel has yet to allocate. The next batch then usually asks for the step in
flight, or for a subset of its rows (some sequences have finished), and gets its results. Otherwise the step is dropped.
That does no harm: it wrote the keys and values of sampled tokens, at their positions, in blocks that belonged to their
sequences when it was started; the next owner of these blocks writes later on the same stream and reads only its own
writes. States of recurrent layers, however, would advance twice: models with such layers run no step ahead.

**Sampled rows.** Their tokens are drawn after the captured step, on the same stream, and replace the argmax as the next
step's input. The host provides the inputs of a draw when it starts the step; it knows all of them but the last token,
which is on the device (`StagedDraw`). So the device keeps no sampling state between steps, a dropped step has changed
nothing, and a recomputed one draws the same. Rows whose draw the host must prepare with the last token, such as rows
with a grammar, prevent starting ahead (`is_foreseeable`).

**The graph stream.** Captured steps run on a CUDA stream of their own: if one process serves both stages, images are
encoded on the current stream, while a decode step continues. Prefill reads and writes the same KV cache as decode, so
the two wait for each other, as `DecodeGraphs` decides. Tests without a GPU use another stream instead, which delays its
work, as a GPU may.

A captured step refers to the KV cache. It is captured in the first step over a cache, thus while the size of the cache
is measured, and its memory counts as that of other steps. Everything but the capture itself is tested on a CPU as well.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched.errors import DeviceOutOfMemory
from vsched.worker.contract import Batch, Sampled, SequenceState
from vsched_workers.backends.base import RunModel
from vsched_workers.backends.cuda.attention_trials import WITHIN
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.packed_step import special_rows
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep, StatesOfStep
from vsched_workers.batching.recurrent_state import RecurrentStates
from vsched_workers.batching.sampling import (
    SpecialRow,
    StagedDraw,
    greedy_tokens,
    is_foreseeable,
    with_logprobs,
)
from vsched_workers.memory.out_of_memory import typed_out_of_memory

Run = Callable[[], torch.Tensor]
Act = Callable[[], None]


class CudaGraphStream:
    """A high-priority stream, CUDA graphs with a shared memory pool, and asynchronous copies.

    It runs captured steps in the order in which they are started; only the methods marked so block.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream: Any = torch.cuda.Stream(device=self._device, priority=-1)
        self._graphs: list[Any] = []
        self._pool: Any = None

    def host(self, *shape: int) -> torch.Tensor:
        """Return host memory, int32, for `copy`."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Act:
        """Copy between host and device; return a function that waits until it is done.

        Before, the host must neither overwrite the source nor read the target.
        """
        done: Any = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        wait: Act = done.synchronize
        return wait

    def capture(self, run: Run) -> tuple[Act, torch.Tensor]:
        """Capture `run`; return a function that replays it, and the tensor that `run` returned, which is reused.

        Blocks: during two eager runs first: one, so that nothing is compiled or permanently allocated in the capture,
        and one that fails where the capture would, because the host waits for the device.

        Raises:
            RuntimeError: When it cannot be captured.
        """
        self.wait_for_others()
        with torch.cuda.stream(self._stream):
            run()
            with _without_waits():
                run()
            self._stream.synchronize()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph: Any = torch.cuda.CUDAGraph()
            # Other threads of the process do not use the GPU, and must not invalidate the capture.
            recording: Any = torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
            try:
                with recording:
                    result = run()
            except BaseException:
                _close_pool(self._pool)
                raise
        self._graphs.append(graph)
        replay: Act = graph.replay
        return replay, result

    def start(self, replay: Act) -> None:
        """Start a captured step."""
        with torch.cuda.stream(self._stream):
            replay()

    def wait_for_others(self) -> None:
        """Make later work on this stream wait for earlier work on other streams."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def let_others_wait(self) -> None:
        """Make later work on other streams wait for earlier work on this stream."""
        current: Any = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)

    def forget(self) -> None:
        """Free the captured steps."""
        self._stream.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None


@contextmanager
def _without_waits() -> Iterator[None]:
    """Context in which a synchronization of the host with the device raises a RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _close_pool(pool: Any) -> None:
    """End the allocations of a failed capture in its pool, and give up its share of the pool.

    Torch before 2.13 does neither (pytorch #180395, #190348): its allocator would defer the release of memory that
    several streams have used, such as rows of images, until the capture ends, for ever, and keep the pool's memory.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # they have ended
        torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001
        torch._C._cuda_releasePool(device, pool)  # noqa: SLF001


def row_counts(rows_max: int) -> Sequence[int]:
    """Return the batch sizes to capture, ascending: powers of two, and the largest batch."""
    counts = [1 << power for power in range(rows_max.bit_length()) if 1 << power < rows_max]
    return [*counts, rows_max]


logger = logging.getLogger(__name__)

STEADY_STEPS = 2
"""Decode-only steps in a row before steps run ahead: earlier, requests that come and go would make it futile."""

_TRIED_TOKEN = 1
"""Token of the replays in the trial of a captured step."""

_TOKEN, _AT, _DELTA, _GROWS, _STATE, _HEADER = 0, 1, 2, 3, 4, 5
_HOST_BUFFERS = 2


@dataclass
class _GraphRows:
    """The rows of a started captured step; `tokens` are its input, None until the host has read them."""

    slots: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    sequences: Sequence[SequenceState]
    special: Sequence[tuple[int, SequenceState]]
    tokens: npt.NDArray[np.int32] | None

    def later(self) -> _GraphRows:
        """Return the same rows, one token later."""
        return _GraphRows(self.slots, self.positions + 1, self.sequences, self.special, None)

    def drawn(self) -> list[SpecialRow]:
        """Return the special rows, each with the index of its new token."""
        return [
            SpecialRow(row, int(self.positions[row]) + 1, sequence)
            for row, sequence in self.special
        ]

    def places(self, batch: Batch) -> npt.NDArray[np.int64] | None:
        """Return the index of each row of a batch among these; None if one is missing or differs."""
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
    """A started step: its rows, the rows of the following step, and its results after `wait`."""

    rows: _GraphRows
    following: _GraphRows
    logits: torch.Tensor
    tokens: torch.Tensor
    wait: Act

    def read_tokens(self) -> npt.NDArray[np.int32]:
        """Wait for the tokens, int32 [rows], and return them; they are the input of the following step."""
        self.wait()
        found: npt.NDArray[np.int32] = self.tokens.numpy()[: len(self.rows.slots)].copy()
        self.following.tokens = found
        return found


class DecodeGraphs:
    """The captured decode steps over one KV cache."""

    def __init__(
        self,
        stream: CudaGraphStream,
        cache: KvCache,
        attention: AttentionKernels,
        run: RunModel,
        *,
        reserved: Callable[[], int],
        states: RecurrentStates | None = None,
    ) -> None:
        """Prepare; the cache has a spare block, and states a spare row. `reserved` returns the memory in use."""
        self._stream = stream
        self._cache = cache
        self._attention = attention
        self._run = run
        self._reserved = reserved
        self._states = states
        self._spare_state = 0 if states is None else states.spare
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
        """Run a step; return None if the batch must be run layer by layer, which may be done at once.

        Blocks: until the step is done.

        Raises:
            DeviceOutOfMemory: When there is too little memory for the capture.
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
            step, picked = self._start_batch(batch), None
        self._steady += 1
        if self._may_go_ahead(batch, step):
            self._in_flight = self._start_rows(step.following, ahead=True)
        tokens = step.read_tokens()
        if picked is not None:
            return Sampled(tokens=tokens[picked])
        return with_logprobs(tokens, step.logits, special_rows(batch))

    def let_others_wait(self) -> None:
        """Make later work on other streams wait for the step in flight."""
        if self._in_flight is not None:
            self._stream.let_others_wait()

    def drop_steps(self) -> None:
        """Drop the captured steps and the memory that they refer to."""
        self._in_flight = None
        self._captured.clear()
        self._stream.forget()

    def _fits(self, batch: Batch) -> bool:
        rows, (rows_max, width) = len(batch.decode_slots), self._tables.shape
        if batch.chunks or not 0 < rows <= rows_max:
            return False
        if any(sequence.adapter for sequence in batch.decode_sequences):
            return False  # captured without adapters: rows with adapters, and the adapters, change between steps
        return bool(batch.decode_positions.max() < width * self._cache.block_size)

    def _yield_stream(self) -> None:
        """Drop the step in flight, for which later work on other streams waits."""
        self.let_others_wait()
        self._in_flight = None
        self._next = None
        self._steady = 0

    # --- steps ---

    def _start_batch(self, batch: Batch) -> _InFlightStep:
        """Start the step of a batch; upload the batch if it is not on the device."""
        self._stream.wait_for_others()
        rows = self._next
        if rows is None or not self._goes_on(batch, rows):
            rows = self._upload(batch)
        rows.special = list(batch.special)
        return self._start_rows(rows)

    def _goes_on(self, batch: Batch, rows: _GraphRows) -> bool:
        """Return whether the device is prepared for this batch; new blocks are unknown to it."""
        if len(rows.slots) != len(batch.decode_slots) or rows.places(batch) is None:
            return False
        return bool((batch.decode_positions % self._cache.block_size).all())

    def _may_go_ahead(self, batch: Batch, step: _InFlightStep) -> bool:
        if self._steady <= STEADY_STEPS or not _foreseen(batch) or self._states is not None:
            return False
        if len(step.rows.slots) != len(batch.decode_slots):
            return False
        return bool((step.following.positions % self._cache.block_size).all())

    def _start_rows(self, rows: _GraphRows, *, ahead: bool = False) -> _InFlightStep:
        """Start the prepared step and the download of its tokens.

        `ahead`: the host has not read the tokens of the step before.
        """
        count = len(rows.slots)
        replay, logits = self._captured[self._bucket(count)]
        if rows.special:
            draw = StagedDraw(rows.drawn(), logits.shape[1], ahead=ahead)
            replay = functools.partial(self._draw, replay, draw, logits, ahead=ahead)
        self._stream.start(replay)
        read = self._read[self._next_read]
        self._next_read = (self._next_read + 1) % len(self._read)
        wait = self._stream.copy(self._tokens, read)
        step = _InFlightStep(rows, rows.later(), logits[:count], read, wait)
        self._next = step.following
        return step

    def _draw(self, replay: Act, draw: StagedDraw, logits: torch.Tensor, *, ahead: bool) -> None:
        """Run a captured step, and replace its argmax by drawn tokens."""
        token = self._header[_TOKEN]
        last = token.clone() if ahead else None
        replay()
        drawn = draw.draw_tokens(logits, last)
        rows = draw.rows_on(logits.device)
        self._tokens[rows] = drawn
        token[rows] = drawn.clamp(min=0)

    def _bucket(self, count: int) -> int:
        return min(rows for rows in self._captured if rows >= count)

    def _upload(self, batch: Batch) -> _GraphRows:
        """Upload the rows of a batch, padded."""
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
        filled[_STATE] = self._spare_state
        filled[_STATE, :count] = batch.decode_slots
        blocks = int(batch.decode_positions.max()) // self._cache.block_size + 1
        rows: Any = tables.numpy()
        rows[:count, :blocks] = batch.block_tables[batch.decode_slots, :blocks]
        rows[count:padded, 0] = self._cache.blocks
        pending.append(self._stream.copy(header, self._header))
        pending.append(self._stream.copy(tables[:padded], self._tables[:padded]))
        return _GraphRows(
            batch.decode_slots.copy(),
            batch.decode_positions.copy(),
            list(batch.decode_sequences),
            list(batch.special),
            batch.decode_tokens.copy(),
        )

    # --- capture ---

    def _capture(self, slots: int, width: int) -> bool:
        """Capture a step for each batch size, the largest first: the others reuse its memory."""
        started_s, before = time.perf_counter(), self._reserved()
        device = self._cache.keys[0].device
        whole = {"dtype": torch.int32, "device": device}
        try:
            with typed_out_of_memory("capturing decode steps"):
                self._header = torch.zeros((_HEADER, slots), **whole)
                self._header[_STATE] = self._spare_state
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
        apart = self._tried(min(captured))
        if not apart <= WITHIN[self._cache.keys[0].dtype]:
            self.drop_steps()
            self._off = True
            logger.warning(
                "decode steps run without CUDA graphs: replayed logits are wrong by %.2g", apart
            )
            return False
        spent_s, taken = time.perf_counter() - started_s, self._reserved() - before
        logger.info(
            "captured decode steps of up to %d rows in %.1f s, %d MiB", slots, spent_s, taken >> 20
        )
        return True

    def _tried(self, rows: int) -> float:
        """Return the largest difference between logits of replayed and eager steps, relative to the largest logit.

        A model whose code depends on the host's values in any way would repeat the captured step. All rows are those
        of one sequence in the spare block.
        """
        replay, logits = self._captured[rows]
        apart: list[torch.Tensor] = []
        for position in (0, self._cache.block_size - 1):
            self._prepare_trial(position)
            self._stream.wait_for_others()
            self._stream.start(replay)
            self._stream.let_others_wait()
            found = logits.float().clone()
            self._prepare_trial(position)
            wanted = self._compute(rows).float()
            largest = wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)
            apart.append((found - wanted).abs().max() / largest)
        return float(torch.stack(apart).max())  # NaN if one is

    def _prepare_trial(self, position: int) -> None:
        self._header.zero_()
        self._header[_TOKEN], self._header[_AT] = _TRIED_TOKEN, position
        self._header[_STATE] = self._spare_state
        self._tables.fill_(self._cache.blocks)
        if self._states is not None:
            self._states.clear_spare()

    def _compute(self, rows: int) -> torch.Tensor:
        """Run one step over the fixed memory, and prepare the next; this is captured."""
        size = self._cache.block_size
        token, at, delta, grows, state = self._header[:, :rows]
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
            states=None if self._states is None else StatesOfStep(state.long(), []),
            on_device=(tables, contexts),
        )
        moved = index + delta
        positions = torch.stack((index, moved, moved, moved))[:, None]
        logits = self._run(token.long(), positions, step)
        chosen = greedy_tokens(logits)
        self._tokens[:rows].copy_(chosen)
        token.copy_(chosen.clamp(min=0))
        at.add_(grows)
        return logits


def _foreseen(batch: Batch) -> bool:
    """Return whether all draws can be staged before the last tokens are known."""
    return all(is_foreseeable(sequence) for _, sequence in batch.special)


_NO_TABLES: npt.NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
_NO_CONTEXTS: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
