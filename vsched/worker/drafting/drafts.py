"""Draft tokens of a slot for speculative decoding.

A draft token is a guess of the token after the next one. It is a decode row after the last token, whose result is the
token after it. The token of a row depends only on the tokens before it, seed and position. So as long as each draft
token equals the token sampled by the row before it, the results are exactly the tokens of single-row steps.

All ranks of a group must use the same draft tokens: they depend only on the grant, the tokens and the grammar of a
sequence. Sources are `lookup` (n-grams of the sequence) and, if it finds nothing, a small model
(`vsched.worker.drafting.model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vsched.kernel.decisions import DraftGrant
from vsched.worker.contract import SequenceState, TokenMatcher

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
    if sequence.items:
        wanted = _before_items(sequence, wanted)
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


def _before_items(sequence: SequenceState, wanted: list[int]) -> list[int]:
    """Return tokens before the first image placeholder, which outputs never contain."""
    held = {
        int(sequence.tokens[start])
        for place in sequence.items
        for start, _, _ in place.rows(0, sequence.prompt_length)
    }
    stop = next((index for index, token in enumerate(wanted) if token in held), len(wanted))
    return wanted[:stop]


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
