"""Measured times from events, for policies.

A note for each step is a tuple in a bounded list, which is cheap. Views for policies are built from these lists and
from counters when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol, TypeVar

import msgspec

from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.request import RequestState
from vsched.policy.measured import WINDOW, EncodeTime, EndTime, FirstTokenTime, StepTime, SwapTime
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.types import FinishReason

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
NotedStep = tuple[int, int, int, tuple[int, int, float], tuple[int, int]]
"""The first fields of a `StepTime`; decodes, prefill tokens and pairs; drafts, and accepted drafts."""


class Measures(Restorable):
    """The times of a generate group.

    Attributes:
        since_ns: Time of its latest result, or of a step that was decided with nothing else in flight.
    """

    steps: Saved[deque[NotedStep]]
    first_tokens: Saved[deque[FirstTokenTime]]
    ends: Saved[deque[EndTime]]
    swaps: Saved[deque[SwapTime]]
    since_ns: Saved[int] = 0

    def __init__(self) -> None:
        self.steps = deque(maxlen=WINDOW)
        self.first_tokens = deque(maxlen=WINDOW)
        self.ends = deque(maxlen=WINDOW)
        self.swaps = deque(maxlen=WINDOW)

    def note_first_token(self, state: RequestState) -> None:
        """Note the first token of a request."""
        arrived_ns, request = state.submitted_ns, state.request
        target_ms = request.ttft_target_ms
        self.first_tokens.append(
            FirstTokenTime(
                ended_ns=state.first_token_ns,
                ttft_ns=state.first_token_ns - arrived_ns,
                items_ns=state.items_ready_ns - arrived_ns,
                queued_ns=state.admitted_ns - state.items_ready_ns,
                prompt_tokens=state.prompt_length,
                cached_tokens=state.cached_tokens,
                items=len(state.items),
                priority=request.priority,
                tenant=request.tenant,
                target_ns=None if target_ms is None else arrived_ns + target_ms * 1_000_000,
            )
        )

    def note_end(self, state: RequestState, reason: FinishReason, now_ns: int) -> None:
        """Note the end of a request, whose tokens include all outputs."""
        if reason in COMPLETE:
            self.ends.append(
                EndTime(
                    ended_ns=now_ns,
                    total_ns=now_ns - state.submitted_ns,
                    prompt_tokens=state.prompt_length,
                    output_tokens=len(state.tokens) - state.prompt_length,
                    preemptions=state.preemptions,
                    tenant=state.request.tenant,
                )
            )


class _Generates(Protocol):
    measures: Measures

    def running_tokens(self) -> Iterable[tuple[str, int]]: ...

    def counts(self) -> Mapping[str, int]: ...


class MeasuredGroups(msgspec.Struct, frozen=True, eq=False):
    """`vsched.policy.measured.Measured` of some generate groups and the encode stage, always up to date."""

    _groups: Sequence[_Generates]
    _encodes: deque[EncodeTime]
    _cache: EmbeddingCache

    def __repr__(self) -> str:
        return f"<{len(self.steps)} steps, {len(self.encodes)} encode steps, {len(self.ends)} ends>"

    @property
    def steps(self) -> Sequence[StepTime]:
        noted = (group.measures.steps for group in self._groups)
        return _latest(
            [
                StepTime(ended_ns, busy_ns, gap_ns, *of, *drafts)
                for ended_ns, busy_ns, gap_ns, of, drafts in steps
            ]
            for steps in noted
        )

    @property
    def swaps(self) -> Sequence[SwapTime]:
        return _latest(group.measures.swaps for group in self._groups)

    @property
    def encodes(self) -> Sequence[EncodeTime]:
        return tuple(self._encodes)

    @property
    def first_tokens(self) -> Sequence[FirstTokenTime]:
        return _latest(group.measures.first_tokens for group in self._groups)

    @property
    def ends(self) -> Sequence[EndTime]:
        return _latest(group.measures.ends for group in self._groups)

    def _sum(self, name: str) -> int:
        return sum(group.counts()[name] for group in self._groups)

    @property
    def blocks_total(self) -> int:
        return self._sum("blocks_total")

    @property
    def blocks_held(self) -> int:
        return self._sum("blocks_held")

    @property
    def blocks_cached(self) -> int:
        return self._sum("blocks_cached")

    @property
    def tokens_running(self) -> Mapping[str, int]:
        tokens: dict[str, int] = {}
        for group in self._groups:
            for tenant, count in group.running_tokens():
                tokens[tenant] = tokens.get(tenant, 0) + count
        return MappingProxyType(tokens)

    @property
    def tokens_prefilled(self) -> int:
        return self._sum("tokens_prefilled")

    @property
    def tokens_cached(self) -> int:
        return self._sum("tokens_cached")

    @property
    def embedding_hits(self) -> int:
        return self._cache.statistics()["cache_hits"]

    @property
    def embedding_misses(self) -> int:
        return self._cache.statistics()["cache_misses"]


AnyTime = TypeVar("AnyTime", StepTime, SwapTime, FirstTokenTime, EndTime)


def _latest(windows: Iterable[Iterable[AnyTime]]) -> Sequence[AnyTime]:
    """Return the latest of all entries, oldest first."""
    merged = [one for window in windows for one in window]
    merged.sort(key=attrgetter("ended_ns"))
    return tuple(merged[-WINDOW:])
