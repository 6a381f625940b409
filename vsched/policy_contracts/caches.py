"""The contracts of images and caches: who encodes what, whose embedding gives way, what the prefix cache takes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from vsched.measured import NOTHING_MEASURED, Measured
from vsched.policy_contracts.base import Policy, WaitingEntry

# --- dispatch ----------------------------------------------------------------------------------------------------


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
        measured: Times of all replicas.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    groups: Sequence[EncodeReplica]
    waiting: Sequence[WaitingEntry]
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


class DispatchPolicy(Policy, frozen=True, kw_only=True):
    """Decides which encode group has the next batch, and of which images it can be."""

    kind: ClassVar[str] = "dispatch"
    method: ClassVar[str] = "dispatch"

    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the group and the images; asked again until no group is free or nothing comes of it.

        Not asked where there is one answer: of one group that is free, about one image.
        While nothing is being encoded, something must be. No image waits for it for over a minute: then it is first.
        """
        raise NotImplementedError


# --- reclaim -----------------------------------------------------------------------------------------------------


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


class ReclaimPolicy(Policy, frozen=True, kw_only=True):
    """Decides whose ready embedding gives way to an image of an older request; it is encoded again later."""

    kind: ClassVar[str] = "reclaim"
    method: ClassVar[str] = "choose"

    def choose(self, view: ReclaimView) -> Sequence[int]:
        """Return indices into `view.ready` in the order to go; only as many go as are needed.

        Where they are too few, the image waits; but for the front, the youngest that are left go, too.
        """
        raise NotImplementedError


# --- insertion ---------------------------------------------------------------------------------------------------


class InsertionView(msgspec.Struct, frozen=True, kw_only=True):
    """What an insertion policy sees of a request that ended and leaves KV blocks behind.

    Attributes:
        hashes: Of its full blocks that are computed, prompt first. A hash stands for all tokens up to the end of its
            block, so a block is of use only while those before it are cached.
        prompt_blocks: How many of them hold nothing but its prompt.
        found: How many of them it found in the cache when it began. They stay whatever the answer.
        block_tokens: Tokens of a block.
        items: Images in its prompt.
        measured: Times of this replica, and what its cache holds.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    hashes: Sequence[bytes]
    prompt_blocks: int
    found: int
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    items: int = 0
    priority: int = 0
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class InsertionPolicy(Policy, frozen=True, kw_only=True):
    """Decides what of a request that ended the prefix cache keeps; what goes when it is full is for eviction."""

    kind: ClassVar[str] = "insertion"
    method: ClassVar[str] = "keep"

    def keep(self, view: InsertionView) -> int:
        """Return how many of its first blocks are kept; asked where there are some that it did not find.

        What others still use stays until they end. Until a request ends, all its blocks can be found.
        """
        raise NotImplementedError
