"""Several answers to one request: what tells them apart, and what they give back together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from vsched.kernel.events import FurtherAnswer

_SEED_BITS = 63


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a further answer; that of the first is the request's: it draws what one alone would."""
    text = f"{seed}/{index}".encode()
    digest = blake2b(text, digest_size=8, person=b"vsched.seed").digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def further_answers(request_ids: Sequence[str], seed: int) -> tuple[FurtherAnswer, ...]:
    """Return the answers after the first to a request whose answers have these ids."""
    return tuple(
        FurtherAnswer(request_id, answer_seed(seed, index))
        for index, request_id in enumerate(request_ids)
        if index
    )


class LastEnd:
    """Calls `release` when the last of `count` answers has ended."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._left = count
        self._release = release

    def __call__(self) -> None:
        """Note that an answer has ended."""
        self._left -= 1
        if not self._left:
            self._release()
