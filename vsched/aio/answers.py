"""Several choices of one request: their seeds, and the release of shared resources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from vsched.kernel.events import FurtherChoice

_SEED_BITS = 63


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of a further choice; the first has the request's seed, so it equals a single choice."""
    text = f"{seed}/{index}".encode()
    digest = blake2b(text, digest_size=8, person=b"vsched.seed").digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def further_choices(request_ids: Sequence[str], seed: int) -> tuple[FurtherChoice, ...]:
    """Return the choices after the first of a request whose choices have these ids."""
    return tuple(
        FurtherChoice(request_id, answer_seed(seed, index))
        for index, request_id in enumerate(request_ids)
        if index
    )


class LastEnd:
    """Calls `release` when the last of `count` choices has ended."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._left = count
        self._release = release

    def __call__(self) -> None:
        """Note the end of a choice."""
        self._left -= 1
        if not self._left:
            self._release()
