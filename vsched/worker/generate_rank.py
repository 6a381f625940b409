"""The generate stage of a rank: applies decisions to slots, forms batches, and detects finished requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RankDesync
from vsched.kernel.decisions import (
    ChunkPlan,
    DraftGrant,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
    SwapCopies,
)
from vsched.kernel.events import Drafted, Finished
from vsched.types import FinishReason
from vsched.wire import GenerateResult, LogEntry, PromptPiece, SlotLogprob
from vsched.worker.contract import (
    Batch,
    Chunk,
    GenerateWorker,
    Grammars,
    ItemRows,
    Sampled,
    SequenceState,
)
from vsched.worker.drafts import DraftModel, SlotDraft, draft, verifiable
from vsched.worker.memory import KV_REMEDY, memory_errors
from vsched.worker.slots import STOP_TOKENS_MAX, SlotTable
from vsched.worker.stage_rank import StageRank

Int32s = npt.NDArray[np.int32]


class GenerateRank(StageRank):
    """Follows the decisions of a generate group, and passes complete batches to a worker."""

    _memory_key = "generate.memory_limit"

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
        swap_blocks: int = 0,
        draft_model: DraftModel | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Start with empty slots; with `keeps_state`, the model has a recurrent state besides KV blocks.

        `grammars` compiles the grammars of requests, if the engine accepts any. `swap_blocks` is the number of the
        worker's swap slots; copies are timed with `now_ns`. `draft_model` drafts for grants that use it.
        """
        super().__init__(worker)
        self.worker: GenerateWorker = worker
        self._swap_blocks = swap_blocks
        self._now_ns = now_ns
        self._grammars = grammars
        self._keeps_state = keeps_state
        self._restored: list[tuple[int, int]] = []
        self._draft_model = draft_model
        self._embeddings = embeddings
        self._block_size = block_size
        self._table = SlotTable(slots, context_tokens=context_tokens, block_size=block_size)
        self._sequences: dict[int, SequenceState] = {}
        self._in_slot: dict[int, SequenceState] = {}
        self._special: dict[int, SequenceState] = {}
        self._grants: dict[int, DraftGrant] = {}
        self._drafts: dict[int, SlotDraft] = {}
        """Draft tokens of this step, by slot."""

    @property
    def sequences(self) -> list[int]:
        """The numbers of all known requests, in a slot or not."""
        return list(self._sequences)

    def carry_out(self, entry: LogEntry) -> GenerateResult:
        """Execute a decision of the generate group."""
        if not isinstance(entry, GenerateDecision):
            raise RankDesync("a generate rank heard a decision of an encode group")
        with memory_errors("running a step", remedy=KV_REMEDY):
            return self.apply(entry)

    def apply(self, decision: GenerateDecision) -> GenerateResult:
        """Execute a decision, and return the result of the step.

        Raises:
            RankDesync: When the decision does not match the state of this rank.
            DeviceOutOfMemory: From the worker.
        """
        swap_ns = 0 if decision.swaps is None else self._swap(decision.swaps)
        for leave in decision.left:
            self._leave_slot(leave)
        for number in decision.forgotten:
            self._sequences.pop(number, None)
        for join in decision.joined:
            self._join_request(join)
        for grant in decision.granted:
            if grant.slot not in self._in_slot:
                raise RankDesync(f"a grant for slot {grant.slot}, which is empty")
            self._grants[grant.slot] = grant
            if not grant.tokens:
                del self._grants[grant.slot]
        self._grow(decision.grown)
        batch = self._batch(decision.chunks)
        self._restored = []
        rows = self._rows(batch)
        sampled = self.worker.step(batch) if len(rows) or batch.chunks else _NOTHING
        result = self._add_sampled(decision.step, batch, rows, sampled)
        if decision.swaps is not None:
            blocks = decision.swaps.blocks
            result = msgspec.structs.replace(result, swap_ns=swap_ns, swap_blocks=blocks)
        return result

    def look_ahead(self) -> None:
        """Compute the next token masks of requests with a grammar, in the free time until the next decision."""
        for slot, sequence in self._special.items():
            if self._table.decoding[slot]:
                _mask(sequence)

    # --- changes of slots ---

    def _swap(self, swaps: SwapCopies) -> int:
        """Swap blocks; return the time in ns."""
        out = np.asarray(swaps.out, np.int32).reshape(-1, 2)
        back = np.asarray(swaps.back, np.int32).reshape(-1, 2)
        most = max(out[:, 1].max(initial=-1), back[:, 0].max(initial=-1))
        if most >= self._swap_blocks:
            raise RankDesync(
                f"a block is swapped to or from swap slot {most}, and this rank has {self._swap_blocks}"
            )
        start_ns = self._now_ns()
        self.worker.swap(out, back)
        self._renew(back[:, 1])
        return self._now_ns() - start_ns

    def _leave_slot(self, leave: Leave) -> None:
        sequence = self._in_slot.pop(leave.slot, None)
        if sequence is None or sequence.number != leave.number:
            raise RankDesync(f"request {leave.number} leaves slot {leave.slot}, which it has not")
        if leave.keep:
            # The slot's row will be overwritten, so the sequence keeps a copy of its tokens.
            sequence.length = int(self._table.length[leave.slot])
            sequence.tokens = self._table.tokens[leave.slot, : sequence.length].copy()
        else:
            del self._sequences[leave.number]
        self._special.pop(leave.slot, None)
        self._grants.pop(leave.slot, None)
        if self._draft_model is not None:
            self._draft_model.leave(leave.slot)
        self._table.reset(leave.slot)

    def _join_request(self, join: Join) -> None:
        if join.slot in self._in_slot:
            raise RankDesync(f"request {join.number} joins slot {join.slot}, which is taken")
        sequence = self._sequences.get(join.number)
        if join.data is not None:
            sequence = _sequence(join.number, join.data)
            self.worker.prepare(sequence)
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
        self._renew(join.blocks[join.computed // self._block_size :])
        self._in_slot[slot] = sequence
        if sequence.is_special:
            self._special[slot] = sequence

    def _constrain(self, sequence: SequenceState) -> None:
        """Start the request's grammar, and follow tokens generated before a loss."""
        if self._grammars is None:
            raise RankDesync(f"request {sequence.number} has a grammar, and this rank takes none")
        sequence.matcher = self._grammars.matcher(sequence.sampling.grammar)
        if len(sequence.outputs):
            sequence.matcher.follow(sequence.outputs.tolist())
        _mask(sequence)

    def _grow(self, grown: list[int]) -> None:
        if not grown:
            return
        pairs = np.asarray(grown, np.int32).reshape(-1, 2)
        # A slot with draft tokens may grow by several blocks; otherwise, all grow at once.
        at_once = len(pairs) if len(set(grown[::2])) == len(pairs) else 1
        for place in range(0, len(pairs), at_once):
            slots, blocks = pairs[place : place + at_once].T
            self._table.block_table[slots, self._table.block_count[slots]] = blocks
            self._table.block_count[slots] += 1
        self._renew(pairs[:, 1])

    def _renew(self, blocks: Sequence[int] | Int32s) -> None:
        """Tell the draft model that these blocks get other tokens."""
        if self._draft_model is not None and len(blocks):
            self._draft_model.renew(blocks)

    # --- the step ---

    def _batch(self, plans: Sequence[ChunkPlan]) -> Batch:
        table = self._table
        slots = np.flatnonzero(table.decoding).astype(np.int32)
        tokens, positions = table.last_token[slots], table.length[slots] - 1
        self._drafts = self._draft() if self._grants else {}
        if self._drafts:
            slots, tokens, positions = self._with_drafts(slots, tokens, positions)
        return Batch(
            decode_slots=slots,
            decode_tokens=tokens,
            decode_positions=positions,
            decode_sequences=[self._in_slot[slot] for slot in slots.tolist()],
            block_tables=table.block_table,
            embeddings=self._embeddings,
            chunks=[self._chunk(plan) for plan in plans],
            restored=self._restored,
        )

    def _draft(self) -> dict[int, SlotDraft]:
        """Return draft tokens for slots with a grant, within their blocks and their maximum length."""
        table = self._table
        drafts: dict[int, SlotDraft] = {}
        requested: dict[int, int] = {}
        for slot, grant in self._grants.items():
            if not table.decoding[slot]:
                continue
            length = int(table.length[slot])
            reach = int(table.block_count[slot]) * self._block_size
            room = min(reach, int(table.length_max[slot]) - 1) - length
            found = draft(self._in_slot[slot], length, grant, room)
            if found is not None:
                drafts[slot] = found
            elif grant.model and room > 0:
                requested[slot] = min(grant.tokens, room)
        if requested and self._draft_model is not None:
            proposed = self._draft_model.propose(requested, self._in_slot, table)
            for slot, wanted in proposed.items():
                found = verifiable(self._in_slot[slot], wanted, requested[slot])
                if found is not None:
                    drafts[slot] = found
        for slot, one in drafts.items():
            length = int(table.length[slot])
            table.tokens[slot, length : length + len(one.tokens)] = one.tokens
        return drafts

    def _with_drafts(
        self, slots: Int32s, tokens: Int32s, positions: Int32s
    ) -> tuple[Int32s, Int32s, Int32s]:
        """Return the decode rows with draft tokens as further rows of their slots, after the first."""
        drafts = [self._drafts.get(slot) for slot in slots.tolist()]
        counts = [1 if one is None else 1 + len(one.tokens) for one in drafts]
        rows = np.repeat(np.arange(len(slots)), counts)
        behind = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = tokens[rows]
        tokens[behind > 0] = [token for one in drafts if one is not None for token in one.tokens]
        return slots[rows], tokens, positions[rows] + behind.astype(np.int32)

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
        writes = [(write.end, write.snapshot_slot) for write in plan.writes]
        samples = plan.stop == length
        reported = 0
        if sequence.sampling.prompt_logprobs is not None:
            reported = max(0, min(plan.stop, sequence.prompt_length - 1) - plan.start)
        return Chunk(plan.slot, sequence, plan.start, plan.stop, samples, items, writes, reported)

    def _rows(self, batch: Batch) -> list[int]:
        """Return the slot of each row that samples a token, and mark the rows that need more than argmax."""
        rows: list[int] = batch.decode_slots.tolist()
        rows += [chunk.slot for chunk in batch.chunks if chunk.samples]
        if self._special:
            starts: dict[int, int] = {}
            if self._drafts:
                starts = {slot: row for row, slot in reversed(list(enumerate(rows)))}
            for row, slot in enumerate(rows):
                sequence = self._special.get(slot)
                if sequence is not None:
                    behind = row - starts.get(slot, row)
                    batch.special.append((row, self._as_drafted(slot, sequence, behind)))
        return rows

    def _as_drafted(self, slot: int, sequence: SequenceState, behind: int) -> SequenceState:
        """Return the sequence with the mask after `behind` draft tokens."""
        if not behind:
            sequence.length = int(self._table.length[slot])
            _mask(sequence)
            return sequence
        masks = self._drafts[slot].masks
        return dataclasses.replace(sequence, token_mask=masks[behind - 1]) if masks else sequence

    def _add_sampled(
        self, step: int, batch: Batch, rows: list[int], sampled: Sampled
    ) -> GenerateResult:
        drafted: list[Drafted] = []
        logprobs = sampled.logprobs
        slots, tokens = np.asarray(rows, np.int64), sampled.tokens
        if self._drafts:
            slots, tokens, ends, drafted, kept = self._add_drafts(slots, batch, sampled)
            logprobs = [one for one in logprobs if one.row in kept]
        else:
            ends = self._add_tokens(slots, tokens, batch.special)
        by_slot = np.full(len(self._table.number), -1, np.int32)
        by_slot[slots] = tokens
        numbers = self._table.number.tobytes()
        finished = []
        for row, reason in sorted(ends.items()):
            slot = rows[row]
            self._table.decoding[slot] = False
            finished.append(Finished(slot, int(self._table.number[slot]), reason))
        return GenerateResult(
            step=step,
            tokens=by_slot.tobytes(),
            numbers=numbers,
            finished=finished,
            logprobs=[SlotLogprob(rows[one.row], one.logprob, one.top) for one in logprobs],
            busy_ns=0,
            prompts=[
                PromptPiece(
                    number=batch.chunks[one.chunk].sequence.number,
                    start=batch.chunks[one.chunk].start + 1,
                    logprobs=one.logprobs.tobytes(),
                    ranks=one.ranks.tobytes(),
                    top_ids=one.top_ids.tobytes(),
                    top_logprobs=one.top_logprobs.tobytes(),
                )
                for one in sampled.prompts
            ],
            drafted=drafted,
        )

    def _add_drafts(
        self, slots: npt.NDArray[np.int64], batch: Batch, sampled: Sampled
    ) -> tuple[npt.NDArray[np.int64], Int32s, dict[int, FinishReason], list[Drafted], set[int]]:
        """Add the tokens of all slots, including accepted draft tokens.

        Returns each slot once, the first token of each, finish reasons by row, results of draft tokens, and the rows
        that count.
        """
        drafted = []
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        slots, tokens = slots[first], sampled.tokens[first]
        places = {row: index for index, row in enumerate(first.tolist())}
        special = [(places[row], one) for row, one in batch.special if row in places]
        ends = {
            int(first[index]): reason
            for index, reason in self._add_tokens(slots, tokens, special).items()
        }
        kept = set(places)
        for row, slot in zip(first.tolist(), slots.tolist(), strict=True):
            if slot in self._drafts:
                found = self._verify(row, slot, sampled.tokens, ends)
                kept.update(range(row + 1, row + 1 + len(found.tokens)))
                drafted.append(found)
        return slots, tokens, ends, drafted, kept

    def _add_tokens(
        self,
        slots: npt.NDArray[np.int64],
        tokens: Int32s,
        special: Sequence[tuple[int, SequenceState]],
    ) -> dict[int, FinishReason]:
        """Add a token to each of these slots; return finish reasons by index. `special` is a subset, by index."""
        table = self._table
        table.tokens[slots, np.minimum(table.length[slots], table.tokens.shape[1] - 1)] = tokens
        table.length[slots] += 1
        table.last_token[slots] = tokens
        table.decoding[slots] = True
        stopped = (table.stop_tokens[slots] == tokens[:, None]).any(axis=1)
        stopped &= table.length[slots] >= table.length_min[slots]
        over = stopped | (table.length[slots] >= table.length_max[slots])
        ends = {
            index: FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            for index in np.flatnonzero(over).tolist()
        }
        ends |= dict.fromkeys(np.flatnonzero(tokens < 0).tolist(), FinishReason.ERROR)
        _follow(special, tokens, ends)
        return ends

    def _verify(
        self, row: int, slot: int, tokens: Int32s, ends: dict[int, FinishReason]
    ) -> Drafted:
        """Add the tokens of the rows after the first, as far as draft tokens equal the tokens sampled before them."""
        drafts = self._drafts[slot].tokens
        at, sequence = np.array([slot]), self._special.get(slot)
        special = [] if sequence is None else [(0, sequence)]
        taken: list[int] = []
        for one in drafts:
            if row in ends or tokens[row] != one:
                break
            row += 1
            found = self._add_tokens(at, tokens[row : row + 1], special)
            if found:
                ends[row] = found[0]
            if tokens[row] >= 0:
                taken.append(int(tokens[row]))
        return Drafted(slot, len(drafts), taken)


_COMPLETE = (FinishReason.STOP, FinishReason.ERROR)


def _follow(
    special: Sequence[tuple[int, SequenceState]], tokens: Int32s, ends: dict[int, FinishReason]
) -> None:
    """Pass the tokens of rows to their grammars; add finish reasons to `ends`."""
    for index, sequence in special:
        # Its mask is then for the next token.
        if sequence.matcher is None or ends.get(index) in _COMPLETE:
            continue
        reason = sequence.matcher.follow([int(tokens[index])])
        if reason is FinishReason.STOP:
            ends[index] = reason  # complete, even if it is also at its length limit
        elif reason is not None:
            ends.setdefault(index, reason)


def _mask(sequence: SequenceState) -> None:
    """Set the mask of a sequence with a grammar."""
    if sequence.matcher is not None:
        sequence.token_mask = sequence.matcher.mask


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
