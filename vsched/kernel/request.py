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
    """`array` takes type arguments from Python 3.12 on, and annotations are evaluated at run time."""


class Phase(enum.StrEnum):
    """Phase of a request; `Scheduler.explain` has the reason."""

    ITEMS = "waiting for embeddings"
    READY = "waiting for a slot"
    PREEMPTED = "preempted, its last step is still in flight"
    SUSPENDED = "waiting for its group to come back"
    PROMPT = "waiting for the prompt that it shares with the first answer"
    PREFILL = "prefilling"
    DECODE = "decoding"


# A member is looked up by the metaclass of the enum, which takes 20 times as long as a global.
ITEMS, READY, PREEMPTED, SUSPENDED, PROMPT, PREFILL, DECODE = Phase


class RequestState(msgspec.Struct, eq=False, kw_only=True):
    """State of an accepted request, as plain values, which a snapshot has as they are.

    Attributes:
        order: Its place in every queue, constant; begins with the arrival number.
        items: The request's items, with their keys in the embedding cache.
        tokens: The prompt, then outputs from before its arrival, its last preemption, or the loss of its group.
        host_bytes: Host memory that it occupies.
        uncached: Tokens still to be computed, as far as known.
        hashes: Hashes of the full blocks of `tokens`.
        root: Parent of the first hash; None if it shares no blocks, and has no hashes.
        first: Number of the first choice of the same request.
        answers: Number of choices of the request; they have consecutive numbers.
        computed: Tokens whose KV is decided (sent or done), while it has a slot.
        branch: End of the cached blocks when it joined, for a model with a recurrent state.
        first_step: The step that yields its first token since it joined; -1 before its last chunk is decided.
        decoding_since: `first_step` minus the tokens gained from drafts since: the step in which it would have begun to
            decode at one token a step.
        bucket: The steps, modulo the block size, in which it needs a block while it decodes; -1 if its steps may yield
            several tokens (see `vsched.kernel.generate.drafts`).
        granted: Its draft grant; None before the drafting policy was called.
        requested_in: The step before which the drafting policy is called again; 0 for never.
        unsettled: Maximum number of tokens that drafts in flight can add.
        drafted: Tokens drafted under its grant.
        accepted: Accepted tokens among them.
        wanted: Indices of its items that are claimed in the embedding cache and not consumed.
        known: Whether the generate ranks have its data.
        losses: Times that its group was lost while it ran there; reset once it is cleared of suspicion.
        replica: Index of its generate group; -1 before it has one.
        advanced_ns: Time of its latest chunk.
        took_slot: Whether another request was preempted for its slot.
        yielded_ns: Time at which it was preempted for a waiting request; 0 while it is not.
        away_ns: Time that it was without a slot because of such preemptions, until it joined again.
        counted: Its tokens in the load of its group, without those of decode steps.
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
    choices: int = 1
    blocks: list[int] = []
    slot: int = -1
    bucket: int = 0
    computed: int = 0
    branch: int = 0
    first_step: int = -1
    decoding_since: int = 0
    granted: Draft | None = None
    requested_in: int = 0
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
    took_slot: bool = False
    yielded_ns: int = 0
    away_ns: int = 0

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
        choices: int = 1,
        emitted: Sequence[int] = (),
    ) -> RequestState:
        """Return the state of a new request.

        `scope` is from the encoding policy. Further choices share the items of the first, whose memory counts once.
        `emitted` are outputs from an earlier engine.
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
            choices=choices,
            submitted_ns=now_ns,
            uncached=len(request.prompt_token_ids) + len(emitted),
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of the submitted prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def target_ns(self) -> int | None:
        """Deadline of its first token; None without a target, or after the first token."""
        target_ms = self.request.ttft_target_ms
        if target_ms is None or self.first_token_ns:
            return None
        return self.submitted_ns + target_ms * 1_000_000

    @property
    def tells_prompt(self) -> bool:
        """Whether its whole prompt must be computed, cached or not, for its log-probabilities."""
        return self.request.sampling.prompt_logprobs is not None and not self.first_token_ns

    @property
    def length_max(self) -> int:
        """Maximum number of its tokens."""
        return self.prompt_length + self.request.sampling.max_tokens

    def extend_hashes(self, block_size: int) -> None:
        """Compute missing hashes of full blocks, if blocks can be shared."""
        if self.root is None:
            return
        self.hashes += chain_hashes(
            self.tokens,
            self.request.items,  # by content, which determines KV, whatever the keys of embeddings are
            block_size=block_size,
            parent=self.hashes[-1] if self.hashes else self.root,
            start_block=len(self.hashes),
        )

    def data(self) -> RequestData:
        """Return the data that ranks need."""
        return RequestData(
            tokens=self.tokens.tobytes(),
            prompt_length=self.prompt_length,
            items=[
                ItemPlace(
                    item.offset,
                    item.tokens,
                    item.metadata,
                    item.spans,
                    item.kept,
                    item.attention,
                )
                for item in self.items
            ],
            sampling=self.request.sampling,
            stop_token_ids=self.stop_token_ids,
            adapter=self.request.adapter,
        )


def int32(numbers: Sequence[int]) -> array[int]:
    """Return numbers as an array; packing all at once takes half as long as one by one."""
    if isinstance(numbers, array):
        return array("i", numbers)
    return array("i", pack(f"{len(numbers)}i", *numbers))


def host_bytes(request: Request, *, items: bool = True) -> int:
    """Return the host memory of a request, in bytes: its tokens, its grammar, and the extents of its items."""
    held = request.items if items else ()
    extents = sum([item.extent.size for item in held if item.extent is not None])
    return 4 * len(request.prompt_token_ids) + len(request.sampling.grammar) + extents


def keyed_by_set(items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """Return the items with keys that depend on all images of the request."""
    whole = blake2b(
        b"".join(item.key for item in items), digest_size=32, person=b"vsched.set"
    ).digest()
    return tuple(
        msgspec.structs.replace(
            item, key=blake2b(whole + index.to_bytes(4, "little"), digest_size=32).digest()
        )
        for index, item in enumerate(items)
    )
