"""What the kernel decides: the bodies of the two groups' decision logs.

A decision names only what changes. Ranks keep the running set: every slot that finished its prefill decodes in every
step until the rank itself sees it finish or a decision makes it leave. So a steady decode step is an empty decision but
for the blocks that slots grow into.
"""

from __future__ import annotations

import msgspec

from vsched.types import ArraySpec, Extent, ItemPlace, SamplingParams


class RequestData(msgspec.Struct, frozen=True, array_like=True):
    """All that a rank must hold of a request; sent once, with its first join (again after a restart).

    `tokens` is little-endian int32: the prompt, then the outputs from before it was preempted or its group was lost.
    `adapter` is the number of the adapter that it is computed with, 0 for none.
    """

    tokens: bytes
    prompt_length: int
    items: list[ItemPlace]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    adapter: int = 0


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot. `computed` tokens are in its blocks already; `length` tokens are known in all.

    `restored` is the place of the snapshot that its state begins with, for a model that keeps one; None to begin anew.
    """

    number: int
    slot: int
    computed: int
    length: int
    blocks: list[int]
    data: RequestData | None
    restored: int | None = None


class Leave(msgspec.Struct, frozen=True, array_like=True):
    """A request gives its slot back; `keep` says that it will return (it was preempted)."""

    number: int
    slot: int
    keep: bool


class ChunkItem(msgspec.Struct, frozen=True, array_like=True):
    """An item that a chunk meets: its place in the prompt and the arena pages of its embedding."""

    offset: int
    tokens: int
    pages: list[int]


class StateWrite(msgspec.Struct, frozen=True, array_like=True):
    """Put the state of a sequence, as it is after position `end` - 1, into a place for snapshots."""

    end: int
    place: int


class ChunkPlan(msgspec.Struct, frozen=True, array_like=True):
    """Prefill positions [start, stop) of the sequence in a slot; `writes` are in order, each end in (start, stop]."""

    slot: int
    start: int
    stop: int
    items: list[ChunkItem]
    writes: list[StateWrite] = []


class DraftGrant(msgspec.Struct, frozen=True, array_like=True):
    """From this step on ranks may draft `tokens` tokens a step for a slot that decodes, until another grant or a leave.

    `ngram` and `model` are those of `vsched.policy.Draft`. What is drafted, each rank finds by itself, from what all of
    them know.
    """

    slot: int
    tokens: int
    ngram: int
    model: bool = False


class SwapCopies(msgspec.Struct, frozen=True, array_like=True):
    """Copies between KV blocks and places in host memory: of `out` first, then of `back`.

    `out` is (block, place, block, place, …), `back` is (place, block, place, block, …). Neither writes anything twice.
    """

    out: list[int]
    back: list[int]

    @property
    def blocks(self) -> int:
        """Copies, of a block each."""
        return (len(self.out) + len(self.back)) // 2


class GenerateDecision(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """One step of the generate group.

    Order: `swaps` apply first, then `left`, then `forgotten`, then `joined`, then `granted`, then `grown` (slot, block,
    slot, block, …), then the step runs: one token for every decoding slot and as many more as drafts of it prove right,
    and the chunks. Snapshots are read before any is written.
    """

    step: int
    forgotten: list[int] = []
    left: list[Leave] = []
    joined: list[Join] = []
    grown: list[int] = []
    chunks: list[ChunkPlan] = []
    granted: list[DraftGrant] = []
    swaps: SwapCopies | None = None


class EncodeTask(msgspec.Struct, frozen=True, array_like=True):
    """Encode one item from its extent of the arena into the arena's pages.

    With `encoded`, `extent` holds finished embedding rows, which are only copied. `arrays`, `metadata`, `adapter` are
    those of `MediaItem`. `readers` are the replicas of the generate stage that have requests waiting for it: where its
    rows are wanted.
    """

    key: bytes
    tokens: int
    extent: Extent
    pages: list[int]
    arrays: tuple[ArraySpec, ...] = ()
    metadata: bytes = b""
    encoded: bool = False
    adapter: int = 0
    readers: list[int] = []


class EncodeDecision(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """One step of the encode group: these items in one batch.

    Attributes:
        time_slice_ns: How long ranks may encode without a step of the generate group in between; 0 for no limit.
        layers: How much of the batch is to be encoded at first, in layers of the vision tower; 0 for all of it. The
            leader says so, from what layers took before.
    """

    step: int
    tasks: list[EncodeTask]
    time_slice_ns: int = 0
    layers: int = 0


Decision = GenerateDecision | EncodeDecision
