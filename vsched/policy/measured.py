"""Timings that policies can read: measured by ranks and passed to the kernel in events.

All times are in nanoseconds, and timestamps use the clock of `now_ns` in the views. The latest `WINDOW` entries of each
kind are kept, the oldest first. A policy that reads each entry once can remember the `ended_ns` of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

WINDOW = 64
"""Entries kept of each kind for each replica; the oldest are dropped first."""


class StepTime(msgspec.Struct, frozen=True):
    """One generate step.

    Attributes:
        ended_ns: Time at which its result arrived.
        busy_ns: Time that the ranks worked on it, without swaps; 0 if they did not report it.
        gap_ns: Time since the previous result or, if nothing was in flight, since its decision. It is the inter-token
            latency (ITL) of the decoding requests.
        decodes: Requests that decoded in it.
        prefill_tokens: Prompt tokens computed in it, over all requests.
        pairs: Pairs of a prompt token and an earlier token that attention visited: the cost of long contexts.
        drafted: Draft tokens proposed in it, over all requests.
        accepted: Draft tokens accepted: the output tokens in excess of one per decode.
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
    """Copies of KV blocks to host memory and back at the start of a step.

    Attributes:
        ended_ns: Time at which the step's result arrived.
        took_ns: Duration on the ranks. If a device copies asynchronously, the duration is unknown and there is no
            entry.
        blocks: Number of block copies.
    """

    ended_ns: int
    took_ns: int
    blocks: int


class EncodeTime(msgspec.Struct, frozen=True):
    """One encode step.

    Attributes:
        ended_ns: Time at which its result arrived.
        took_ns: Time from its decision to its result, including pauses for generate steps.
        items: Images in it.
        tokens: Encoder output tokens of all of them.
    """

    ended_ns: int
    took_ns: int
    items: int
    tokens: int


class FirstTokenTime(msgspec.Struct, frozen=True):
    """A request that produced its first token.

    Attributes:
        ended_ns: Time of the first token.
        ttft_ns: Time from arrival to the first token.
        items_ns: The part of it until the embeddings for the first chunk were there.
        queued_ns: The part of it from then until the request got a slot.
        prompt_tokens: Tokens in its prompt.
        cached_tokens: Prompt tokens found in the prefix cache.
        items: Images in it.
        priority: Priority of the request.
        tenant: Tenant of the request.
        target_ns: Deadline of the first token; None without a target.
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
    """A request that finished by a stop condition or by its length limit.

    Attributes:
        ended_ns: Time at which it finished.
        total_ns: Time from arrival to the end.
        prompt_tokens: Tokens in its prompt.
        output_tokens: Tokens generated.
        preemptions: Number of preemptions.
        tenant: Tenant of the request.
    """

    ended_ns: int
    total_ns: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int = 0
    tenant: str = ""


class Measured(Protocol):
    """Measurements of one or several replicas, valid only during the policy call.

    Lists are computed on access: an unread list costs nothing. They are empty before the first measurement.

    Attributes:
        steps: The latest generate steps.
        swaps: The latest steps that swapped blocks.
        encodes: The latest encode steps, of all encode groups.
        first_tokens: The latest first tokens.
        ends: The latest finished requests.
        blocks_total: Total number of KV blocks, over all replicas of the view.
        blocks_held: KV blocks held by running requests.
        blocks_cached: KV blocks held only by the prefix cache.
        tokens_running: Computed tokens of running requests, prompt and output, by tenant.
        tokens_prefilled: Prompt tokens computed since the start.
        tokens_cached: Prompt tokens found in the prefix cache since the start.
        embedding_hits: Embedding cache hits since the start.
        embedding_misses: Embedding cache misses since the start.
    """

    @property
    def steps(self) -> Sequence[StepTime]: ...
    @property
    def swaps(self) -> Sequence[SwapTime]: ...
    @property
    def encodes(self) -> Sequence[EncodeTime]: ...
    @property
    def first_tokens(self) -> Sequence[FirstTokenTime]: ...
    @property
    def ends(self) -> Sequence[EndTime]: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_held(self) -> int: ...
    @property
    def blocks_cached(self) -> int: ...
    @property
    def tokens_running(self) -> Mapping[str, int]: ...
    @property
    def tokens_prefilled(self) -> int: ...
    @property
    def tokens_cached(self) -> int: ...
    @property
    def embedding_hits(self) -> int: ...
    @property
    def embedding_misses(self) -> int: ...


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """`Measured` with plain values: for tests, and as the default of views without measurements."""

    steps: Sequence[StepTime] = ()
    swaps: Sequence[SwapTime] = ()
    encodes: Sequence[EncodeTime] = ()
    first_tokens: Sequence[FirstTokenTime] = ()
    ends: Sequence[EndTime] = ()
    blocks_total: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    tokens_running: Mapping[str, int] = MappingProxyType({})
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    embedding_hits: int = 0
    embedding_misses: int = 0
