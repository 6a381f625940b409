"""Attention over a paged KV cache.

The modelling code calls `attend` through transformers' table of attention functions, once a layer, with the
queries, keys and values of one packed row: first the decode rows, one token each, then the tokens of each prefill
chunk. `attend` writes keys and values into their slots of the cache and reads each sequence's context back through
its block table.

No mask function is registered under our name: transformers then builds no mask at all, which is what we want, since
what a token may see follows from its place in its sequence.

What a step needs is computed once, in `PagedStep`, and shared by all layers. It travels to the attention function as a
keyword argument of the model's call, so that no state is global and two models can run in one process.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from torch import nn

NAME = "vsched_paged"


class DecodeKernel(Protocol):
    """Attention of single query rows over contexts in the cache."""

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for a query of the same shape."""
        ...


class PrefillKernel(Protocol):
    """Attention of the rows of one chunk over the context up to each."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        segment: Segment,
        step: PagedStep,
        scaling: float,
    ) -> torch.Tensor:
        """Return [heads, rows, head dim] for a query of the same shape; key and value are the chunk's own."""
        ...


class AttentionKernels(NamedTuple):
    """The kernels that a step attends with."""

    decode: DecodeKernel
    prefill: PrefillKernel


class PatchKernel(Protocol):
    """Attention within each of some sequences of one length, every row to all rows of its own."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        out: torch.Tensor,
        /,
    ) -> None:
        """Take [heads, sequences, rows, head dim] each; write to [sequences, rows, heads, head dim]."""
        ...


class Allocate(Protocol):
    """Allocates memory of a device that reads as zeros."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape and type."""
        ...


class KvCache:
    """Keys and values of every layer, [blocks * block_size, kv heads, head dim] each."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        allocate: Allocate,
        spare_blocks: int = 0,
    ) -> None:
        """Allocate; `spare_blocks` come after the others, for writes that nobody reads."""
        self.block_size = block_size
        self.blocks = blocks
        shape = ((blocks + spare_blocks) * block_size, kv_heads, head_dim)
        whole = allocate((2 * layers, *shape), dtype=dtype)
        self.keys = list(whole[:layers])
        self.values = list(whole[layers:])

    @functools.cached_property
    def arrays(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """The same memory as numpy arrays; bfloat16, which numpy does not know, as uint16."""

        def array(tensor: torch.Tensor) -> npt.NDArray[Any]:
            half = tensor.dtype == torch.bfloat16
            found: npt.NDArray[Any] = (tensor.view(torch.uint16) if half else tensor).numpy()
            return found

        return [
            (array(key), array(value)) for key, value in zip(self.keys, self.values, strict=True)
        ]


class Segment:
    """One chunk of the packed row: rows [start, stop), whose last token has `context` tokens up to itself.

    `whole` says that the chunk is all of its context: nothing has to be read from the cache, and the plain causal rule
    holds.

    Where `keeps_indices` is set, as on a GPU, slots and mask are made once a step and shared by the layers. Otherwise
    every layer makes them anew: on the host that takes a fiftieth of the layer's time, and to hold them for all chunks
    at once would take more memory than anything else in a step.
    """

    def __init__(
        self,
        table: npt.NDArray[np.int32],
        *,
        start: int,
        first: int,
        last: int,
        block_size: int,
        device: str,
        keeps_indices: bool = False,
    ) -> None:
        self.start = start
        self.stop = start + last - first
        self.first = first
        self.context = last
        self.whole = first == 0
        self.table = table
        self.blocks = -(-last // block_size)
        self._block_size = block_size
        self._device = device
        self._keeps_indices = keeps_indices
        self._slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def end(self) -> Segment:
        """Return the last row by itself, for a layer whose other rows nobody asks for."""
        return Segment(
            self.table,
            start=self.stop - 1,
            first=self.context - 1,
            last=self.context,
            block_size=self._block_size,
            device=self._device,
            keeps_indices=self._keeps_indices,
        )

    def slots(self) -> torch.Tensor:
        """Return the cache slots of the whole context, int64 [context]."""
        if self._slots is not None:
            return self._slots
        found = context_slots(self.table, self.context, self._block_size)
        slots = torch.from_numpy(found).to(self._device)
        if self._keeps_indices:
            self._slots = slots
        return slots

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what to add to the scores, [rows, context]; None where a row sees all."""
        rows = self.stop - self.start
        if rows == 1 or self._mask is not None:
            return self._mask
        mask = torch.full((rows, self.context), -torch.inf, dtype=dtype, device=self._device)
        mask.triu_(self.first + 1)
        if self._keeps_indices:
            self._mask = mask
        return mask


@dataclass(slots=True)
class PagedStep:
    """What the layers of one step share.

    Shape:
        slots: int64 [rows], where each row's key and value go.
        tables: int32 [decode rows, blocks], the block tables of the decode rows, cut to the longest.
        contexts: int32 [decode rows], tokens that each decode row sees, itself included.
        on_device: tables and contexts on a GPU, once they have been copied; a captured step has these alone.
    """

    cache: KvCache
    decode: DecodeKernel
    prefill: PrefillKernel
    slots: torch.Tensor
    decode_rows: int
    tables: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    segments: list[Segment]
    scratch: dict[str, Any] = field(default_factory=dict)
    on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def as_decode_rows(self) -> PagedStep:
        """Return the step with every row of a chunk as a decode row, which sees the tokens up to itself."""
        width = max((each.blocks for each in self.segments), default=0)
        width = max(width, self.tables.shape[1])
        rows = self.decode_rows + sum(each.stop - each.start for each in self.segments)
        tables, contexts = np.zeros((rows, width), dtype=np.int32), np.empty(rows, dtype=np.int32)
        tables[: self.decode_rows, : self.tables.shape[1]] = self.tables
        contexts[: self.decode_rows] = self.contexts
        for each in self.segments:
            part = slice(each.start, each.stop)
            tables[part, : each.blocks] = each.table[: each.blocks]
            contexts[part] = np.arange(each.first + 1, each.context + 1)
        return dataclasses.replace(
            self, decode_rows=rows, tables=tables, contexts=contexts, segments=[]
        )


def context_slots(
    table: npt.NDArray[np.int32], length: int, block_size: int
) -> npt.NDArray[np.int64]:
    """Return the cache slots of the first `length` tokens of a sequence."""
    blocks = table[: -(-length // block_size)].astype(np.int64)
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:length]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: PagedStep,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a packed row.

    Shape: query [1, heads, rows, head dim], key and value [1, kv heads, rows, head dim]; returns
    [1, rows, heads, head dim].
    """
    layer: Any = module.layer_idx
    keys, values = paged_step.cache.keys[layer], paged_step.cache.values[layer]
    queries = query[0].transpose(0, 1)
    keys.index_copy_(0, paged_step.slots, key[0].transpose(0, 1))
    values.index_copy_(0, paged_step.slots, value[0].transpose(0, 1))
    rows = paged_step.decode_rows
    if not paged_step.segments:
        return paged_step.decode(queries, layer, paged_step, scaling)[None], None
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if rows:
        out[:rows] = paged_step.decode(queries[:rows], layer, paged_step, scaling)
    for segment in paged_step.segments:
        part = slice(segment.start, segment.stop)
        # What one segment takes is gone before the next.
        seen = query[0, :, part], key[0, :, part], value[0, :, part]
        out[part] = paged_step.prefill(*seen, layer, segment, paged_step, scaling).transpose(0, 1)
    return out[None], None


def register() -> None:
    """Make `attend` known to transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
