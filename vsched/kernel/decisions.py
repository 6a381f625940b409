"""Decisions: the entries of the decision logs of encode and generate groups.

A decision has changes only. Ranks keep the running set: each slot that finished its prefill decodes in every step,
until the rank finds that it has finished or a decision frees it. So the decision of a steady decode step is empty,
except for new blocks.
"""

from __future__ import annotations

import msgspec

from vsched.types import ArraySpec, Extent, ItemPlace, SamplingParams


class RequestData(msgspec.Struct, frozen=True, array_like=True):
    """The data of a request for ranks; sent with its first join, and again after a restart.

    `tokens` is little-endian int32: the prompt, then outputs from before a preemption or a loss of the group.
    `adapter` is the number of its adapter, 0 for none.
    """

    tokens: bytes
    prompt_length: int
    items: list[ItemPlace]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    adapter: int = 0


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A request gets a slot. Its blocks have `computed` tokens already, of `length` known tokens.

    `restored` is the snapshot slot of its recurrent state; None for an initial state.
    """

    number: int
    slot: int
    computed: int
    length: int
    blocks: list[int]
    data: RequestData | None
    restored: int | None = None


class Leave(msgspec.Struct, frozen=True, array_like=True):
    """A request leaves its slot; with `keep`, it was preempted and will return."""

    number: int
    slot: int
    keep: bool


class ChunkItem(msgspec.Struct, frozen=True, array_like=True):
    """An item in a chunk: its position in the prompt, and the arena pages of its embedding."""

    offset: int
    tokens: int
    pages: list[int]


class StateWrite(msgspec.Struct, frozen=True, array_like=True):
    """Write the recurrent state after position `end` - 1 to a snapshot slot."""

    end: int
    snapshot_slot: int


class ChunkPlan(msgspec.Struct, frozen=True, array_like=True):
    """Prefill positions [start, stop) of a slot; `writes` are in order, with ends in (start, stop]."""

    slot: int
    start: int
    stop: int
    items: list[ChunkItem]
    writes: list[StateWrite] = []


class DraftGrant(msgspec.Struct, frozen=True, array_like=True):
    """Ranks may draft `tokens` tokens in each step for a decoding slot, until another grant, or until it is left.

    `ngram` and `model` are as in `vsched.policy.Draft`. Each rank computes the same drafts by itself.
    """

    slot: int
    tokens: int
    ngram: int
    model: bool = False


class SwapCopies(msgspec.Struct, frozen=True, array_like=True):
    """Copies between KV blocks and swap slots in host memory: first `out`, then `back`.

    `out` is (block, swap slot, block, swap slot, …), `back` is (swap slot, block, swap slot, block, …). Neither writes
    a slot or block twice, and `back` reads no slot that `out` writes.
    """

    out: list[int]
    back: list[int]

    @property
    def blocks(self) -> int:
        """Number of copied blocks."""
        return (len(self.out) + len(self.back)) // 2


class GenerateDecision(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """A step of a generate group.

    Order: `swaps`, `left`, `forgotten`, `joined`, `granted`, `grown` (slot, block, slot, block, …). Then the step runs:
    a token and any accepted drafts for each decoding slot, and the chunks. Snapshots are read before any is written.
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
    """Encode an item from its extent of the arena into arena pages.

    With `encoded`, the extent has finished embedding rows, which are only copied. `arrays`, `metadata`, `adapter` are
    as in `MediaItem`. `readers` are the indices of the generate groups with requests that wait for it.
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
    """A step of an encode group: a batch of items.

    Attributes:
        time_slice_ns: How long ranks may encode before a step of the generate group runs; 0 for no limit.
        layers: Layers of the vision tower to compute before the first pause; 0 for all. The leader sets it, from the
            time of earlier layers.
    """

    step: int
    tasks: list[EncodeTask]
    time_slice_ns: int = 0
    layers: int = 0


Decision = GenerateDecision | EncodeDecision
