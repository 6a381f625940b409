"""Measurements for policies, kept by a host that has no others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from vsched.policy.measured import (
    WINDOW,
    EncodeTime,
    EndTime,
    FirstTokenTime,
    StepTime,
    SwapTime,
)


class HostMeasured:
    """`vsched.policy.measured.Measured` of a host without swaps and without an encode stage."""

    swaps: Sequence[SwapTime] = ()
    encodes: Sequence[EncodeTime] = ()
    embedding_hits = 0
    embedding_misses = 0

    def __init__(
        self,
        *,
        blocks_total: int = 0,
        blocks_free: Callable[[], int] = lambda: 0,
        tokens_running: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Keep the latest times; the host computes the blocks and tokens when they are read."""
        self._steps: deque[StepTime] = deque(maxlen=WINDOW)
        self._first_tokens: deque[FirstTokenTime] = deque(maxlen=WINDOW)
        self._ends: deque[EndTime] = deque(maxlen=WINDOW)
        self.blocks_total = blocks_total
        self.blocks_cached = 0
        self.tokens_prefilled = self.tokens_cached = 0
        self._blocks_free, self._tokens_running = blocks_free, tokens_running

    @property
    def steps(self) -> Sequence[StepTime]:
        return tuple(self._steps)

    @property
    def first_tokens(self) -> Sequence[FirstTokenTime]:
        return tuple(self._first_tokens)

    @property
    def ends(self) -> Sequence[EndTime]:
        return tuple(self._ends)

    @property
    def blocks_held(self) -> int:
        return self.blocks_total - self._blocks_free()

    @property
    def tokens_running(self) -> Mapping[str, int]:
        return MappingProxyType(self._tokens_running())

    def note_step(self, step: StepTime) -> None:
        """Note a step."""
        self._steps.append(step)
        self.tokens_prefilled += step.prefill_tokens

    def note_first_token(self, one: FirstTokenTime) -> None:
        """Note the first token of a request."""
        self._first_tokens.append(one)

    def note_end(self, one: EndTime) -> None:
        """Note the end of a request by a stop condition or its length."""
        self._ends.append(one)
