"""A request inside the kernel."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from vsched.kernel.decisions import RequestData
from vsched.kernel.prefix_hashes import chain_hashes
from vsched.policy import Draft
from vsched.types import ItemPlace, MediaItem, Request

if TYPE_CHECKING:
    Int32Array: TypeAlias = array[int]
else:
    Int32Array = array
    """`array` takes type arguments from Python 3.12 on, and msgspec evaluates the annotations of a struct."""


class Phase(enum.StrEnum):
    """Where a request is; `Scheduler.explain` says why."""

    ITEMS = "waiting for embeddings"
    READY = "waiting for a slot"
    PREEMPTED = "preempted, its last step is still in flight"
    SUSPENDED = "waiting for its group to come back"
    PROMPT = "waiting for the prompt that it shares with the first answer"
    PREFILL = "prefilling"
    DECODE = "decoding"


class RequestState(msgspec.Struct, eq=False, kw_only=True):
    """All that the kernel knows of one accepted request: plain values, so that a snapshot holds it as it is.

    Attributes:
        order: Its place in every queue, for life: arrival number first.
        items: The request's items, under the keys that the embedding cache knows them by.
        tokens: Prompt, then the outputs from before it arrived, was last preempted, or its group was lost.
        host_bytes: Host memory that it keeps occupied.
        uncached: Tokens still to be computed, as far as known.
        hashes: Block hashes of the full blocks of `tokens`.
        root: Parent of the first of them; None where it shares its blocks with nobody, and has no hashes.
        first: Number of the first answer to the same request; its own where it is that, or the only one.
        answers: How many there are; their numbers are in a row.
        computed: Tokens whose KV is decided (sent or done); meaningful while it has a slot.
        branch: Where the blocks ended that were cached when it joined, of a model with a state.
        first_step: The step that yields its first token since it joined; -1 before its last chunk is decided.
        decoding_since: What `first_step` was set to when it began to decode, less the tokens that drafts brought since:
            the step that it would have begun in, had every step brought one token.
        bucket: Which steps, modulo the block size, give it a block while it decodes; -1 where its steps may bring
            several tokens (see `vsched.kernel.generate.drafts`).
        granted: What may be drafted for it; None before its drafting policy was asked.
        asked_in: The step before which that policy is asked again; 0 for never.
        unsettled: Tokens that drafts of steps in flight may bring at most.
        drafted: Tokens drafted for it under its grant, and `accepted` those of them that it was given.
        wanted: Indices of its items that it claimed in the embedding cache and has not consumed.
        known: Whether the generate ranks hold its data.
        losses: How often its group went down while it ran there; 0 again once it was seen not to be the cause.
        replica: Index of its generate group; -1 before it has one.
        advanced_ns: When its latest chunk was decided.
        counted: Tokens of it that its group counts as load, besides those it is decoding.
    """

    request: Request
    number: int
    order: tuple[int, int]
    stop_token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]
    tokens: Int32Array
    host_bytes: int
    submitted_ns: int
    uncached: int
    phase: Phase = Phase.ITEMS
    hashes: list[bytes] = []
    root: bytes | None = None
    first: int = 0
    answers: int = 1
    blocks: list[int] = []
    slot: int = -1
    bucket: int = 0
    computed: int = 0
    branch: int = 0
    first_step: int = -1
    decoding_since: int = 0
    granted: Draft | None = None
    asked_in: int = 0
    unsettled: int = 0
    drafted: int = 0
    accepted: int = 0
    wanted: set[int] = msgspec.field(default_factory=set)
    known: bool = False
    losses: int = 0
    replica: int = -1
    counted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    encoded_items: int = 0
    items_ready_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    advanced_ns: int = 0

    @classmethod
    def arrived(
        cls,
        request: Request,
        number: int,
        stop_token_ids: tuple[int, ...],
        now_ns: int,
        *,
        scope: str = "item",
        root: bytes | None = None,
        first: int = 0,
        answers: int = 1,
        emitted: Sequence[int] = (),
    ) -> RequestState:
        """Return the state of a request that was just accepted; `scope` is that of the encoding policy.

        The items of further answers are those of the first, and count once. `emitted` are outputs that it has already.
        """
        return cls(
            request=request,
            number=number,
            order=(number, 0),
            stop_token_ids=stop_token_ids,
            items=request.items if scope == "item" else keyed_by_set(request.items),
            tokens=int32(request.prompt_token_ids) + int32(emitted),
            host_bytes=host_bytes(request, items=not first or first == number),
            root=root,
            first=first or number,
            answers=answers,
            submitted_ns=now_ns,
            uncached=len(request.prompt_token_ids) + len(emitted),
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt as submitted."""
        return len(self.request.prompt_token_ids)

    @property
    def target_ns(self) -> int | None:
        """When its first token is due; None without a target, or once it came."""
        target_ms = self.request.ttft_target_ms
        if target_ms is None or self.first_token_ns:
            return None
        return self.submitted_ns + target_ms * 1_000_000

    @property
    def tells_prompt(self) -> bool:
        """Whether its prompt has to be computed for what that says of its tokens, cached or not."""
        return self.request.sampling.prompt_logprobs is not None and not self.first_token_ns

    @property
    def length_max(self) -> int:
        """The tokens that it can have at most."""
        return self.prompt_length + self.request.sampling.max_tokens

    def extend_hashes(self, block_size: int) -> None:
        """Compute the hashes of full blocks that it does not have yet, if others may share them."""
        if self.root is None:
            return
        self.hashes += chain_hashes(
            self.tokens,
            self.request.items,  # by content: what KV depends on, however embeddings are cached
            block_size=block_size,
            parent=self.hashes[-1] if self.hashes else self.root,
            start_block=len(self.hashes),
        )

    def data(self) -> RequestData:
        """Return what ranks must hold of it."""
        return RequestData(
            tokens=self.tokens.tobytes(),
            prompt_length=self.prompt_length,
            items=[
                ItemPlace(item.offset, item.tokens, item.metadata, item.spans)
                for item in self.items
            ],
            sampling=self.request.sampling,
            stop_token_ids=self.stop_token_ids,
            adapter=self.request.adapter,
        )


def int32(numbers: Sequence[int]) -> array[int]:
    """Return numbers as an array; packed as a whole, which takes half as long as one by one."""
    if isinstance(numbers, array):
        return array("i", numbers)
    return array("i", pack(f"{len(numbers)}i", *numbers))


def host_bytes(request: Request, *, items: bool = True) -> int:
    """Return the bytes of host memory that a request occupies: its tokens, its grammar, and its items' extents."""
    held = request.items if items else ()
    extents = sum(item.extent.size for item in held if item.extent is not None)
    return 4 * len(request.prompt_token_ids) + len(request.sampling.grammar) + extents


def keyed_by_set(items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """Return items whose keys cover the whole set of images that they are part of."""
    whole = blake2b(
        b"".join(item.key for item in items), digest_size=32, person=b"vsched.set"
    ).digest()
    return tuple(
        msgspec.structs.replace(
            item, key=blake2b(whole + index.to_bytes(4, "little"), digest_size=32).digest()
        )
        for index, item in enumerate(items)
    )
