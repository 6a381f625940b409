"""Log-probabilities of a request's prompt tokens, collected chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vsched.wire import PromptPiece


class PromptToken(NamedTuple):
    """A token of a prompt: its log-probability and rank (1 is the most likely), and alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PromptReport:
    """The log-probabilities of a prompt, with `top` alternatives per token; the first token has none.

    Pieces arrive in order. A request that is computed again, because its group was lost, repeats known pieces.
    """

    def __init__(self, token_ids: Sequence[int], top: int) -> None:
        self.top = top
        self._token_ids = token_ids
        self._pieces: list[PromptPiece] = []
        self._known = 1
        self._waiting: list[Callable[[], object]] = []

    @property
    def values(self) -> int:
        """Number of log-probabilities of the complete report."""
        return len(self._token_ids) * (1 + self.top)

    @property
    def is_whole(self) -> bool:
        """True if the log-probabilities of all prompt tokens are known."""
        return self._known >= len(self._token_ids)

    def when_whole(self, call: Callable[[], object]) -> None:
        """Call a function once the report is complete."""
        self._waiting.append(call)

    def take(self, piece: PromptPiece) -> None:
        """Add the piece of a chunk.

        Raises:
            ValueError: When there is a gap before it.
        """
        if piece.start > self._known:
            raise ValueError(f"position {piece.start} of a prompt is told of before {self._known}")
        end = piece.start + len(piece.logprobs) // 4
        if end > self._known:
            self._pieces.append(piece)
            self._known = end
        if self.is_whole:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def tokens(self) -> Iterator[PromptToken]:
        """Yield the prompt tokens from the second on.

        Raises:
            ValueError: When the report is incomplete.
        """
        if not self.is_whole:
            raise ValueError(f"{self._known} of {len(self._token_ids)} prompt tokens are known")
        position = 1
        for piece in self._pieces:
            logprobs = np.frombuffer(piece.logprobs, np.float32)
            ranks = np.frombuffer(piece.ranks, np.int32)
            ids = np.frombuffer(piece.top_ids, np.int32).reshape(len(ranks), -1)
            top = np.frombuffer(piece.top_logprobs, np.float32).reshape(len(ranks), -1)
            for row in range(position - piece.start, len(ranks)):
                best = zip(ids[row].tolist(), top[row].tolist(), strict=True)
                token_id = self._token_ids[position]
                yield PromptToken(token_id, float(logprobs[row]), int(ranks[row]), list(best))
                position += 1
