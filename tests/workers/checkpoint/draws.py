"""Grammars in tests: their encoding, the tokens that a matcher allows, and blind draws."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from vsched.types import FinishReason
from vsched_workers.checkpoint.grammars import OutputMatcher, TokenGrammars

TOKENS_MAX = 600


def encoded(**kind: Any) -> str:
    return msgspec.json.encode(kind).decode()


def allowed(matcher: OutputMatcher) -> list[int]:
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def drawn_from(matcher: OutputMatcher, seed: int) -> list[int]:
    """Return random tokens that a matcher allows, up to the end of the output."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < TOKENS_MAX:
        tokens.append(rng.choice(allowed(matcher)))
        reason = matcher.follow(tokens[-1:])
        if reason is not None:
            assert reason is FinishReason.STOP, matcher.error
            return tokens
    raise AssertionError("it found no end")


def drawn(grammars: TokenGrammars, grammar: str, seed: int) -> list[int]:
    """Return an output of random tokens that the grammar allows."""
    return drawn_from(grammars.matcher(grammar), seed)
