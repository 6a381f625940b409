"""A request inside the kernel."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import msgspec

from vsched.kernel.decisions import ItemPlace, RequestData
from vsched.kernel.generate.blocks import chain_hashes, root_hash
from vsched.types import MediaItem, Request


class Phase(enum.StrEnum):
    """Where a request is; `Scheduler.explain` says why."""

    ITEMS = "waiting for embeddings"
    READY = "waiting for a slot"
    SETTLING = "preempted, its last step is still out"
    PARKED = "waiting for its group to come back"
    PREFILL = "prefilling"
    DECODE = "decoding"


class RequestState:
    """All that the kernel knows of one accepted request.

    Attributes:
        order: Its place in line for life: arrival number first.
        tokens: Prompt, then the outputs of earlier lives (before a preemption or a restart).
        hashes: Block hashes of the full blocks of `tokens`.
        computed: Tokens whose KV is decided (sent or done); meaningful while it has a slot.
        first_step: The step that yields the first token of this life; -1 before its last chunk is decided.
        decoding_since: What `first_step` was set to when it began to decode.
        bucket: Which steps, modulo the block size, give it a block while it decodes.
        wanted: Indices of its items that it asked the encode stage for and has not consumed.
        items: The request's items, under the keys that the embedding cache knows them by.
        host_bytes: Host memory that it keeps occupied.
        known: Whether the generate ranks hold its data.
        losses: How often its group went down while it ran there; less, once it was seen not to be the cause.
        home: Index of its generate group; -1 before it has one.
        counted: Tokens of it that its group counts as load, besides those it is decoding.
    """

    __slots__ = (
        "admitted_ns",
        "blocks",
        "bucket",
        "cached_tokens",
        "computed",
        "counted",
        "decoding_since",
        "encoded_items",
        "first_step",
        "first_token_ns",
        "hashes",
        "home",
        "host_bytes",
        "items",
        "items_ready_ns",
        "known",
        "losses",
        "number",
        "order",
        "phase",
        "preemptions",
        "request",
        "slot",
        "stop_token_ids",
        "submitted_ns",
        "tokens",
        "uncached",
        "wanted",
    )

    def __init__(
        self,
        request: Request,
        number: int,
        stop_token_ids: tuple[int, ...],
        now_ns: int,
        *,
        scope: str = "item",
    ) -> None:
        self.request = request
        self.items = request.items if scope == "item" else keyed_by_set(request.items)
        self.host_bytes = host_bytes(request)
        self.number = number
        self.order = (number, 0)
        self.stop_token_ids = stop_token_ids
        self.phase = Phase.ITEMS
        self.tokens = int32(request.prompt_token_ids)
        self.hashes: list[bytes] = []
        self.blocks: list[int] = []
        self.slot = -1
        self.bucket = 0
        self.computed = 0
        self.uncached = len(self.tokens)
        self.first_step = -1
        self.decoding_since = 0
        self.wanted: set[int] = set()
        self.known = False
        self.losses = 0
        self.home = -1
        self.counted = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self.encoded_items = 0
        self.submitted_ns = now_ns
        self.items_ready_ns = 0
        self.admitted_ns = 0
        self.first_token_ns = 0

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

    def extend_hashes(self, block_size: int) -> None:
        """Compute the hashes of full blocks that it does not have yet."""
        self.hashes += chain_hashes(
            self.tokens,
            self.request.items,  # by content: what KV depends on, however embeddings are cached
            block_size=block_size,
            parent=self.hashes[-1] if self.hashes else root_hash(self.request.cache_salt),
            start_block=len(self.hashes),
        )

    def data(self) -> RequestData:
        """Return what ranks must hold of it."""
        return RequestData(
            tokens=self.tokens.tobytes(),
            prompt_length=self.prompt_length,
            items=[ItemPlace(item.offset, item.tokens, item.grid) for item in self.items],
            sampling=self.request.sampling,
            stop_token_ids=self.stop_token_ids,
        )


def int32(numbers: Sequence[int]) -> array[int]:
    """Return numbers as an array; packed as a whole, for an array takes twice as long over them one by one."""
    if isinstance(numbers, array):
        return array("i", numbers)
    return array("i", pack(f"{len(numbers)}i", *numbers))


def host_bytes(request: Request) -> int:
    """Return the bytes of host memory that a request occupies: its tokens, and its items' pixels."""
    pixels = sum(item.pixels.size for item in request.items if item.pixels is not None)
    return 4 * len(request.prompt_token_ids) + pixels


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


class ReadyEntry:
    """A request as an admission policy sees it."""

    __slots__ = ("_block_size", "order", "state")

    def __init__(self, state: RequestState, block_size: int) -> None:
        self.state = state
        self.order = state.order
        self._block_size = block_size

    @property
    def tokens(self) -> int:
        """Tokens still to be computed, as far as known."""
        return self.state.uncached

    @property
    def blocks(self) -> int:
        """KV blocks of all its known tokens."""
        return -(-len(self.state.tokens) // self._block_size)

    @property
    def priority(self) -> int:
        """The request's priority."""
        return self.state.request.priority

    @property
    def arrived_ns(self) -> int:
        """When it was submitted."""
        return self.state.submitted_ns

    @property
    def target_ns(self) -> int | None:
        """When its first token is due."""
        return self.state.target_ns

    def __repr__(self) -> str:
        return f"<request {self.state.number}: {self.tokens} tokens, {self.blocks} blocks>"
