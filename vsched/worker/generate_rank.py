"""The generate side of a rank: apply decisions to slots, form batches, find out which requests finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vsched.errors import RankDesync
from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join, Leave, RequestData
from vsched.kernel.events import Finished
from vsched.types import FinishReason
from vsched.wire import GenerateResult, PromptPiece, SlotLogprob
from vsched.worker.capabilities import Grammars
from vsched.worker.contract import (
    Batch,
    Chunk,
    GenerateWorker,
    ItemRows,
    PromptLogprobs,
    Sampled,
    SequenceState,
)
from vsched.worker.slots import STOP_TOKENS_MAX, SlotTable


class GenerateRank:
    """Follows the decisions of a generate group and hands complete batches to a worker.

    Attributes:
        adapters: The numbers of the adapters that the worker has.
    """

    def __init__(
        self,
        worker: GenerateWorker,
        embeddings: npt.NDArray[np.uint8],
        *,
        slots: int,
        context_tokens: int,
        block_size: int,
        keeps_state: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        """Start with empty slots; with `keeps_state`, KV blocks are not all that a worker needs to go on from.

        `grammars` compile those of requests, where the engine accepts any.
        """
        self._grammars = grammars
        self._keeps_state = keeps_state
        self._restored: list[tuple[int, int]] = []
        self._worker = worker
        self.adapters: set[int] = set()
        self._embeddings = embeddings
        self._block_size = block_size
        self._table = SlotTable(slots, context_tokens=context_tokens, block_size=block_size)
        self._sequences: dict[int, SequenceState] = {}
        self._in_slot: dict[int, SequenceState] = {}
        self._special: dict[int, SequenceState] = {}

    @property
    def sequences(self) -> list[int]:
        """The requests that it keeps, in a slot or not."""
        return list(self._sequences)

    def apply(self, decision: GenerateDecision) -> GenerateResult:
        """Carry out one decision and return what the step yielded.

        Raises:
            RankDesync: When the decision does not fit what this rank holds.
            DeviceOutOfMemory: From the worker.
        """
        for leave in decision.left:
            self._leave(leave)
        for number in decision.forgotten:
            self._sequences.pop(number, None)
        for join in decision.joined:
            self._join(join)
        self._grow(decision.grown)
        batch = self._batch(decision.chunks)
        self._restored = []
        rows = self._rows(batch)
        sampled = self._worker.step(batch) if len(rows) or batch.chunks else _NOTHING
        return self._advance(decision.step, batch, rows, sampled)

    # --- what changes ---

    def _leave(self, leave: Leave) -> None:
        sequence = self._in_slot.pop(leave.slot, None)
        if sequence is None or sequence.number != leave.number:
            raise RankDesync(f"request {leave.number} leaves slot {leave.slot}, which it has not")
        if leave.keep:
            # The slot's row will be overwritten: the sequence takes its tokens along.
            sequence.length = int(self._table.length[leave.slot])
            sequence.tokens = self._table.tokens[leave.slot, : sequence.length].copy()
        else:
            del self._sequences[leave.number]
        self._special.pop(leave.slot, None)
        self._table.reset(leave.slot)

    def _join(self, join: Join) -> None:
        if join.slot in self._in_slot:
            raise RankDesync(f"request {join.number} joins slot {join.slot}, which is taken")
        sequence = self._sequences.get(join.number)
        if join.data is not None:
            sequence = _sequence(join.number, join.data)
            self._worker.prepare(sequence)
            if sequence.sampling.grammar:
                self._constrain(sequence)
            self._sequences[join.number] = sequence
        if sequence is not None and sequence.adapter and sequence.adapter not in self.adapters:
            raise RankDesync(
                f"request {join.number} joins with adapter {sequence.adapter}, which is not here"
            )
        if sequence is None or sequence.length != join.length:
            known = "unknown here" if sequence is None else f"{sequence.length} tokens long here"
            raise RankDesync(
                f"request {join.number} joins with {join.length} tokens; it is {known}"
            )
        if self._keeps_state and (join.restored is None) != (join.computed == 0):
            raise RankDesync(
                f"request {join.number} joins with the KV of {join.computed} tokens, and state {join.restored}"
            )
        if join.restored is not None:
            self._restored.append((join.slot, join.restored))
        table, slot, sampling = self._table, join.slot, sequence.sampling
        table.number[slot] = join.number
        table.length[slot] = join.length
        table.tokens[slot, : join.length] = sequence.tokens[: join.length]
        sequence.tokens = table.tokens[slot]
        table.length_min[slot] = sequence.prompt_length + sampling.min_tokens
        table.length_max[slot] = sequence.prompt_length + sampling.max_tokens
        stops = sorted(sequence.stop_token_ids)[:STOP_TOKENS_MAX]
        table.stop_tokens[slot, : len(stops)] = stops
        table.block_table[slot, : len(join.blocks)] = join.blocks
        table.block_count[slot] = len(join.blocks)
        self._in_slot[slot] = sequence
        if sequence.is_special:
            self._special[slot] = sequence

    def _constrain(self, sequence: SequenceState) -> None:
        """Have a grammar say what may come next; what was generated before a loss is followed first."""
        if self._grammars is None:
            raise RankDesync(f"request {sequence.number} has a grammar, and this rank takes none")
        sequence.matcher = self._grammars.matcher(sequence.sampling.grammar)
        if len(sequence.outputs):
            sequence.matcher.follow(sequence.outputs.tolist())
        sequence.token_mask = sequence.matcher.mask

    def _grow(self, grown: list[int]) -> None:
        if not grown:
            return
        pairs = np.asarray(grown, np.int32).reshape(-1, 2)
        slots, blocks = pairs[:, 0], pairs[:, 1]
        self._table.block_table[slots, self._table.block_count[slots]] = blocks
        self._table.block_count[slots] += 1

    # --- the step ---

    def _batch(self, plans: Sequence[ChunkPlan]) -> Batch:
        table = self._table
        slots = np.flatnonzero(table.decoding).astype(np.int32)
        lengths = table.length[slots]
        return Batch(
            decode_slots=slots,
            decode_tokens=table.last_token[slots],
            decode_positions=lengths - 1,
            decode_sequences=[self._in_slot[slot] for slot in slots.tolist()],
            block_tables=table.block_table,
            embeddings=self._embeddings,
            chunks=[self._chunk(plan) for plan in plans],
            restored=self._restored,
        )

    def _chunk(self, plan: ChunkPlan) -> Chunk:
        sequence = self._in_slot.get(plan.slot)
        if sequence is None:
            raise RankDesync(f"a chunk for slot {plan.slot}, which is empty")
        length = int(self._table.length[plan.slot])
        pages = {item.offset: item.pages for item in plan.items}
        items = [
            ItemRows(index, position - plan.start, row, row + rows, pages[place.offset])
            for index, place in enumerate(sequence.items if pages else ())
            if place.offset in pages
            for position, row, rows in place.rows(plan.start, plan.stop)
        ]
        writes = [(write.end, write.place) for write in plan.writes]
        samples = plan.stop == length
        told = 0
        if sequence.sampling.prompt_logprobs is not None:
            told = max(0, min(plan.stop, sequence.prompt_length - 1) - plan.start)
        return Chunk(plan.slot, sequence, plan.start, plan.stop, samples, items, writes, told)

    def _rows(self, batch: Batch) -> list[int]:
        """Return the slot of each row that yields a token, and mark the rows that need more than argmax."""
        rows: list[int] = batch.decode_slots.tolist()
        rows += [chunk.slot for chunk in batch.chunks if chunk.samples]
        if self._special:
            for row, slot in enumerate(rows):
                sequence = self._special.get(slot)
                if sequence is not None:
                    sequence.length = int(self._table.length[slot])
                    batch.special.append((row, sequence))
        return rows

    def _advance(
        self, step: int, batch: Batch, rows: list[int], sampled: Sampled
    ) -> GenerateResult:
        table = self._table
        slots = np.asarray(rows, np.int64)
        tokens = sampled.tokens
        table.tokens[slots, np.minimum(table.length[slots], table.tokens.shape[1] - 1)] = tokens
        table.length[slots] += 1
        table.last_token[slots] = tokens
        table.decoding[slots] = True
        stopped = (table.stop_tokens[slots] == tokens[:, None]).any(axis=1)
        stopped &= table.length[slots] >= table.length_min[slots]
        full = table.length[slots] >= table.length_max[slots]
        ends = {
            row: FinishReason.STOP if stopped[row] else FinishReason.LENGTH
            for row in np.flatnonzero(stopped | full).tolist()
        }
        self._follow(batch, tokens, ends)
        finished = []
        for row, reason in sorted(ends.items()):
            slot = rows[row]
            table.decoding[slot] = False
            finished.append(Finished(slot, int(table.number[slot]), reason))
        by_slot = np.full(len(table.number), -1, np.int32)
        by_slot[slots] = tokens
        return GenerateResult(
            step=step,
            tokens=by_slot.tobytes(),
            numbers=table.number.tobytes(),
            finished=finished,
            logprobs=[SlotLogprob(rows[one.row], one.logprob, one.top) for one in sampled.logprobs],
            busy_ns=0,
            prompts=[_piece(batch.chunks[one.chunk], one) for one in sampled.prompts],
        )

    def _follow(
        self, batch: Batch, tokens: npt.NDArray[np.int32], ends: dict[int, FinishReason]
    ) -> None:
        """Take the tokens of rows with a grammar, so that their masks are those of the next step; note who ends."""
        for row, sequence in batch.special:
            if sequence.matcher is None or ends.get(row) is FinishReason.STOP:
                continue
            reason = sequence.matcher.follow([int(tokens[row])])
            if reason is FinishReason.STOP:
                ends[row] = reason  # whole, be it at the limit
            elif reason is not None:
                ends.setdefault(row, reason)


def _piece(chunk: Chunk, told: PromptLogprobs) -> PromptPiece:
    return PromptPiece(
        number=chunk.sequence.number,
        start=chunk.start + 1,
        logprobs=told.logprobs.tobytes(),
        ranks=told.ranks.tobytes(),
        top_ids=told.top_ids.tobytes(),
        top_logprobs=told.top_logprobs.tobytes(),
    )


_NOTHING = Sampled(np.empty(0, np.int32))


def _sequence(number: int, data: RequestData) -> SequenceState:
    tokens = np.frombuffer(data.tokens, np.int32).copy()
    return SequenceState(
        number=number,
        tokens=tokens,
        length=len(tokens),
        prompt_length=data.prompt_length,
        items=data.items,
        sampling=data.sampling,
        stop_token_ids=frozenset(data.stop_token_ids),
        adapter=data.adapter,
    )
