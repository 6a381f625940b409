"""What a rank drafts for a slot, and the rows that verify it.

A draft is a token that may come next but one. It runs as a row behind the last token, and its row tells what comes
after it. A row's token depends on the tokens before it, seed and position alone, so as far as each draft is the token
that the row before it yields, all of these are the very tokens that steps of one row would have brought.

All ranks of a group must draft the same: a draft follows from the grant, the tokens and the grammar of a sequence, and
from nothing else. There are two sources: `lookup`, and a small model (`vsched.worker.drafting.model`), which is asked
where the first has nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vsched.kernel.decisions import DraftGrant
from vsched.worker.contract import SequenceState, TokenMatcher

MATCH_MAX = 16
"""Of earlier places with the same last tokens the one that agrees longest is taken; so many tokens are looked at."""


@dataclass(frozen=True, slots=True)
class SlotDraft:
    """The drafts of one slot: tokens, and for each the mask of what may come after it, where there is a grammar."""

    tokens: list[int]
    masks: list[npt.NDArray[np.uint32]] = field(default_factory=list)


def draft(sequence: SequenceState, length: int, grant: DraftGrant, room: int) -> SlotDraft | None:
    """Return what is drafted behind `length` tokens without a model, at most `room` of them; None for nothing."""
    count = min(grant.tokens, room)
    if count <= 0:
        return None
    wanted = lookup(sequence.tokens[:length], count, grant.ngram) if grant.ngram else []
    return verifiable(sequence, wanted, count)


def verifiable(sequence: SequenceState, wanted: list[int], count: int) -> SlotDraft | None:
    """Return what of the tokens that are wanted next may come, and what must, at most `count`; None for nothing."""
    if sequence.items:
        wanted = _before_items(sequence, wanted)
    if sequence.matcher is not None:
        foreseen = sequence.matcher.foresee(wanted, count)
        if not foreseen:
            return None
        return SlotDraft([token for token, _ in foreseen], [mask for _, mask in foreseen])
    return SlotDraft(wanted) if wanted else None


def lookup(tokens: npt.NDArray[np.int32], count: int, ngram: int) -> list[int]:
    """Return the `count` tokens that followed the last ones where these, at least `ngram` of them, stood before.

    Of several places it is the one before which most tokens agree, of equal ones the last. What it followed up to the
    end is followed from its beginning again, as in a text that goes round.
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
    """Return tokens up to the first that stands for an image in the prompt: no text has it."""
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
    """Return the drafts that a grammar leaves, for `TokenMatcher.foresee`; `matcher` is a copy, which follows them.

    A token that must come is drafted, whatever is wanted; another as long as what is wanted came true, if it may come.
    What ends an answer is not: nothing comes after it.
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
    """Return the one token that a mask allows; None where it allows several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def allows(mask: npt.NDArray[np.uint32], token: int) -> bool:
    """Return whether a mask allows a token."""
    word = token // 32
    return 0 <= word < len(mask) and bool(int(mask[word]) >> token % 32 & 1)
