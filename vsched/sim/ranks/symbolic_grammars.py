"""Grammars of simulated outputs: a choice of token sequences, none of which is a prefix of another.

Ranks and kernel only see where an output ends, and that the next token depends on earlier ones. A
choice has both properties and needs no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RequestRefused
from vsched.sim.ranks.symbolic_model import (
    FIRST_TOKEN,
    TOKENS,
    Content,
    answer,
    extend,
    fingerprints,
    root_of,
)
from vsched.types import FinishReason, MediaItem
from vsched.worker.drafts import foresee_with

Choices = Sequence[Sequence[int]]
_WORDS = -(-(FIRST_TOKEN + TOKENS) // 32)


def next_tokens(choices: Choices, outputs: Sequence[int]) -> list[int]:
    """Return the possible next tokens after an output, in order; empty if it is complete or matches no choice."""
    count = len(outputs)
    started = [each for each in choices if list(each[:count]) == list(outputs)]
    return sorted({each[count] for each in started if len(each) > count})


def chosen_token(fingerprint: int, allowed: Sequence[int]) -> int:
    """Return the allowed token that follows a position."""
    return allowed[(fingerprint >> 7) % len(allowed)]


def held_answer(
    prompt: Sequence[int],
    items: Sequence[MediaItem],
    count: int,
    choices: Choices,
    adapter: int = 0,
) -> list[int]:
    """Return the correct output for a prompt, limited to some choices if there are any."""
    if not choices:
        return answer(prompt, items, count, root_of(adapter))
    content = Content(items)
    *_, seen = fingerprints(prompt, content, root_of(adapter))
    tokens: list[int] = []
    while len(tokens) < count and (allowed := next_tokens(choices, tokens)):
        tokens.append(chosen_token(seen, allowed))
        seen = extend(seen, content.at(len(prompt) + len(tokens) - 1, tokens[-1]))
    return tokens


def allowed_tokens(mask: npt.NDArray[np.uint32]) -> list[int]:
    """Return the tokens that a mask allows, in order."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


class SymbolicGrammars:
    """Compiles choices; see `vsched.worker.contract.Grammars`."""

    def check(self, grammar: str) -> None:
        """Refuse a grammar that is not a choice of token sequences.

        Raises:
            RequestRefused: With the reason.
        """
        try:
            choices = _choices(grammar)
        except (msgspec.MsgspecError, ValueError):
            choices = []
        known = all(
            each and all(FIRST_TOKEN <= token < FIRST_TOKEN + TOKENS for token in each)
            for each in choices
        )
        ambiguous = any(
            one == other[: len(one)] for one, other in permutations(map(tuple, choices), 2)
        )
        if not choices or not known or ambiguous:
            raise RequestRefused(
                "the grammar cannot be used: simulated models know choices of numbers, of which none begins another. "
                "Remedy: send such a choice.",
                code="invalid_grammar",
            )

    def matcher(self, grammar: str) -> ChoiceMatcher:
        """Return a matcher for a choice."""
        return ChoiceMatcher(_choices(grammar))


class SymbolicChecker:
    """Checks grammars in this process, without native code; see `vsched.aio.grammar_checks.GrammarChecker`."""

    pid = 0

    def check(self, grammar: str) -> float:
        """Refuse a grammar that is not a choice of token sequences."""
        SymbolicGrammars().check(grammar)
        return 0.0

    def close(self) -> None:
        """No-op."""


class ChoiceMatcher:
    """Matches one output; see `vsched.worker.contract.TokenMatcher`."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._outputs: list[int] = []
        self._mask = np.zeros(_WORDS, np.uint32)
        self._look()

    @property
    def mask(self) -> npt.NDArray[np.uint32]:
        """Mask of the possible next tokens."""
        return self._mask

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Advance by tokens; return STOP if the output is complete, ERROR if it matches no choice."""
        self._outputs += token_ids
        if self._outputs in [list(each) for each in self._choices]:
            return FinishReason.STOP
        return None if self._look() else FinishReason.ERROR

    def foresee(
        self, wanted: Sequence[int], count: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Return up to `count` possible next tokens, each with the mask after it."""
        copy = ChoiceMatcher(self._choices)
        if self._outputs:
            copy.follow(self._outputs)
        return foresee_with(copy, wanted, count)

    def _look(self) -> bool:
        tokens = next_tokens(self._choices, self._outputs)
        self._mask[:] = 0
        for token in tokens:
            self._mask[token // 32] |= np.uint32(1 << token % 32)
        if not tokens:
            self._mask[:] = 0xFFFFFFFF
        return bool(tokens)


def _choices(grammar: str) -> list[list[int]]:
    held = msgspec.json.decode(grammar, type=dict[str, list[str]])
    if held.keys() != {"choice"}:
        raise ValueError("no choice")
    return [[int(word) for word in text.split()] for text in held["choice"]]
