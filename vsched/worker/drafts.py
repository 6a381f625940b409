"""Draft tokens of a slot for speculative decoding.

A draft token is a guess of the token after the next one. It is a decode row after the last token, whose result is the
token after it. The token of a row depends only on the tokens before it, seed and position. So as long as each draft
token equals the token sampled by the row before it, the results are exactly the tokens of single-row steps.

All ranks of a group must use the same draft tokens: they depend only on the grant, the tokens and the grammar of a
sequence. Sources are `lookup` (n-grams of the sequence) and, if it finds nothing, a small model
(`vsched.worker.drafts`).

Draft tokens from a second, smaller model with the same vocabulary, which each rank runs next to the target model.

It is a generate worker with a KV cache of the same number of blocks, and a position of a sequence has the same block in
both: the kernel allocates blocks once. It computes only on request: sequences without drafts cost nothing, and a
sequence that is requested for the first time is prefilled in chunks, one per step. It tracks the blocks that it has
filled, so blocks from the prefix cache need not be computed again.

It samples from its own logits with the target model's seed and position. If the distributions are similar, the same
random numbers select the same token, so draft tokens are accepted at temperatures above 0, too.

It reads only text: image placeholders are ordinary tokens to it. Missing images, adapters and grammar masks cannot make
an output wrong; they lower the acceptance rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.kernel.decisions import DraftGrant
from vsched.types import ModelInfo
from vsched.worker.contract import Batch, Chunk, GenerateWorker, SequenceState, TokenMatcher
from vsched.worker.slots import SlotTable
from vsched.worker.spec import StepLimits

MATCH_MAX = 16
"""Maximum number of tokens compared to find the earlier position with the longest match."""


@dataclass(frozen=True, slots=True)
class SlotDraft:
    """The draft tokens of one slot; with a grammar, the mask after each."""

    tokens: list[int]
    masks: list[npt.NDArray[np.uint32]] = field(default_factory=list)


def draft(sequence: SequenceState, length: int, grant: DraftGrant, room: int) -> SlotDraft | None:
    """Return up to `room` draft tokens after `length` tokens, without a draft model; None for none."""
    count = min(grant.tokens, room)
    if count <= 0:
        return None
    wanted = lookup(sequence.tokens[:length], count, grant.ngram) if grant.ngram else []
    return verifiable(sequence, wanted, count)


def verifiable(sequence: SequenceState, wanted: list[int], count: int) -> SlotDraft | None:
    """Return up to `count` draft tokens that are allowed or forced by the grammar; None for none."""
    if sequence.items:  # outputs never contain their placeholders
        held = {
            int(sequence.tokens[start])
            for place in sequence.items
            for start, _, _ in place.rows(0, sequence.prompt_length)
        }
        wanted = [*itertools.takewhile(lambda token: token not in held, wanted)]
    if sequence.matcher is not None:
        foreseen = sequence.matcher.foresee(wanted, count)
        if not foreseen:
            return None
        return SlotDraft([token for token, _ in foreseen], [mask for _, mask in foreseen])
    return SlotDraft(wanted) if wanted else None


def lookup(tokens: npt.NDArray[np.int32], count: int, ngram: int) -> list[int]:
    """Return the `count` tokens after an earlier occurrence of the last tokens, which must match in at least `ngram`.

    Of several occurrences, the one with the longest match counts, and of equal ones the last. At the end of the
    sequence the continuation starts over from its beginning, as in a repeating text.
    """
    last = len(tokens) - 1
    if last < ngram:
        return []
    places = np.flatnonzero(tokens[ngram - 1 : last] == tokens[last]) + ngram - 1
    for back in range(1, min(MATCH_MAX, last)):
        if not len(places):
            return []
        agree = (places >= back) & (tokens[np.maximum(places - back, 0)] == tokens[last - back])
        if back >= ngram and not agree.any():
            break
        places = places[agree]
    if not len(places):
        return []
    start = int(places[-1]) + 1
    period = last + 1 - start
    found: list[int] = tokens[start + np.arange(count) % period].tolist()
    return found


def foresee_with(
    matcher: TokenMatcher, wanted: Sequence[int], count: int
) -> list[tuple[int, npt.NDArray[np.uint32]]]:
    """Return the draft tokens allowed by a grammar, for `TokenMatcher.foresee`; `matcher` is a copy that follows them.

    A token that the grammar forces is always drafted; tokens of `wanted` are drafted while they agree with the drafts
    so far and are allowed. Tokens that end the output are not drafted.
    """
    found: list[tuple[int, npt.NDArray[np.uint32]]] = []
    while len(found) < count:
        token = only_token(matcher.mask)
        place = len(found)
        agrees = all(one == other for (one, _), other in zip(found, wanted, strict=False))
        if token is None and agrees and place < len(wanted) and allows(matcher.mask, wanted[place]):
            token = wanted[place]
        if token is None or matcher.follow([token]) is not None:
            return found
        found.append((token, matcher.mask.copy()))
    return found


def only_token(mask: npt.NDArray[np.uint32]) -> int | None:
    """Return the only token that a mask allows; None if there are several or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def allows(mask: npt.NDArray[np.uint32], token: int) -> bool:
    """Return True if a mask allows a token."""
    word = token // 32
    return 0 <= word < len(mask) and bool(int(mask[word]) >> token % 32 & 1)


ROWS_MAX = 2
"""Missing tokens up to this number are computed in decode rows: the last draft token and the token after it."""


class DraftWorker(NamedTuple):
    """The worker of a draft model, and the facts of its checkpoint, with this rank's share of KV."""

    worker: GenerateWorker
    info: ModelInfo


@dataclass(slots=True)
class Followed:
    """A sequence of the draft model.

    Attributes:
        sequence: Its tokens, `length` of them known tokens of the request, followed by draft tokens.
        done: Number of positions with KV in the draft model.
    """

    sequence: SequenceState
    done: int


class DraftModel:
    """A draft model and its progress in the sequence of each slot."""

    def __init__(
        self,
        draft: DraftWorker,
        limits: StepLimits,
        *,
        vocabulary: int,
        blocks: int,
    ) -> None:
        """Use a worker with a KV cache of `blocks` blocks.

        `vocabulary` is the vocabulary size of the target model: tokens beyond it are not drafted.
        """
        self._worker, self._info = draft
        self._vocabulary, self._limits = vocabulary, limits
        self._block_size = limits.block_size
        self._whole = np.zeros(blocks, np.bool_)
        """Whether all positions of each block are computed."""
        self._followed: dict[int, Followed] = {}
        self._none = np.zeros((1, 1, 1), np.uint8)

    def renew(self, blocks: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Note that these blocks get other tokens."""
        self._whole[blocks] = False

    def leave(self, slot: int) -> None:
        """Forget the sequence in a slot."""
        self._followed.pop(slot, None)

    def propose(
        self, requested: Mapping[int, int], sequences: Mapping[int, SequenceState], table: SlotTable
    ) -> dict[int, list[int]]:
        """Return draft tokens after the known tokens of slots, at most the given number for each.

        Raises:
            DeviceOutOfMemory: From the worker.
        """
        wanted = {
            slot: count
            for slot, count in sorted(requested.items())
            if table.length[slot] + count <= self._info.context_tokens
        }
        for slot in wanted:
            self._update_sequence(slot, sequences[slot], table)
        found = self._catch_up(list(wanted), table)
        going = sorted(found)
        while going := [
            slot
            for slot in going
            if len(found[slot]) < wanted[slot]
            and found[slot][-1] >= 0
            and found[slot][-1] not in self._followed[slot].sequence.stop_token_ids
        ]:
            rows = []
            for slot in going:
                followed = self._followed[slot]
                followed.sequence.tokens[followed.done] = found[slot][-1]
                rows.append((slot, followed.done))
                followed.done += 1
            for slot, token in zip(going, self._run_step(rows, [], table), strict=True):
                found[slot].append(token)
        known = range(self._vocabulary)  # tokens that the target model does not have end a draft
        return {
            slot: [*itertools.takewhile(known.__contains__, tokens)]
            for slot, tokens in found.items()
        }

    def _update_sequence(self, slot: int, sequence: SequenceState, table: SlotTable) -> None:
        """Update a sequence with its new tokens; rejected draft tokens are forgotten."""
        length = int(table.length[slot])
        tokens = np.minimum(sequence.tokens[:length], self._info.vocab_size - 1)
        followed = self._followed.get(slot)
        if followed is None:
            followed = self._followed[slot] = self._start_following(slot, sequence, tokens, table)
        own = followed.sequence
        if followed.done > own.length:
            drafts = own.tokens[own.length : followed.done]
            came = tokens[own.length : followed.done]
            wrong = np.flatnonzero(drafts[: len(came)] != came)
            followed.done = own.length + (int(wrong[0]) if len(wrong) else len(came))
        own.tokens[own.length : length] = tokens[own.length :]
        own.length = length
        # The last token is always computed, because its row yields the next one.
        followed.done = min(followed.done, length - 1)

    def _start_following(
        self,
        slot: int,
        sequence: SequenceState,
        tokens: npt.NDArray[np.int32],
        table: SlotTable,
    ) -> Followed:
        sampling = msgspec.structs.replace(
            sequence.sampling, grammar="", logprobs=None, prompt_logprobs=None
        )
        own = SequenceState(
            number=sequence.number,
            tokens=np.zeros(table.tokens.shape[1], np.int32),
            length=len(tokens),
            prompt_length=sequence.prompt_length,
            items=(),
            sampling=sampling,
            stop_token_ids=sequence.stop_token_ids,
        )
        own.tokens[: len(tokens)] = tokens
        self._worker.prepare(own)
        blocks = table.block_table[slot, : len(tokens) // self._block_size]
        lacking = np.flatnonzero(~self._whole[blocks])
        whole = int(lacking[0]) if len(lacking) else len(blocks)
        return Followed(own, whole * self._block_size)

    def _catch_up(self, slots: Sequence[int], table: SlotTable) -> dict[int, list[int]]:
        """Compute missing positions up to the last known token within one step; return the next token by slot."""
        rows: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        # Decode rows first: the memory is proved for this total number of rows.
        room = min(
            self._limits.chunk_tokens, max(self._limits.batch_tokens - ROWS_MAX * len(slots), 0)
        )
        for slot in slots:
            followed = self._followed[slot]
            own, start = followed.sequence, followed.done
            lag = own.length - start
            if lag <= ROWS_MAX:
                rows += [(slot, position) for position in range(start, own.length)]
            elif room:
                stop = start + min(lag, room)
                room -= stop - start
                chunks.append(Chunk(slot, own, start, stop, stop == own.length, ()))
            else:
                continue
            followed.done = chunks[-1].stop if lag > ROWS_MAX else own.length
        if not rows and not chunks:
            return {}
        sampled = [slot for slot, _ in rows] + [one.slot for one in chunks if one.samples]
        tokens = self._run_step(rows, chunks, table)
        for slot in slots:
            filled = self._followed[slot].done // self._block_size
            self._whole[table.block_table[slot, :filled]] = True
        # With two rows of a slot, the last one counts.
        return {slot: [token] for slot, token in zip(sampled, tokens, strict=True)}

    def _run_step(
        self, rows: Sequence[tuple[int, int]], chunks: list[Chunk], table: SlotTable
    ) -> list[int]:
        """Run positions of slots, and chunks; return the token sampled by each row."""
        sequences = [self._followed[slot].sequence for slot, _ in rows]
        batch = Batch(
            decode_slots=np.array([slot for slot, _ in rows], np.int32),
            decode_tokens=np.array(
                [one.tokens[position] for one, (_, position) in zip(sequences, rows, strict=True)],
                np.int32,
            ),
            decode_positions=np.array([position for _, position in rows], np.int32),
            decode_sequences=sequences,
            block_tables=table.block_table,
            embeddings=self._none,
            chunks=chunks,
        )
        yielding = sequences + [chunk.sequence for chunk in chunks if chunk.samples]
        batch.special = [(row, one) for row, one in enumerate(yielding) if one.is_special]
        tokens: list[int] = self._worker.step(batch).tokens.tolist()
        return tokens
