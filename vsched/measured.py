"""What a policy can know of time: measured where the work was done, and told to the kernel by events.

All times are in nanoseconds, and points in time are those of `now_ns` in the views. The latest entries are kept, the
oldest first: `WINDOW` of each kind. A policy that looks at each entry once remembers the `ended_ns` of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

WINDOW = 64
"""Entries that are kept of each kind, of each replica; the one that was measured first is forgotten first."""


class StepTime(msgspec.Struct, frozen=True):
    """One generate step.

    Attributes:
        ended_ns: When its result came.
        busy_ns: How long the ranks worked on it, swaps not counted; 0 where they did not say.
        gap_ns: Since the result before it, or, where nothing was in flight, since it was decided. It is what the
            requests that decode waited for this token (ITL).
        decodes: Requests that decoded in it.
        prefill_tokens: Prompt tokens that were computed in it, over all requests.
        pairs: Pairs of such a token and one before it, which attention visited: the cost of long contexts.
        drafted: Tokens that were drafted in it, for all requests.
        accepted: Those of them that proved right: tokens that it brought besides one for each decode.
    """

    ended_ns: int
    busy_ns: int = 0
    gap_ns: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    pairs: float = 0.0
    drafted: int = 0
    accepted: int = 0


class SwapTime(msgspec.Struct, frozen=True):
    """The copies of KV blocks to host memory and back that one step began with.

    Attributes:
        ended_ns: When the result of the step came.
        took_ns: How long they took on the ranks. Where a device makes them by itself, how long they took is not known,
            and there is no entry.
        blocks: Copies, of a block each.
    """

    ended_ns: int
    took_ns: int
    blocks: int


class EncodeTime(msgspec.Struct, frozen=True):
    """One encode step.

    Attributes:
        ended_ns: When its result came.
        took_ns: From its decision to its result, pauses for generate steps included.
        items: Images in it.
        tokens: Encoder output tokens of all of them.
    """

    ended_ns: int
    took_ns: int
    items: int
    tokens: int

    @property
    def ns_per_token(self) -> float:
        """Time per encoder output token."""
        return self.took_ns / max(self.tokens, 1)


class FirstTokenTime(msgspec.Struct, frozen=True):
    """A request whose first token came.

    Attributes:
        ended_ns: When it came.
        ttft_ns: From its arrival to then.
        items_ns: Of that, until its first chunk had its embeddings.
        queued_ns: Of that, from then until it was given a slot.
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Those that the prefix cache had.
        items: Images in it.
        priority: The request's own.
        tenant: Whose it is.
        target_ns: When the token was due; None without a target.
    """

    ended_ns: int
    ttft_ns: int
    items_ns: int
    queued_ns: int
    prompt_tokens: int
    cached_tokens: int = 0
    items: int = 0
    priority: int = 0
    tenant: str = ""
    target_ns: int | None = None


class EndTime(msgspec.Struct, frozen=True):
    """A request that came to its end, by a stop or by its length.

    Attributes:
        ended_ns: When it did.
        total_ns: From its arrival to then.
        prompt_tokens: Tokens of its prompt.
        output_tokens: Tokens that it got.
        preemptions: How often it was preempted.
        tenant: Whose it was.
    """

    ended_ns: int
    total_ns: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int = 0
    tenant: str = ""


class Measured(Protocol):
    """What was measured, of one replica or of several; to be read during the call only.

    A list is made when it is asked for, so one that no policy looks at costs nothing.
    """

    @property
    def steps(self) -> Sequence[StepTime]:
        """The latest generate steps."""
        ...

    @property
    def swaps(self) -> Sequence[SwapTime]:
        """The latest steps that swapped blocks."""
        ...

    @property
    def encodes(self) -> Sequence[EncodeTime]:
        """The latest encode steps, of all encode replicas."""
        ...

    @property
    def first_tokens(self) -> Sequence[FirstTokenTime]:
        """The requests that got their first token last."""
        ...

    @property
    def ends(self) -> Sequence[EndTime]:
        """The requests that ended last."""
        ...

    @property
    def blocks_total(self) -> int:
        """KV blocks."""
        ...

    @property
    def blocks_held(self) -> int:
        """KV blocks that running requests hold."""
        ...

    @property
    def blocks_cached(self) -> int:
        """KV blocks that only the prefix cache holds."""
        ...

    @property
    def tokens_running(self) -> Mapping[str, int]:
        """Tokens of running requests that are computed, prompts and outputs, by tenant."""
        ...

    @property
    def tokens_prefilled(self) -> int:
        """Prompt tokens computed since the start."""
        ...

    @property
    def tokens_cached(self) -> int:
        """Prompt tokens that the prefix cache had, since the start."""
        ...

    @property
    def embedding_hits(self) -> int:
        """Embeddings that the cache had when they were needed, since the start."""
        ...

    @property
    def embedding_misses(self) -> int:
        """Embeddings that it had not."""
        ...


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """`Measured` as plain values: for tests, and what a view has where nothing was measured."""

    steps: Sequence[StepTime] = ()
    swaps: Sequence[SwapTime] = ()
    encodes: Sequence[EncodeTime] = ()
    first_tokens: Sequence[FirstTokenTime] = ()
    ends: Sequence[EndTime] = ()
    blocks_total: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    tokens_running: Mapping[str, int] = {}
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    embedding_hits: int = 0
    embedding_misses: int = 0


NOTHING_MEASURED = Measurements()
