"""Speculative decoding in a rank: sources of draft tokens, acceptance, and outputs that stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.worker.drafting.drafted_runs import run_drafted
from tests.unit.worker.test_generate_rank import GREEDY, Script, join, tokens_of, whole
from vsched.errors import RankDesync
from vsched.kernel.decisions import DraftGrant, GenerateDecision, Leave
from vsched.kernel.events import Drafted, Finished
from vsched.sim.ranks.symbolic_model import SymbolicGrammars
from vsched.types import FinishReason, ItemPlace, SamplingParams
from vsched.wire import GenerateResult, check_of
from vsched.worker.contract import Batch, Sampled, SequenceState, TokenLogprobs
from vsched.worker.drafting.drafts import allows, draft, lookup, only_token
from vsched.worker.generate_rank import GenerateRank

BLOCK_SIZE = 4
CONTEXT = 64
FIRST = 16
"""The first of the tokens that the models here yield; the grammars of simulations know those from here on."""


def int32(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


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
def test_lookup_finds_what_followed_the_last_tokens(
    tokens: tuple[int, ...], ngram: int, found: list[int]
) -> None:
    assert lookup(int32(*tokens), 3, ngram) == found


def test_masks_report_the_only_token() -> None:
    mask = np.zeros(3, np.uint32)
    assert only_token(mask) is None
    mask[2] = 1 << 31
    assert only_token(mask) == 95
    assert [allows(mask, token) for token in (95, 94, 96)] == [True, False, False]
    mask[0] = 1
    assert only_token(mask) is None


def test_draft_stops_before_what_stands_for_an_image() -> None:
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


def rank_of(worker: Script) -> GenerateRank:
    embeddings = np.zeros((4, 4, 8), np.uint8)
    return GenerateRank(
        worker,
        embeddings,
        slots=4,
        context_tokens=CONTEXT,
        block_size=BLOCK_SIZE,
        grammars=SymbolicGrammars(),
    )


def started(
    worker: Script, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **more: object
) -> GenerateRank:
    """Return a rank with a request in slot 1, after its first token and with all blocks it needs."""
    rank = rank_of(worker)
    requested = join(1, 1, list(prompt), sampling=sampling, **more)  # type: ignore[arg-type]
    requested = msgspec.structs.replace(requested, blocks=list(range(CONTEXT // BLOCK_SIZE)))
    rank.apply(GenerateDecision(1, joined=[requested], chunks=[whole(1, len(prompt))]))
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


def test_generate_rank_keeps_a_grant_until_another_or_a_leave() -> None:
    worker = Script([6], [5, 1], [6], [7, 1], [8])
    rank = started(worker, [5, 6, 5])
    rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 1, 1)]))
    rank.apply(GenerateDecision(3, granted=[DraftGrant(1, 0, 1)]))
    assert worker.batches[2]["slots"] == [1]
    rank.apply(GenerateDecision(4, granted=[DraftGrant(1, 1, 1)]))
    assert worker.batches[3]["slots"] == [1, 1]
    again = msgspec.structs.replace(join(2, 1, [5, 5]), blocks=[0])
    rank.apply(
        GenerateDecision(5, left=[Leave(1, 1, keep=False)], joined=[again], chunks=[whole(1, 2)])
    )
    assert rank._grants == {}
    with pytest.raises(RankDesync, match="slot 2, which is empty"):
        rank.apply(GenerateDecision(6, granted=[DraftGrant(2, 1, 1)]))


def test_generate_rank_drafts_no_further_than_blocks_and_limit() -> None:
    worker = Script([7], [7, 7], [7])
    rank = rank_of(worker)
    requested = join(1, 0, [7, 7, 7, 7, 7], sampling=GREEDY)  # two blocks: eight positions
    rank.apply(GenerateDecision(1, joined=[requested], chunks=[whole(0, 5)]))
    worker.steps[0] = [7, 7, 7]
    rank.apply(GenerateDecision(2, granted=[DraftGrant(0, 8, 1)]))
    assert worker.batches[1]["positions"] == [5, 6, 7]
    limited = Script([7], [7, 7, 7])
    rank = started(limited, [7, 7], msgspec.structs.replace(GREEDY, max_tokens=4))
    result = rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 8, 1)]))
    assert limited.batches[1]["positions"] == [2, 3, 4]
    assert result.drafted == [Drafted(1, 2, [7, 7])]
    assert result.finished == [Finished(1, 1, FinishReason.LENGTH)]


def test_generate_rank_ends_at_a_stop_token_among_drafts() -> None:
    worker = Script([5], [7, 9, 6, 5], [1])
    rank = started(worker, [5, 7, 9, 6], stops=(9,))
    result = rank.apply(GenerateDecision(2, granted=[DraftGrant(1, 3, 1)]))
    assert worker.batches[1]["tokens"] == [5, 7, 9, 6]
    assert result.drafted == [Drafted(1, 3, [9])]
    assert result.finished == [Finished(1, 1, FinishReason.STOP)]
    assert rank.apply(GenerateDecision(3)).finished == []


def test_generate_rank_grows_a_slot_by_several_blocks() -> None:
    worker = Script([7], [7] * 7)
    rank = rank_of(worker)
    rank.apply(GenerateDecision(1, joined=[join(1, 0, [7, 7, 7])], chunks=[whole(0, 3)]))
    grown = [0, 31, 0, 32]
    rank.apply(GenerateDecision(2, granted=[DraftGrant(0, 6, 1)], grown=grown))
    assert worker.batches[1]["blocks"][0, :3].tolist() == [10, 31, 32]
    assert worker.batches[1]["positions"] == list(range(3, 10))


def test_check_of_a_result_covers_what_was_drafted() -> None:
    result = GenerateResult(1, b"", b"", [], [], 0)
    other = msgspec.structs.replace(result, drafted=[Drafted(1, 2, [3])])
    assert check_of(result) != check_of(other)
    assert check_of(other) != check_of(
        msgspec.structs.replace(result, drafted=[Drafted(1, 2, [4])])
    )


# --- the same tokens as without draft tokens ---


class Periodic(Script):
    """The next token follows from the last two, the seed and the position; with grammars and logprobs.

    It reads the whole history of each row, so a draft token in the wrong place would show.
    """

    def step(self, batch: Batch) -> Sampled:
        table = batch.block_tables
        rows = [
            (one, position + 1)
            for one, position in zip(
                batch.decode_sequences, batch.decode_positions.tolist(), strict=True
            )
        ]
        for slot, token, position, one in zip(
            batch.decode_slots.tolist(),
            batch.decode_tokens.tolist(),
            batch.decode_positions.tolist(),
            batch.decode_sequences,
            strict=True,
        ):
            assert one.tokens[position] == token, "a row differs from the sequence"
            assert table[slot, position // BLOCK_SIZE] >= 0
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


def all_blocks(slot: int) -> list[int]:
    return list(range(CONTEXT // BLOCK_SIZE))


CHOICES = '{"choice": ["16 17 18 19 21 22 23", "16 17 18 22 23 24 25 26", "18 18 18 18", "17 16 16 16 23"]}'


def test_generate_rank_yields_the_same_with_drafts() -> None:
    drafts = right = forced = 0
    for seed in range(150):
        rng = random.Random(seed)
        prompts = [[rng.randint(16, 18) for _ in range(rng.randint(2, 12))] for _ in range(3)]
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
        requested = partial(run_drafted, rank_of(Periodic()), prompts, params)
        plain, none = requested(None, stops=(FIRST + 4,), blocks=all_blocks)
        requested = partial(run_drafted, rank_of(Periodic()), prompts, params)
        found, drafted = requested(rng, stops=(FIRST + 4,), blocks=all_blocks)
        assert found == plain
        assert not none
        drafts += sum(one.drafts for one in drafted)
        right += sum(len(one.tokens) for one in drafted)
        forced += any(one.grammar for one in params)
    assert 0 < right < drafts, "some draft tokens are accepted and some are not"
    assert forced
