"""Policies about images: what is encoded, where, and which embedding gives way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from vsched.policy.base import Policy, WaitingEntry
from vsched.policy.measured import NOTHING_MEASURED, Measured

# --- encoding ---------------------------------------------------------------------------------------------------------


class ItemSpan(msgspec.Struct, frozen=True):
    """Where an item lies in its prompt: [start, stop), and whether its embedding is ready."""

    start: int
    stop: int
    ready: bool


class EncodingView(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoding policy sees of one request.

    `[chunk_start, chunk_stop)` is the prefill chunk that comes next; `arriving` is True when the request is new.
    `measured` is of the request's replica, and `state` what the policy remembers, to be changed in place.
    """

    items: Sequence[ItemSpan]
    chunk_start: int
    chunk_stop: int
    chunk_tokens: int
    prompt_tokens: int
    arriving: bool
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None

    @property
    def needed(self) -> tuple[int, ...]:
        """Indices of the items that the chunk reads; they are encoded in any case."""
        start, stop = self.chunk_start, self.chunk_stop
        return tuple(
            [i for i, item in enumerate(self.items) if item.start < stop and item.stop > start]
        )


# --- dispatch ---------------------------------------------------------------------------------------------------------


class EncodeReplica(Protocol):
    """One encode group that takes work. What nobody reads is not worked out.

    `free` says whether it has no batch, and could have one now. Else `items` are the images of its batch, `tokens` the
    encoder output tokens of all of them, and `largest` of the largest. `since_ns` is when its latest batch was decided,
    0 before the first, and `tokens_encoded` what it was given to encode since the start. `held_up` requests decode in
    the same processes, and get no token while it is at work; `load_tokens` are the prompt and output tokens of all
    requests that are served there; both are 0 where it has processes of its own.
    """

    @property
    def free(self) -> bool: ...
    @property
    def items(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def largest(self) -> int: ...
    @property
    def since_ns(self) -> int: ...
    @property
    def tokens_encoded(self) -> int: ...
    @property
    def held_up(self) -> int: ...
    @property
    def load_tokens(self) -> int: ...


class EncodeGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """An `EncodeReplica` of plain values, for tests of policies."""

    free: bool
    items: int = 0
    tokens: int = 0
    largest: int = 0
    since_ns: int = 0
    tokens_encoded: int = 0
    held_up: int = 0
    load_tokens: int = 0


class DispatchView(msgspec.Struct, frozen=True, kw_only=True):
    """What a dispatch policy sees when an encode group is free and images wait.

    Attributes:
        groups: The encode groups that take work, at least one of them free.
        waiting: The images that wait, the front first. `tokens` of one is None where it was in a batch that failed.
        overdue: Index of the image that goes before all behind it in any case, if there is one.
        measured: Times of all replicas.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    groups: Sequence[EncodeReplica]
    waiting: Sequence[WaitingEntry]
    overdue: int | None = None
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class Dispatch(msgspec.Struct, frozen=True):
    """Which group has the next batch, and of which images it can be.

    Attributes:
        group: An index into `view.groups`, of one that is free; None to wait until another is.
        order: Indices into `view.waiting` of the images that may be in it, the most wanted first; None for all as they
            wait. How many of them are in it, `encode.admission` decides, which sees these and no others.
    """

    group: int | None
    order: Sequence[int] | None = None


# --- reclaim ----------------------------------------------------------------------------------------------------------


class ReadyEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """An embedding that is ready and waits for requests that need it.

    Attributes:
        pages: Pages of the arena that it holds.
        tokens: What encoding it again would take; 0 for one that a client brought.
        requests: How many requests need it, and `tenant` whose needed it first.
        priority: Of the most urgent of them.
        arrived_ns: When it was first needed.
        target_ns: When the first token of one of them is due, the earliest; None without a target.
    """

    pages: int
    tokens: int
    requests: int
    priority: int
    arrived_ns: int
    target_ns: int | None = None
    tenant: str = ""


class ReclaimView(msgspec.Struct, frozen=True, kw_only=True):
    """What a reclaim policy sees when an image finds too few pages, and those that it may take would do.

    Attributes:
        ready: The embeddings that may give way, those of the oldest requests first: no step in flight reads them, and
            only younger requests than the image's need them.
        pages: How many pages are missing.
        front: Whether the image is the first that waits.
        tokens: Of the image; `priority`, `target_ns` and `tenant` are its, too.
        measured: Times of all replicas.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    ready: Sequence[ReadyEmbedding]
    pages: int
    front: bool
    tokens: int | None = None
    priority: int = 0
    target_ns: int | None = None
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


# --- the policy --------------------------------------------------------------------------------------------------


class ImagePolicy(Policy, frozen=True, kw_only=True):
    """Decides about images: which are encoded now, by which encode group, and whose embedding gives way.

    A subclass overrides the methods of the decisions that it makes. The kernel's defaults
    decide the others.
    """

    scope: ClassVar[Literal["item", "request"]] = "item"
    """Key of a cached embedding: `item` for the image's content, `request` for all images of a request in order."""

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return the items of a request to encode now, as indices into `view.items`.

        Items that the next chunk needs are always added.
        """
        return ()

    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the encode group of the next batch, and the images that may be in it.

        Called again until no group is free or the answer starts no batch; not called if one group is free and one
        image waits. While nothing is being encoded, the answer must start a batch. An image that has waited for a
        minute goes first.
        """
        free = [index for index, group in enumerate(view.groups) if group.free]
        return Dispatch(min(free, key=lambda index: view.groups[index].held_up))

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        """Return the ready embeddings that give way to an image of an older request, as indices into `view.ready`.

        Only as many go as are needed; each is encoded again later. If they are too few, the image waits; but if it is
        the first that waits, the youngest of the others go too.
        """
        return range(len(view.ready) - 1, -1, -1)
