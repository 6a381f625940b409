"""Policies for images: the images to encode, their encode group, and the embeddings to evict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as to_int

import msgspec

from vsched.policy.base import Policy, PolicyKey, RequestView, View, WaitingEntry, decides
from vsched.policy.checks import check_distinct, check_indices

# --- encoding ---------------------------------------------------------------------------------------------------------


class ItemSpan(msgspec.Struct, frozen=True):
    """An image in its prompt: the token positions [start, stop), and whether its embedding is ready."""

    start: int
    stop: int
    ready: bool


class EncodingView(RequestView, frozen=True, kw_only=True):
    """Input of an encoding policy: one request with images.

    Attributes:
        items: Its images, in prompt order.
        chunk_start: First token position of the next prefill chunk.
        chunk_stop: End of that chunk, exclusive.
        chunk_tokens: Maximum tokens of a prefill chunk.
        prompt_tokens: Tokens to prefill: the prompt and, after a preemption, the outputs so far.
        arriving: True on the first call for the request.
        target_ns: Deadline of its first token; None without a target, and after the first token.
    """

    items: Sequence[ItemSpan]
    chunk_start: int
    chunk_stop: int
    chunk_tokens: int
    prompt_tokens: int
    arriving: bool
    target_ns: int | None = None

    @property
    def needed(self) -> tuple[int, ...]:
        """Indices of the images in the chunk; they are encoded whatever the policy returns."""
        start, stop = self.chunk_start, self.chunk_stop
        return tuple(
            [i for i, item in enumerate(self.items) if item.start < stop and item.stop > start]
        )


def default_selection(count: int) -> list[int]:
    """Encode only the images of the next chunk, which the kernel adds."""
    del count
    return []


# --- dispatch ---------------------------------------------------------------------------------------------------------


class EncodeGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One encode group that accepts work.

    Attributes:
        free: Whether it has no batch, so that it can get one now.
        items: Images of its batch; 0 if it is free.
        tokens: Encoder output tokens of its batch; 0 if it is free.
        largest: Encoder output tokens of the largest image of its batch; 0 if it is free.
        since_ns: Time at which its latest batch was planned; 0 before the first.
        tokens_encoded: Encoder output tokens of all its batches since the start.
        held_up: Requests that decode in the same processes and get no token while it encodes; 0 if it has processes of
            its own.
        load_tokens: Prompt and output tokens of all requests of the generate group in the same processes; 0 if it has
            processes of its own.
    """

    free: bool
    items: int = 0
    tokens: int = 0
    largest: int = 0
    since_ns: int = 0
    tokens_encoded: int = 0
    held_up: int = 0
    load_tokens: int = 0


class DispatchView(View, frozen=True, kw_only=True):
    """Input of a dispatch policy: the encode groups, at least one of them free, and the waiting images.

    Attributes:
        groups: The encode groups that accept work.
        waiting: The waiting images in queue order. `tokens` is None if the image was in a batch that failed.
        overdue: Index into `waiting` of the image that goes first whatever the policy returns: it was passed over for
            longer than `policies.passed_over_max_s`. None for none.
    """

    groups: Sequence[EncodeGroupView]
    waiting: Sequence[WaitingEntry]
    overdue: int | None = None


class Dispatch(msgspec.Struct, frozen=True):
    """The encode group of the next batch, and the images that the batch may contain.

    Attributes:
        group: Index into `view.groups` of a free group; None to wait for another group.
        order: Indices into `view.waiting` of the images that may be in the batch, in order of preference; None for all,
            in queue order. The `encode.admission` policy sees only these, and decides how many of them are in the
            batch.
    """

    group: int | None
    order: Sequence[int] | None = None


def check_dispatch(
    returned: Dispatch, count: int, free: Mapping[int, int], encoding: int
) -> Dispatch:
    """Return the checked group and order of `count` images.

    `free` are the groups without a batch, each with the requests that get no token while it works. While no image is
    being encoded (`encoding` is 0), a batch must start.
    """
    group, order = returned.group, returned.order
    if group is not None:
        group = to_int(group)
        if group not in free:
            raise ValueError(f"group {group} is not free")
    if order is not None:
        order = check_distinct(order, count)
    if not encoding and (group is None or (order is not None and not order)):
        raise ValueError("nothing is being encoded, and nothing is to be")
    return Dispatch(group, order)


def default_dispatch(count: int, free: Mapping[int, int], encoding: int) -> Dispatch:
    """Choose the free group that delays the fewest requests, with all images."""
    del count, encoding
    return Dispatch(min(free, key=free.__getitem__))


# --- reclaim ----------------------------------------------------------------------------------------------------------


class ReadyEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """A ready embedding that waits for the requests that need it.

    Attributes:
        pages: Pages of the embedding arena that it holds.
        tokens: Encoder output tokens to compute if it is encoded again; 0 for an embedding sent by a client.
        requests: Number of requests that need it.
        priority: Highest priority of these requests.
        arrived_ns: Time at which it was first needed.
        target_ns: Earliest deadline of a first token of these requests; None if none has a target.
        tenant: Tenant of the first request that needed it; empty for none.
    """

    pages: int
    tokens: int
    requests: int
    priority: int
    arrived_ns: int
    target_ns: int | None = None
    tenant: str = ""


class ReclaimView(RequestView, frozen=True, kw_only=True):
    """Input of a reclaim policy: an image for which pages are missing, and the embeddings that can be evicted for it.

    Attributes:
        ready: The embeddings that can be evicted, those of the oldest requests first: no step in flight reads them, and
            only requests younger than the image's need them. Together they have enough pages.
        pages: Number of missing pages.
        front: Whether the image is the first in the queue.
        tokens: Encoder output tokens of the image; None if unknown.
        target_ns: Deadline of the first token of the image's request; None without a target.
    """

    ready: Sequence[ReadyEmbedding]
    pages: int
    front: bool
    tokens: int | None = None
    target_ns: int | None = None


def check_reclaim(returned: Sequence[int], count: int) -> list[int]:
    """Return the checked indices of the embeddings to evict, of `count`."""
    return list(check_distinct(returned, count))


def default_reclaim(count: int) -> list[int]:
    """Evict the youngest embeddings first."""
    return list(range(count - 1, -1, -1))


# --- the policy --------------------------------------------------------------------------------------------------


class ImagePolicy(Policy, frozen=True, kw_only=True):
    """Decides the images to encode now, the encode group of each batch, and the embeddings to evict.

    A subclass overrides the methods of the decisions that it makes. The kernel's defaults decide the others.
    """

    @decides(
        "encoding",
        PolicyKey(
            "encode.encoding", "chunk-aware", "Choice of the images of a request to encode now."
        ),
        check=check_indices,
        default=default_selection,
    )
    def select(self, view: EncodingView) -> Sequence[int]:
        """Return indices into `view.items` of the images to encode now; by default only those of the next chunk.

        Called when a request with images arrives, and before each further prefill chunk while an image is ahead of it.
        Images in the next chunk are always added.
        """
        return ()

    @decides(
        "dispatch",
        PolicyKey(
            "encode.dispatch",
            "fewest-held-up",
            "Choice of the replica for the next images, and of the eligible images.",
        ),
        check=check_dispatch,
        default=default_dispatch,
    )
    def dispatch(self, view: DispatchView) -> Dispatch:
        """Return the encode group of the next batch, and the images that the batch may contain.

        Called if a group is free and images wait, and again until no group is free or no batch was started; not called
        if the only encode group is free and only one image waits. While nothing is being encoded, the returned value
        must start a batch. An image that was passed over for longer than `policies.passed_over_max_s` goes first. The
        default is the free group that delays the fewest requests, with all images.
        """
        free = [index for index, group in enumerate(view.groups) if group.free]
        return Dispatch(min(free, key=lambda index: view.groups[index].held_up))

    @decides(
        "reclaim",
        PolicyKey(
            "encode.reclaim",
            "youngest",
            "Choice of the ready embedding to evict for an image of an older request.",
        ),
        check=check_reclaim,
        default=default_reclaim,
    )
    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        """Return indices into `view.ready` of the embeddings to evict for an image of an older request, in order.

        Called if pages are missing for an image of the next batch. Only as many embeddings are evicted as are needed;
        each is encoded again later. If they are too few, the image waits; but if it is the first in the queue, the
        others follow, the youngest first. The default is the youngest first.
        """
        return default_reclaim(len(view.ready))
