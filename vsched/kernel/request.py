"""A request inside the kernel, the table of live requests, and the hashes of KV blocks for the prefix cache."""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import starmap
from struct import Struct, pack
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from vsched.kernel.decisions import RequestData
from vsched.kernel.limits import SchedulerLimits
from vsched.policy import Draft
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.types import FinishReason, ItemPlace, MediaItem, Request

if TYPE_CHECKING:
    Int32Array: TypeAlias = array[int]
else:
    Int32Array = array
    """`array` takes type arguments from Python 3.12 on, and annotations are evaluated at run time."""

_HASHER = blake2b(digest_size=16)
_PLACE = Struct("<qq")


def chain_hashes(
    tokens: array[int],
    items: Sequence[MediaItem],
    *,
    block_size: int,
    parent: bytes,
    start_block: int = 0,
) -> list[bytes]:
    """Return the hashes of the full blocks of `tokens` from `start_block` on; each covers all blocks before it.

    `parent` is the hash of the block before, or a root. The block where an item begins includes its digest, position
    and length, because all placeholders have the same token id; later blocks include them through the chain. It
    includes its metadata, kept rows and attention spans, too: the same frames at another time, or pruned otherwise,
    have other keys and values.
    """
    width = block_size * tokens.itemsize
    stop_block = len(tokens) // block_size
    data = memoryview(tokens)[start_block * block_size : stop_block * block_size].tobytes()
    beginning: dict[int, bytes] = {}
    for item in items:
        block, place = divmod(item.offset, block_size)
        at = (block - start_block) * width
        beginning[at] = beginning.get(at, b"") + b"".join(
            (item.key, _PLACE.pack(place, item.tokens), item.metadata, _ranges(item))
        )
    hashes: list[bytes] = []
    fresh = _HASHER.copy  # copying a hasher takes half as long as creating one
    for at in range(0, len(data), width):
        hasher = fresh()
        hasher.update(parent + data[at : at + width])
        if at in beginning:
            hasher.update(beginning[at])
        parent = hasher.digest()
        hashes.append(parent)
    return hashes


def _ranges(item: MediaItem) -> bytes:
    kept = b"".join(starmap(_PLACE.pack, item.kept))
    if item.attention is None:
        return kept
    spans = ((start - item.offset, stop - item.offset) for start, stop in item.attention)
    return kept + b"attention" + b"".join(starmap(_PLACE.pack, spans))


def root_hash(cache_salt: str, adapter: int = 0) -> bytes:
    """Return the parent of the first block of a sequence; different salts or adapters share nothing."""
    of_adapter = adapter.to_bytes(8, "little") if adapter else b""
    return blake2b(
        cache_salt.encode(), digest_size=16, salt=of_adapter, person=b"vsched.prefix"
    ).digest()


def choices_root(number: int) -> bytes:
    """Return the parent of blocks that only the choices of one request share; `number` is that of the first choice."""
    return blake2b(number.to_bytes(8, "little"), digest_size=16, person=b"vsched.answers").digest()


class Phase(enum.StrEnum):
    """Phase of a request; `Scheduler.explain` has the reason.

    The diagram is in `docs/architecture.md`. All ways back are `RequestMoves.enqueue`, which also suspends, and makes a
    further choice wait for its prompt.
    """

    ITEMS = "waiting for embeddings"
    READY = "waiting for a slot"
    PREEMPTED = "preempted, its last step is still in flight"
    SUSPENDED = "waiting for its group to come back"
    PROMPT = "waiting for the prompt that it shares with the first answer"
    PREFILL = "prefilling"
    DECODE = "decoding"


# A member is looked up by the metaclass of the enum, which takes 20 times as long as a global.
ITEMS, READY, PREEMPTED, SUSPENDED, PROMPT, PREFILL, DECODE = Phase


LOSSES_MAX = 2
"""Losses of its group after which a request is a suspect."""


class RequestState(msgspec.Struct, eq=False, kw_only=True):
    """State of an accepted request, as plain values, which a snapshot has as they are.

    Attributes:
        order: Its place in every queue, constant; begins with the arrival number.
        tokens: The prompt, then outputs from before its arrival, its last preemption, or the loss of its group.
        host_bytes: Host memory that it occupies.
        uncached: Tokens still to be computed, as far as known.
        hashes: Hashes of the full blocks of `tokens`.
        root: Parent of the first hash; None if it shares no blocks, and has no hashes.
        first: Number of the first choice of the same request.
        choices: Number of choices of the request; they have consecutive numbers.
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

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """The images of the request."""
        return self.request.items

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
    def wants_prompt_logprobs(self) -> bool:
        """Whether its whole prompt must be computed, cached or not, for its log-probabilities."""
        return self.request.sampling.prompt_logprobs is not None and not self.first_token_ns

    @property
    def is_suspect(self) -> bool:
        """Whether it may have caused losses of its group; no two suspects run together."""
        return self.losses >= LOSSES_MAX

    @property
    def length_max(self) -> int:
        """Maximum number of its tokens."""
        return self.prompt_length + self.request.sampling.max_tokens

    def reach(self, start: int, limits: SchedulerLimits) -> int:
        """Return the furthest end of the next chunk from `start`; items before it have to be encoded."""
        stop = min(len(self.tokens), start + limits.chunk_tokens)
        atom = self.cut_atom(stop, limits)
        return stop if atom is None else atom[1]

    def cut_atom(self, stop: int, limits: SchedulerLimits) -> tuple[int, int] | None:
        """Return the atom, positions that attend to each other, that a chunk end at `stop` would cut."""
        if limits.prompt_atomic:
            return (0, self.prompt_length) if 0 < stop < self.prompt_length else None
        if limits.item_atomic:
            for item in self.items:
                for first, end in item.atoms if item.offset < stop < item.end else ():
                    if first < stop < end:
                        return first, end
        return None

    def extend_hashes(self, block_size: int) -> None:
        """Compute missing hashes of full blocks, if blocks can be shared."""
        if self.root is None:
            return
        self.hashes += chain_hashes(
            self.tokens,
            self.items,
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


Counted = TypeVar("Counted", bound=Hashable)


class RequestTable(Restorable):
    """The live requests of a scheduler.

    Attributes:
        live: The requests by number, oldest first.
        arrivals: Number of the latest request.
        live_bytes: Host memory of all of them.
        finished: Number of ended requests by reason.
        refused: Number of refused requests by code.
        tenants: Number of live requests by tenant.
        priorities: Number of live requests by priority.
        expiries: Deadlines for the first step, and request numbers, in order.
    """

    live: Saved[dict[int, RequestState]]
    finished: Saved[dict[str, int]]
    refused: Saved[dict[str, int]]
    expiries: Saved[deque[tuple[int, int]]]
    arrivals: Saved[int] = 0

    def __init__(self, waiting_ns: int) -> None:
        """Create an empty table; `waiting_ns` is the limit for the wait for the first step, 0 for none."""
        self.live = {}
        self.live_bytes = 0
        self.finished = {reason.value: 0 for reason in FinishReason}
        self.refused = {}
        self.tenants: dict[str, int] = {}
        self.priorities: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self._waiting_ns = waiting_ns
        self.expiries = deque()

    def add(self, state: RequestState) -> None:
        """Add a request, or one of its choices."""
        request = state.request
        self.arrivals += 1
        assert state.number == self.arrivals, "a number was left out"
        self.live[state.number] = state
        self.live_bytes += state.host_bytes
        self._numbers[request.request_id] = state.number
        self._count(request, 1)
        if self._waiting_ns:
            self.expiries.append((state.submitted_ns + self._waiting_ns, state.number))

    def choices_with(self, state: RequestState) -> list[RequestState]:
        """Return the live choices of the same request, in order."""
        numbers = range(state.first, state.first + state.choices)
        return [self.live[number] for number in numbers if number in self.live]

    def remove(self, state: RequestState, reason: FinishReason) -> None:
        """Remove a request that ended."""
        self.live_bytes -= state.host_bytes
        del self.live[state.number]
        del self._numbers[state.request.request_id]
        self._count(state.request, -1)
        self.finished[reason.value] += 1

    def _count(self, request: Request, change: int) -> None:
        add_to(self.tenants, request.tenant, change)
        add_to(self.priorities, request.priority, change)

    def find(self, request_id: str) -> RequestState | None:
        """Return the live request of this id; None when there is none."""
        number = self._numbers.get(request_id)
        return None if number is None else self.live[number]

    def get_all(self, numbers: Iterable[int]) -> list[RequestState]:
        """Return live requests by their numbers."""
        return [self.live[number] for number in numbers]

    def rebuild(self) -> None:
        for one in self.live.values():
            self._numbers[one.request.request_id] = one.number
            self.live_bytes += one.host_bytes
            self._count(one.request, 1)


def add_to(counts: dict[Counted, int], key: Counted, change: int) -> None:
    """Change the count of a key; keys with a count of 0 are removed."""
    count = counts.get(key, 0) + change
    if count:
        counts[key] = count
    else:
        del counts[key]
