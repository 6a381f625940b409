"""A draft model in a rank: proposals, computed positions, and outputs that stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from tests.unit.worker.drafting.drafted_runs import run_drafted
from tests.unit.worker.drafting.test_drafts import (
    BLOCK_SIZE,
    CHOICES,
    CONTEXT,
    FIRST,
    Periodic,
)
from tests.unit.worker.test_generate_rank import join, whole
from vsched.kernel.decisions import ChunkPlan, DraftGrant, GenerateDecision, Join, Leave, SwapCopies
from vsched.sim.ranks.symbolic_model import SymbolicGrammars
from vsched.sim.ranks.symbolic_workers import stand_in_info
from vsched.types import ItemPlace, SamplingParams
from vsched.worker.contract import Batch, Sampled, SequenceState
from vsched.worker.drafting.model import DraftModel, DraftWorker
from vsched.worker.generate_rank import GenerateRank

BLOCKS = 3 * CONTEXT // BLOCK_SIZE
NOTHING = -1


class Small(Periodic):
    """Predicts as `Periodic` does, except for every n-th position; reads its own KV cache.

    Each position of a block holds the token that was computed there. A missing or wrong token fails.

    Attributes:
        computed: Number of computed positions.
        largest: Maximum positions of a step.
    """

    def __init__(self, *, wrong_every: int = 0) -> None:
        super().__init__()
        self._wrong_every = wrong_every
        self.kv = np.full((BLOCKS, BLOCK_SIZE), NOTHING)
        self.computed = self.largest = 0
        self.prepared: list[int] = []
        self.batches_run = 0

    def prepare(self, sequence: SequenceState) -> None:
        self.prepared.append(sequence.number)
        assert not sequence.items, "it takes no images"
        assert sequence.sampling.logprobs is None, "it was not called"
        assert not sequence.sampling.grammar

    def step(self, batch: Batch) -> Sampled:
        self.batches_run += 1
        before = self.computed
        for chunk in batch.chunks:
            for position in range(chunk.start, chunk.stop):
                self._write(batch, chunk.slot, chunk.sequence, position)
            self._read(batch, chunk.slot, chunk.sequence, chunk.stop)
        rows = list(
            zip(
                batch.decode_slots.tolist(),
                batch.decode_sequences,
                batch.decode_positions.tolist(),
                strict=True,
            )
        )
        assert batch.decode_slots.tolist() == sorted(batch.decode_slots.tolist())
        for slot, sequence, position in rows:
            self._write(batch, slot, sequence, position)
        for slot, sequence, position in rows:
            self._read(batch, slot, sequence, position + 1)
        self.largest = max(self.largest, self.computed - before)
        sampled = super().step(batch)
        ends = [position + 1 for _, _, position in rows]
        ends += [chunk.stop for chunk in batch.chunks if chunk.samples]
        for row, length in enumerate(ends):
            if self._wrong_every and length % self._wrong_every == 0:
                sampled.tokens[row] = FIRST + 1 + (sampled.tokens[row] - FIRST) % 3
        return sampled

    def _write(self, batch: Batch, slot: int, sequence: SequenceState, position: int) -> None:
        self.computed += 1
        block = batch.block_tables[slot, position // BLOCK_SIZE]
        self.kv[block, position % BLOCK_SIZE] = sequence.tokens[position]

    def _read(self, batch: Batch, slot: int, sequence: SequenceState, length: int) -> None:
        blocks = batch.block_tables[slot, : -(-length // BLOCK_SIZE)]
        found = self.kv[blocks].reshape(-1)[:length]
        assert found.tolist() == sequence.tokens[:length].tolist(), "KV that is not its own"


def rank_of(
    worker: Periodic, small: Small, *, chunk: int = 8, batch: int = 32, vocabulary: int = 100
) -> GenerateRank:
    model = DraftModel(
        DraftWorker(small, stand_in_info(context_tokens=CONTEXT)),
        vocabulary=vocabulary,
        blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        chunk_tokens=chunk,
        batch_tokens=batch,
    )
    return GenerateRank(
        worker,
        np.zeros((4, 4, 8), np.uint8),
        slots=8,
        context_tokens=CONTEXT,
        block_size=BLOCK_SIZE,
        grammars=SymbolicGrammars(),
        draft_model=model,
        swap_blocks=4,
    )


def own_blocks(slot: int) -> list[int]:
    count = CONTEXT // BLOCK_SIZE
    return list(range(slot * count, (slot + 1) * count))


def started(rank: GenerateRank, prompt: Sequence[int], **changes: object) -> list[int]:
    """Have a request join slot 0 and yield its first token."""
    requested = msgspec.structs.replace(join(1, 0, list(prompt)), blocks=own_blocks(0), **changes)
    rank.apply(GenerateDecision(1, joined=[requested], chunks=[whole(0, len(prompt))]))
    return own_blocks(0)


def by_model(tokens: int) -> list[DraftGrant]:
    return [DraftGrant(0, tokens, 0, True)]


def test_draft_model_proposes_and_all_prove_right_if_both_think_alike() -> None:
    small = Small()
    rank = rank_of(Periodic(), small)
    started(rank, [16, 17, 18])
    found = rank.apply(GenerateDecision(2, granted=by_model(3))).drafted[0]
    assert (found.drafts, len(found.tokens)) == (3, 3)
    # Four known tokens and two draft tokens; the last draft token is not computed.
    assert (small.computed, small.prepared) == (6, [1])
    found = rank.apply(GenerateDecision(3)).drafted[0]
    assert len(found.tokens) == 3
    # That draft token and the next output token, in rows, and again two draft tokens.
    assert (small.computed, small.batches_run) == (10, 6)


def test_draft_model_forgets_drafts_that_proved_wrong() -> None:
    small, right = Small(wrong_every=3), 0
    rank = rank_of(Periodic(), small)
    started(rank, [16, 17, 18])
    for step in range(2, 9):
        found = rank.apply(GenerateDecision(step, granted=by_model(4))).drafted[0]
        assert found.drafts == 4
        right += len(found.tokens)
    assert 7 <= right < 28


def test_draft_model_catches_up_in_chunks_and_drafts_when_it_has() -> None:
    small = Small()
    rank = rank_of(Periodic(), small, chunk=8)
    started(rank, [16 + at % 3 for at in range(20)])
    reported = [rank.apply(GenerateDecision(step, granted=by_model(2))) for step in range(2, 6)]
    # 21, 22, 23 tokens are known in these steps, and each computes 8 more of them.
    assert [len(one.drafted) for one in reported] == [0, 0, 1, 1]
    assert small.computed == 23 + 1 + 2 + 1


def test_draft_model_takes_no_more_positions_a_step_than_memory_is_proved_for() -> None:
    """One sequence catches up while draft tokens are proposed for another."""
    small = Small()
    rank = rank_of(Periodic(), small, chunk=8, batch=10)
    started(rank, [16, 17, 18])
    long = [16 + at % 3 for at in range(20)]
    late = msgspec.structs.replace(join(2, 1, long), blocks=own_blocks(1))
    rank.apply(GenerateDecision(2, granted=by_model(3), joined=[late], chunks=[whole(1, 20)]))
    requested = [DraftGrant(1, 3, 0, True)]
    reported = [rank.apply(GenerateDecision(3 + at, granted=requested)) for at in range(4)]
    assert [[each.slot for each in one.drafted] for one in reported] == [[0], [0], [0], [0, 1]]
    assert small.largest <= 10


def test_draft_model_computes_nothing_without_a_grant() -> None:
    small = Small()
    rank = rank_of(Periodic(), small)
    started(rank, [16, 17, 18])
    rank.apply(GenerateDecision(2, granted=[DraftGrant(0, 3, 1)]))
    rank.apply(GenerateDecision(3, granted=[DraftGrant(0, 0, 0, True)]))
    assert small.batches_run == 0


def test_draft_model_is_called_only_if_lookup_has_nothing() -> None:
    small = Small()
    rank = rank_of(Periodic(), small)
    started(rank, [16, 17] * 6)
    both = [DraftGrant(0, 3, 1, True)]
    assert rank.apply(GenerateDecision(2, granted=both)).drafted
    assert small.batches_run == 0


def test_draft_model_knows_what_blocks_of_the_prefix_cache_it_has_filled() -> None:
    small = Small()
    rank = rank_of(Periodic(), small, chunk=CONTEXT)
    prompt = [16, 17, 18, 16, 17, 18, 16, 17, 18]
    blocks = started(rank, prompt)
    rank.apply(GenerateDecision(2, granted=by_model(1)))
    assert small.computed == 10
    again = msgspec.structs.replace(join(2, 1, prompt), blocks=[*blocks[:2], 40, 41], computed=8)
    rank.apply(GenerateDecision(3, joined=[again], chunks=[ChunkPlan(1, 8, len(prompt), [])]))
    before = small.computed
    rank.apply(GenerateDecision(4, granted=[DraftGrant(0, 0, 0), DraftGrant(1, 1, 0, True)]))
    assert small.computed == before + 2, "the ninth token of the prompt and the first of the answer"
    # Blocks that were given to another request hold its tokens.
    leave = [Leave(1, 0, keep=False), Leave(2, 1, keep=False)]
    other = msgspec.structs.replace(join(3, 1, prompt), blocks=[*blocks[:1], 44, 45], computed=4)
    rank.apply(
        GenerateDecision(5, left=leave, joined=[other], chunks=[ChunkPlan(1, 4, len(prompt), [])])
    )
    before = small.computed
    rank.apply(GenerateDecision(6, granted=[DraftGrant(1, 1, 0, True)]))
    assert small.computed == before + 6


def test_draft_model_computes_again_what_was_swapped_back() -> None:
    small = Small()
    rank = rank_of(Swapping(), small, chunk=CONTEXT)
    blocks = started(rank, [16, 17, 18, 16, 17, 18])
    rank.apply(GenerateDecision(2, granted=by_model(1)))
    rank.apply(
        GenerateDecision(3, left=[Leave(1, 0, keep=True)], swaps=SwapCopies([0, 0, 1, 1], []))
    )
    small.kv[:] = NOTHING  # other requests used it meanwhile
    back = Join(1, 0, 8, 9, blocks[:3], None)
    swaps = SwapCopies([], [0, 0, 1, 1])
    chunk = ChunkPlan(0, 8, 9, [])
    rank.apply(GenerateDecision(4, swaps=swaps, joined=[back], chunks=[chunk]))
    before = small.computed
    rank.apply(GenerateDecision(5, granted=by_model(1)))
    assert small.computed == before + 10


class Swapping(Periodic):
    """A model whose requests can be swapped."""

    def build_swap(self, blocks: int) -> None:
        """No-op."""

    def swap(self, out: object, back: object) -> None:
        """No-op."""


def test_draft_model_drafts_within_its_context_and_the_other_vocabulary() -> None:
    small = Small()
    rank = rank_of(Periodic(), small, chunk=CONTEXT, vocabulary=FIRST + 1)
    started(rank, [16, 17, 18])
    drafted = [
        one
        for step in range(2, 12)
        for one in rank.apply(GenerateDecision(step, granted=by_model(4))).drafted
    ]
    assert drafted, "some tokens are known to both"
    assert all(one.drafts < 4 for one in drafted)
    short = Small()
    rank = rank_of(Periodic(), short, chunk=CONTEXT)
    assert rank._draft_model is not None
    rank._draft_model._info = stand_in_info(context_tokens=6)
    started(rank, [16, 17, 18])
    assert rank.apply(GenerateDecision(2, granted=by_model(3))).drafted == []
    assert rank.apply(GenerateDecision(3, granted=by_model(1))).drafted[0].drafts == 1


def test_draft_model_reads_tokens_beyond_its_vocabulary_and_drafts_no_image() -> None:
    small = Small()
    rank = rank_of(Periodic(), small, chunk=CONTEXT)
    data = join(1, 0, [16, 200, 200, 17]).data
    assert data is not None
    with_image = msgspec.structs.replace(data, items=[ItemPlace(1, 2)])
    started(rank, [16, 200, 200, 17], data=with_image)
    rank.apply(GenerateDecision(2, granted=by_model(2)))
    assert small.kv[0].tolist() == [16, 99, 99, 17]


def test_draft_model_gives_every_request_the_tokens_that_it_has_without() -> None:
    drafts = right = forced = 0
    for seed in range(100):
        rng = random.Random(seed)
        prompts = [[rng.randint(16, 18) for _ in range(rng.randint(2, 20))] for _ in range(3)]
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randint(0, 99),
                max_tokens=rng.randint(1, 40),
                min_tokens=0,
                logprobs=rng.choice([None, 0]),
                grammar=rng.choice(["", "", CHOICES]),
            )
            for _ in prompts
        ]
        small = Small(wrong_every=rng.choice([0, 2, 5]))
        ranks = [rank_of(Periodic(), one, chunk=rng.choice([3, 64])) for one in (Small(), small)]
        runs = [
            partial(run_drafted, rank, prompts, params, stops=(FIRST + 4,), blocks=own_blocks)
            for rank in ranks
        ]
        plain, none = runs[0](None)
        found, drafted = runs[1](rng, model=True)
        assert found == plain
        assert not none
        drafts += sum(one.drafts for one in drafted)
        right += sum(len(one.tokens) for one in drafted)
        forced += any(one.grammar for one in params)
    assert 0 < right < drafts, "some draft tokens are accepted and some are not"
    assert forced
