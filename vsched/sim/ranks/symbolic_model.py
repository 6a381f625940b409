"""The symbolic model of simulated ranks, whose outputs follow a simple rule.

Each position of a sequence has a *fingerprint* of all tokens and images up to it. It takes the
place of K and V: it is stored in the KV cache, and the next token is computed from the stored
values. So any wrong data that a rank reads shows in the output, or earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, permutations, starmap

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RequestRefused
from vsched.media.keys import content_key
from vsched.sim.workload.images import SETTINGS_DIGEST, Appearance
from vsched.sim.workload.requests import TEXT_BITS
from vsched.types import ArraySpec, FinishReason, MediaItem, Spans
from vsched.worker.contract import ImagePlan
from vsched.worker.drafts import foresee_with

IMAGE_TOKEN = 1 << TEXT_BITS
"""Text tokens have lower ids."""
END_TOKEN = IMAGE_TOKEN + 1
SEPARATOR_TOKEN = IMAGE_TOKEN + 2
VIDEO_TOKEN = IMAGE_TOKEN + 3
VOCABULARY = IMAGE_TOKEN + 4
FIRST_TOKEN = 16
TOKENS = 97
"""Number of output tokens, starting at `FIRST_TOKEN`; small, so that stop tokens occur by chance."""
ROOT = 0x9E3779B97F4A7C15
DRAFT = "simulated-draft"
"""Path prefix of a draft model checkpoint, followed by its acceptance rate, as in `… 0.7`."""
Choices = Sequence[Sequence[int]]
_MASK = (1 << 64) - 1
_ROW = 3
PIXELS = "pixels"
GROUP_FRAMES = 2
"""Frames of a frame group."""
PATCHES_PER_TOKEN = 4
PATCH_VALUES = 4


def extend(seen: int, content: int) -> int:
    """Return the fingerprint of a position from the previous fingerprint and the content of the position."""
    mixed = ((seen ^ content) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 29)


def root_of(adapter: int) -> int:
    """Return the initial fingerprint of a sequence, which depends on the adapter."""
    return extend(ROOT, adapter) if adapter else ROOT


def next_token(fingerprint: int) -> int:
    """Return the token that follows a position."""
    return FIRST_TOKEN + (fingerprint >> 7) % TOKENS


def drafted_token(fingerprint: int, acceptance: float) -> int:
    """Return the draft token after a position: correct with probability `acceptance`."""
    right = (extend(fingerprint, 1) >> 11) % 1000 < 1000 * acceptance
    return next_token(fingerprint if right else fingerprint + (1 << 7))


class Content:
    """Content of the positions of a prompt: tokens or rows of images."""

    def __init__(self, items: Iterable[MediaItem]) -> None:
        self._rows = {
            position: int.from_bytes(item.key[:7], "little") + row + 1
            for item in items
            for row, position in zip(
                _numbers(item.kept or ((0, item.tokens),)), _numbers(item.runs), strict=True
            )
        }

    def at(self, position: int, token: int) -> int:
        """Return a number for the content of a position."""
        return self._rows.get(position, 0) << 32 ^ token


def _numbers(spans: Spans) -> Iterator[int]:
    return chain.from_iterable(starmap(range, spans))


def fingerprints(tokens: Sequence[int], content: Content, root: int = ROOT) -> Iterator[int]:
    """Yield the fingerprint of each position of a sequence with this initial fingerprint."""
    seen = root
    for position, token in enumerate(tokens):
        seen = extend(seen, content.at(position, token))
        yield seen


def image_tokens(tokens: int) -> tuple[int, ...]:
    """Return the prompt tokens of an image: placeholders, in some cases in rows with separators."""
    if tokens % _ROW:
        return (IMAGE_TOKEN,) * tokens
    row = (SEPARATOR_TOKEN, *[IMAGE_TOKEN] * _ROW)
    return (row * (tokens // _ROW))[1:]


def image_plan(tokens: int) -> ImagePlan:
    """Return the plan of an image with this many tokens."""
    spec = ArraySpec(PIXELS, "float32", (PATCHES_PER_TOKEN * tokens, PATCH_VALUES))
    return ImagePlan((spec,), tokens, image_tokens(tokens), image_metadata(tokens))


def video_tokens(groups: int, group_tokens: int) -> tuple[int, ...]:
    """Return the prompt tokens of a video: a separator before each frame group."""
    return (SEPARATOR_TOKEN, *[VIDEO_TOKEN] * group_tokens) * groups


def group_plan(tokens: int) -> ImagePlan:
    """Return the plan of a frame group with this many tokens."""
    return dataclasses.replace(image_plan(tokens), expansion=video_tokens(1, tokens))


def pixels(colour: Sequence[int], tokens: int) -> npt.NDArray[np.float32]:
    """Return the pixels of an image or a frame group in one colour."""
    row = np.array([*colour, tokens], np.float32)
    return np.tile(row, (PATCHES_PER_TOKEN * tokens, 1))


def frame_group_key(look: Appearance, tenant: str) -> bytes:
    """Return a server's cache key of a frame group, which is that of its pixels."""
    plan = group_plan(look.tokens)
    return content_key(
        settings_digest=SETTINGS_DIGEST,
        cache_salt=tenant,
        specs=msgspec.json.encode((plan.arrays, plan.tokens)),
        arrays=[pixels(look.colour, look.tokens).view(np.uint8).data],
    )


def image_metadata(tokens: int) -> bytes:
    """Return the metadata of an image with this many tokens."""
    return b"%d tokens" % tokens


def answer(
    prompt: Sequence[int],
    items: Sequence[MediaItem],
    count: int,
    *,
    root: int = ROOT,
    choices: Choices = (),
) -> list[int]:
    """Return the correct output for a prompt, limited to some choices if there are any.

    It does not depend on scheduling.
    """
    content = Content(items)
    *_, seen = fingerprints(prompt, content, root)
    tokens: list[int] = []
    while len(tokens) < count:
        allowed = next_tokens(choices, tokens)
        if choices and not allowed:
            break
        tokens.append(chosen_token(seen, allowed) if choices else next_token(seen))
        seen = extend(seen, content.at(len(prompt) + len(tokens) - 1, tokens[-1]))
    return tokens


@lru_cache(maxsize=512)
def embedding_rows(key: bytes, tokens: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the embedding rows of an image, uint8 [tokens, row bytes]; do not write to them."""
    start = blake2b(key, digest_size=8).digest()
    rows = np.zeros((tokens, row_bytes), np.uint8)
    rows[:, :8] = np.frombuffer(start, np.uint8)
    rows[:, 8:12] = np.arange(tokens, dtype="<u4").view(np.uint8).reshape(tokens, 4)
    rows.flags.writeable = False
    return rows


_WORDS = -(-(FIRST_TOKEN + TOKENS) // 32)


def next_tokens(choices: Choices, outputs: Sequence[int]) -> list[int]:
    """Return the possible next tokens after an output, in order; empty if it is complete or matches no choice."""
    count = len(outputs)
    started = [each for each in choices if list(each[:count]) == list(outputs)]
    return sorted({each[count] for each in started if len(each) > count})


def chosen_token(fingerprint: int, allowed: Sequence[int]) -> int:
    """Return the allowed token that follows a position."""
    return allowed[(fingerprint >> 7) % len(allowed)]


def allowed_tokens(mask: npt.NDArray[np.uint32]) -> list[int]:
    """Return the tokens that a mask allows, in order."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


class SymbolicGrammars:
    """Compiles choices, and checks them in this process.

    See `vsched.worker.contract.Grammars` and `vsched.aio.grammar_checks.GrammarChecker`.
    """

    pid = 0

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

    def close(self) -> None:
        """No-op."""


class ChoiceMatcher:
    """Matches one output; see `vsched.worker.contract.TokenMatcher`.

    Attributes:
        mask: The possible next tokens.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._outputs: list[int] = []
        self.mask: npt.NDArray[np.uint32] = np.zeros(_WORDS, np.uint32)
        self._look()

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
        self.mask[:] = 0
        for token in tokens:
            self.mask[token // 32] |= np.uint32(1 << token % 32)
        if not tokens:
            self.mask[:] = 0xFFFFFFFF
        return bool(tokens)


def _choices(grammar: str) -> list[list[int]]:
    held = msgspec.json.decode(grammar, type=dict[str, list[str]])
    if held.keys() != {"choice"}:
        raise ValueError("no choice")
    return [[int(word) for word in text.split()] for text in held["choice"]]
