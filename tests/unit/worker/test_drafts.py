"""Speculative decoding in a rank: sources of draft tokens, acceptance, and outputs that stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.worker.test_generate_rank import GREEDY, Script, join, prefill, rank_of, tokens_of
from vsched.errors import RankDesync
from vsched.kernel.decisions import DraftGrant, GenerateDecision, Join, Leave, SwapCopies
from vsched.kernel.events import Drafted, Finished
from vsched.sim.ranks.symbolic_workers import stand_in_info
from vsched.types import FinishReason, ItemPlace, SamplingParams
from vsched.worker.contract import Batch, Sampled, SequenceState, TokenLogprobs
from vsched.worker.drafts import DraftModel, DraftWorker, allows, draft, lookup, only_token
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.spec import StepLimits

BLOCK_SIZE = 4
CONTEXT = 64
FIRST = 16
"""The first of the tokens that the models here yield; the grammars of simulations know those from here on."""


def own_blocks(slot: int) -> list[int]:
    count = CONTEXT // BLOCK_SIZE
    return list(range(slot * count, (slot + 1) * count))


@dataclass
class Received:
    """Output of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None


def run_drafted(
    rank: GenerateRank,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    rng: random.Random | None,
    *,
    stops: tuple[int, ...] = (),
    model: bool = False,
    blocks: Callable[[int], list[int]] = own_blocks,
) -> tuple[list[Received], list[Drafted]]:
    """Run requests concurrently to their ends, with random grants of draft tokens if there is a generator.

    `blocks` returns all blocks that a slot can need. With `model`, draft tokens come from a draft model, too.
    """
    received = [Received() for _ in prompts]
    decision = prefill(
        *(
            join(slot + 1, slot, prompt, sampling=sampling, stops=stops, blocks=blocks(slot))
            for slot, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        )
    )
    drafted: list[Drafted] = []
    while not all(one.reason for one in received):
        result = rank.apply(decision)
        drafted += result.drafted
        more = {one.slot: one.tokens for one in result.drafted}
        for slot, token in enumerate(tokens_of(result)[: len(received)]):
            if token >= 0:
                received[slot].tokens += [token, *more.get(slot, [])]
        for reported in result.logprobs:
            received[reported.slot].logprobs.append(reported.logprob)
        for end in result.finished:
            assert received[end.slot].reason is None, "two ends"
            received[end.slot].reason = end.reason
        granted = []
        if rng is not None:
            granted = [
                DraftGrant(slot, rng.randint(0, 6), rng.randint(0, 2), model)
                for slot in range(len(prompts))
                if rng.random() < 0.4
            ]
        decision = GenerateDecision(decision.step + 1, granted=granted)
    return received, drafted


def int32(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


def test_masks_report_the_only_token() -> None:
    masks = [0, 0, 0], [0, 0, 1 << 31], [0, 0, 1 << 31 | 1], [0, 1, 1]
    assert [only_token(np.array(one, np.uint32)) for one in masks] == [None, 95, None, None]


@pytest.mark.parametrize(
    ("tokens", "ngram", "found"),
    [
        ((1, 2, 3, 9, 8, 7, 1, 2, 3), 3, [9, 8, 7]),
        ((1, 2, 3, 9, 8, 7, 1, 2, 3), 2, [9, 8, 7]),
        ((1, 2, 3, 9, 8, 7, 5, 2, 3), 3, []),  # two agree, three must
        ((4, 3, 9, 5, 3, 8, 4, 3), 1, [9, 5, 3]),  # the longest match, not the last place
        ((3, 9, 5, 3, 8, 4, 3), 1, [8, 4, 3]),  # of equal ones the last place
        ((5, 6, 5, 6, 5, 6), 2, [5, 6, 5]),  # a cycle is continued
        ((7, 7, 7), 1, [7, 7, 7]),
        ((1, 2), 2, []),
        ((1,), 1, []),
    ],
)
def test_lookup_finds_the_tokens_after_an_earlier_match(
    tokens: tuple[int, ...], ngram: int, found: list[int]
) -> None:
    assert lookup(int32(*tokens), 3, ngram) == found


def test_draft_stops_before_an_image_placeholder() -> None:
    tokens = int32(1, 2, 3, 99, 99, 8, 1, 2, 3)
    sequence = SequenceState(1, tokens, 9, 9, [ItemPlace(3, 2)], GREEDY, frozenset())
    assert draft(sequence, 9, DraftGrant(0, 4, 2), 10) is None
    tokens[3] = 7
    sequence.items = [ItemPlace(4, 1)]
    found = draft(sequence, 9, DraftGrant(0, 4, 2), 10)
    assert found is not None
    assert found.tokens == [7]


def test_draft_keeps_within_its_room() -> None:
    sequence = SequenceState(1, int32(7, 7, 7), 3, 3, [], GREEDY, frozenset())
    found = [draft(sequence, 3, DraftGrant(0, 4, 1), room) for room in (9, 2, 0, -1)]
    assert [len(one.tokens) if one is not None else 0 for one in found] == [4, 2, 0, 0]


# --- rows ---


def started(worker: Script, prompt: list[int], sampling: SamplingParams = GREEDY) -> GenerateRank:
    """Return a rank with a request in slot 1, after its first token and with all blocks it needs."""
    rank = rank_of(worker)
    rank.apply(prefill(join(1, 1, prompt, sampling=sampling, blocks=own_blocks(0))))
    return rank


def test_generate_rank_verifies_drafts_in_rows_behind_the_last_token() -> None:
    worker = Script([6], [5, 6, 9, 5], [1])
    rank = started(worker, [5, 6, 5])
    result = rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 3, 2)]))
    batch = worker.batches[1]
    assert (batch["slots"], batch["tokens"]) == ([1, 1, 1, 1], [6, 5, 6, 5])
    assert (batch["positions"], batch["numbers"]) == ([3, 4, 5, 6], [1, 1, 1, 1])
    # The first two rows confirm their draft tokens, the third does not: its own token is right, the last row is void.
    assert tokens_of(result)[1] == 5
    assert result.drafted == [Drafted(1, 3, [6, 9])]
    rank.apply(GenerateDecision(3))
    assert (worker.batches[2]["tokens"], worker.batches[2]["positions"]) == ([9], [6])


def test_generate_rank_ends_at_a_draft_without_a_token_to_draw_after_it() -> None:
    worker = Script([6], [5, 6, -1, -1], [1])
    rank = started(worker, [5, 6, 5])
    result = rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 3, 2)]))
    assert tokens_of(result)[1] == 5
    assert result.drafted == [Drafted(1, 3, [6])]
    assert result.finished == [Finished(1, 1, FinishReason.ERROR)]


def test_generate_rank_keeps_a_grant_until_another_or_a_leave() -> None:
    worker = Script([6], [5, 1], [6], [7, 1], [8])
    rank = started(worker, [5, 6, 5])
    rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 1, 1)]))
    rank.apply(GenerateDecision(3, granted=[DraftGrant(1, 0, 1)]))
    assert worker.batches[2]["slots"] == [1]
    rank.apply(GenerateDecision(4, granted=[DraftGrant(1, 1, 1)]))
    assert worker.batches[3]["slots"] == [1, 1]
    rank.apply(prefill(join(2, 1, [5, 5]), step=5, left=[Leave(1, 1, keep=False)]))
    assert rank._grants == {}
    with pytest.raises(RankDesync, match="slot 2, which is empty"):
        rank.apply(GenerateDecision(6, granted=[DraftGrant(2, 1, 1)]))


def test_generate_rank_drafts_no_further_than_blocks_and_limit() -> None:
    worker = Script([7], [7, 7, 7])
    rank = rank_of(worker)
    rank.apply(prefill(join(1, 0, [7, 7, 7, 7, 7])))  # two blocks: eight positions
    rank.apply(GenerateDecision(2, granted=[DraftGrant(0, 8, 1)]))
    assert worker.batches[1]["positions"] == [5, 6, 7]
    limited = Script([7], [7, 7, 7])
    rank = started(limited, [7, 7], msgspec.structs.replace(GREEDY, max_tokens=4))
    result = rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 8, 1)]))
    assert limited.batches[1]["positions"] == [2, 3, 4]
    assert result.drafted == [Drafted(1, 2, [7, 7])]
    assert result.finished == [Finished(1, 1, FinishReason.LENGTH)]


# --- the same tokens as without draft tokens ---


def decode_rows(batch: Batch) -> list[tuple[int, SequenceState, int]]:
    """Slot, sequence and position of each decode row."""
    slots, positions = batch.decode_slots.tolist(), batch.decode_positions.tolist()
    return list(zip(slots, batch.decode_sequences, positions, strict=True))


class Periodic(Script):
    """The next token follows from the last two, the seed and the position; with grammars and logprobs.

    It reads the whole history of each row, so a draft token in the wrong place would show.
    """

    def swap(self, out: object, back: object) -> None:
        """No-op."""

    def step(self, batch: Batch) -> Sampled:
        rows, tokens_of_rows = [], batch.decode_tokens.tolist()
        for (slot, one, position), token in zip(decode_rows(batch), tokens_of_rows, strict=True):
            assert one.tokens[position] == token, "a row differs from the sequence"
            assert batch.block_tables[slot, position // BLOCK_SIZE] >= 0
            rows.append((one, position + 1))
        rows += [(chunk.sequence, chunk.stop) for chunk in batch.chunks if chunk.samples]
        special = dict(batch.special)
        tokens, reported = [], []
        for row, (sequence, length) in enumerate(rows):
            a, b = sequence.tokens[length - 2 : length].tolist()
            seed = sequence.sampling.seed or 0
            lucky = (length * 7 + seed) % 11 < 8
            value = (a + b) % 3 if lucky else (length * 5 + seed) % 5
            mask = special[row].token_mask if row in special else None
            allowed = [one for one in range(FIRST, FIRST + 16) if mask is None or allows(mask, one)]
            tokens.append(allowed[value % len(allowed)])
            if sequence.sampling.logprobs is not None:
                reported.append(TokenLogprobs(row, -float(length), [(tokens[-1], -float(length))]))
        return Sampled(int32(*tokens), reported)


CHOICES = '{"choice": ["16 17 18 19 21 22 23", "16 17 18 22 23 24 25 26", "18 18 18 18", "17 16 16 16 23"]}'


# --- a draft model ---

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
        rows = decode_rows(batch)
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


def model_rank(
    *, wrong_every: int = 0, batch: int = 32, chunk: int = CONTEXT, vocabulary: int = 100
) -> tuple[GenerateRank, Small]:
    """Return a rank with a draft model, and its worker."""
    small = Small(wrong_every=wrong_every)
    limits = {"batch_tokens": batch, "chunk_tokens": chunk, "context_tokens": CONTEXT}
    model = DraftModel(
        DraftWorker(small, stand_in_info(context_tokens=CONTEXT)),
        StepLimits(slots=8, block_size=BLOCK_SIZE, **limits),
        vocabulary=vocabulary,
        blocks=BLOCKS,
    )
    return rank_of(Periodic(), slots=8, draft_model=model, swap_blocks=4), small


def begun(rank: GenerateRank, prompt: list[int], items: Sequence[ItemPlace] = ()) -> list[int]:
    """Have a request join slot 0 and yield its first token; return its blocks."""
    blocks = own_blocks(0)
    rank.apply(prefill(join(1, 0, prompt, items=items, blocks=blocks)))
    return blocks


def by_model(tokens: int) -> list[DraftGrant]:
    return [DraftGrant(0, tokens, 0, True)]


def test_draft_model_proposes_and_all_prove_right_if_both_think_alike() -> None:
    rank, small = model_rank(chunk=8)
    begun(rank, [16, 17, 18])
    found = rank.apply(GenerateDecision(2, granted=by_model(3))).drafted[0]
    assert (found.drafts, len(found.tokens)) == (3, 3)
    # Four known tokens and two draft tokens; the last draft token is not computed.
    assert (small.computed, small.prepared) == (6, [1])
    found = rank.apply(GenerateDecision(3)).drafted[0]
    assert len(found.tokens) == 3
    # That draft token and the next output token, in rows, and again two draft tokens.
    assert (small.computed, small.batches_run) == (10, 6)


def test_draft_model_takes_no_more_positions_a_step_than_memory_is_proved_for() -> None:
    """One sequence catches up while draft tokens are proposed for another."""
    rank, small = model_rank(chunk=8, batch=10)
    begun(rank, [16, 17, 18])
    long = [16 + at % 3 for at in range(20)]
    late = join(2, 1, long, blocks=own_blocks(1))
    rank.apply(prefill(late, step=2, granted=by_model(3)))
    requested = [DraftGrant(1, 3, 0, True)]
    reported = [rank.apply(GenerateDecision(3 + at, granted=requested)) for at in range(4)]
    assert [[each.slot for each in one.drafted] for one in reported] == [[0], [0], [0], [0, 1]]
    assert small.largest <= 10


def test_draft_model_computes_nothing_without_a_grant() -> None:
    rank, small = model_rank(chunk=8)
    begun(rank, [16, 17, 18])
    rank.apply(GenerateDecision(2, granted=[DraftGrant(0, 3, 1)]))
    rank.apply(GenerateDecision(3, granted=[DraftGrant(0, 0, 0, True)]))
    assert small.batches_run == 0


def test_draft_model_tracks_the_prefix_cache_blocks_that_it_has_filled() -> None:
    rank, small = model_rank()
    prompt = [16, 17, 18, 16, 17, 18, 16, 17, 18]
    blocks = begun(rank, prompt)
    rank.apply(GenerateDecision(2, granted=by_model(1)))
    assert small.computed == 10
    again = join(2, 1, prompt, blocks=[*blocks[:2], 40, 41], computed=8)
    rank.apply(prefill(again, step=3))
    before = small.computed
    rank.apply(GenerateDecision(4, granted=[DraftGrant(0, 0, 0), DraftGrant(1, 1, 0, True)]))
    assert small.computed == before + 2, "the ninth token of the prompt and the first of the answer"
    # Blocks that were given to another request hold its tokens.
    leave = [Leave(1, 0, keep=False), Leave(2, 1, keep=False)]
    other = join(3, 1, prompt, blocks=[*blocks[:1], 44, 45], computed=4)
    rank.apply(prefill(other, step=5, left=leave))
    before = small.computed
    rank.apply(GenerateDecision(6, granted=[DraftGrant(1, 1, 0, True)]))
    assert small.computed == before + 6


def test_draft_model_recomputes_swapped_blocks() -> None:
    rank, small = model_rank()
    blocks = begun(rank, [16, 17, 18, 16, 17, 18])
    rank.apply(GenerateDecision(2, granted=by_model(1)))
    out = SwapCopies([0, 0, 1, 1], [])
    rank.apply(GenerateDecision(3, left=[Leave(1, 0, keep=True)], swaps=out))
    small.kv[:] = NOTHING  # other requests used it meanwhile
    back = Join(1, 0, 8, 9, blocks[:3], None)
    rank.apply(prefill(back, step=4, swaps=SwapCopies([], [0, 0, 1, 1])))
    before = small.computed
    rank.apply(GenerateDecision(5, granted=by_model(1)))
    assert small.computed == before + 10


def test_draft_model_drafts_within_its_context_and_the_other_vocabulary() -> None:
    rank, _ = model_rank(vocabulary=FIRST + 1)
    begun(rank, [16, 17, 18])
    drafted: list[Drafted] = []
    for step in range(2, 12):
        drafted += rank.apply(GenerateDecision(step, granted=by_model(4))).drafted
    assert drafted, "some tokens are known to both"
    assert all(one.drafts < 4 for one in drafted)
    rank, _ = model_rank()
    assert rank._draft_model is not None
    rank._draft_model._info = stand_in_info(context_tokens=6)
    begun(rank, [16, 17, 18])
    assert rank.apply(GenerateDecision(2, granted=by_model(3))).drafted == []
    assert rank.apply(GenerateDecision(3, granted=by_model(1))).drafted[0].drafts == 1


def test_draft_model_reads_tokens_beyond_its_vocabulary_and_drafts_no_image() -> None:
    rank, small = model_rank()
    begun(rank, [16, 200, 200, 17], [ItemPlace(1, 2)])
    rank.apply(GenerateDecision(2, granted=by_model(2)))
    assert small.kv[0].tolist() == [16, 99, 99, 17]


@pytest.mark.parametrize("model", [False, True], ids=["lookup", "model"])
def test_generate_rank_yields_the_same_with_drafts(*, model: bool) -> None:
    """Whatever the source of the draft tokens is."""
    drafts = right = forced = 0
    for seed in range(30):
        rng = random.Random(seed)
        longest = 20 if model else 12
        prompts = [[rng.randint(16, 18) for _ in range(rng.randint(2, longest))] for _ in range(3)]
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randint(0, 99),
                max_tokens=rng.randint(1, 40),
                logprobs=rng.choice([None, 0]),
                grammar=rng.choice(["", "", CHOICES]),
            )
            for _ in prompts
        ]
        ranks = [rank_of(Periodic()) for _ in range(2)]
        if model:
            wrong = 0, rng.choice([0, 2, 5])
            ranks = [model_rank(wrong_every=one, chunk=rng.choice([3, 64]))[0] for one in wrong]
        stops = (FIRST + 4,)
        plain, _ = run_drafted(ranks[0], prompts, params, None, stops=stops)
        received, found = run_drafted(ranks[1], prompts, params, rng, stops=stops, model=model)
        assert received == plain
        drafts += sum(one.drafts for one in found)
        right += sum(len(one.tokens) for one in found)
        forced += any(one.grammar for one in params)
    assert 0 < right < drafts, "some draft tokens are accepted and some are not"
    assert forced
