"""Attention over a paged KV cache.

The modelling code calls `attend` through transformers' table of attention functions, once a layer, with the
queries, keys and values of one packed row: first the decode rows, one token each, then the tokens of each prefill
chunk. `attend` writes keys and values into their slots of the cache and reads each sequence's context back through
its block table.

No mask function is registered under our name: transformers then builds no mask at all, which is what we want, since
what a token may see follows from its place in its sequence.

What a step needs is computed once, in `PagedStep`, and shared by all layers. It travels to the attention function in a
context variable (`running`): not every model hands keyword arguments on. So two models can run in one process.

What some layers add to plain attention (windows, soft caps, sinks, keys and values of different sizes) is in
`ruled_attention.py`. A layer without such goes to the kernels of the backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import Spans
from vsched_workers.batching.device_copies import sent
from vsched_workers.batching.kv_cache import KvCache, LayerKv
from vsched_workers.batching.ruled_attention import (
    ContextIndex,
    ScoreRule,
    decode_by_rule,
    prefill_by_rule,
)

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


@runtime_checkable
class JoinedPrefill(Protocol):
    """A prefill kernel that takes all chunks of a step in one call."""

    def joins(self, step: PagedStep) -> bool:
        """Return whether it does so for this step."""
        ...

    def attend_all(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for the rows of all chunks, of the same shape."""
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


class Segment:
    """One chunk of the packed row: rows [start, stop), whose last token has `context` tokens up to itself.

    `whole` says that the chunk is all of its context: nothing has to be read from the cache, and the plain causal rule
    holds.

    Where `keeps_indices` is set, as on a GPU, slots and mask are made once a step and shared by the layers. Otherwise
    every layer makes them anew: on the host that takes a fiftieth of the layer's time, and to hold them for all chunks
    at once would take more memory than anything else in a step.

    `prompt_length` says how many tokens of its sequence are the prompt. The tokens of each span of `mutual` see each
    other, as if the last of them stood before all; the chunk has none of them, or the last.
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
        prompt_length: int = 0,
        mutual: Spans = (),
    ) -> None:
        self.start = start
        self.stop = start + last - first
        self.first = first
        self.context = last
        self.whole = first == 0
        self.prompt_length = prompt_length
        self.mutual = tuple(span for span in mutual if span[0] < last and span[1] > first)
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
        slots = sent(found, self._device)
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


class StatesOfStep(NamedTuple):
    """Where layers find the states that they keep of the sequences of a step, and where they leave them.

    Attributes:
        slots: int64 [decode rows + segments], the slot of each sequence.
        chunks: For each segment its snapshots: the row that the next token would have, and where the state goes.
    """

    slots: torch.Tensor
    chunks: list[list[tuple[int, torch.Tensor]]]


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
    states: StatesOfStep | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        decoding = int(self.contexts.max()) if self.decode_rows else 0
        return max([decoding, *(each.context for each in self.segments)])

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


_RUNNING: ContextVar[PagedStep] = ContextVar("running paged step")


@contextmanager
def running(step: PagedStep) -> Iterator[None]:
    """Let `attend` find the step."""
    token = _RUNNING.set(step)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_step() -> PagedStep:
    """Return the step that runs."""
    return _RUNNING.get()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a packed row.

    Shape: query [1, heads, rows, head dim], key and value [1, kv heads, rows, head dim]; returns
    [1, rows, heads, head dim of the values]. `s_aux` [heads] are sinks: scores that take weight, and have no value.
    """
    layer: Any = module.layer_idx
    step = _RUNNING.get()
    kept = step.cache.layers[layer]
    key, value = kept.put(step.slots, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and step.longest <= sliding_window:
        sliding_window = None
    plain = sliding_window is None and softcap is None and s_aux is None
    plain = plain and not any(segment.mutual for segment in step.segments)
    if plain and key.shape[-1] == value.shape[-1]:
        return attend_plainly(query[0], key, value, layer, step, scale)[None], None
    rule = ScoreRule(scale, sliding_window, softcap, s_aux)
    return attend_by_rule(query[0], kept, step, rule)[None], None


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend for the rows of a step by its kernels; keys and values are in the cache already.

    Shape: query [heads, rows, head dim]; key and value, the rows' own, [kv heads, rows, head dim]. Returns
    [rows, heads, head dim].
    """
    queries = query.transpose(0, 1)
    rows = step.decode_rows
    if not step.segments:
        return step.decode(queries, layer, step, scaling)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if rows:
        out[:rows] = step.decode(queries[:rows], layer, step, scaling)
    if isinstance(step.prefill, JoinedPrefill) and step.prefill.joins(step):
        out[rows:] = step.prefill.attend_all(queries[rows:], layer, step, scaling)
        return out
    for segment in step.segments:
        part = slice(segment.start, segment.stop)
        # What one segment takes is gone before the next.
        seen = query[:, part], key[:, part], value[:, part]
        out[part] = step.prefill(*seen, layer, segment, step, scaling).transpose(0, 1)
    return out


def attend_by_rule(
    query: torch.Tensor, kept: LayerKv, step: PagedStep, rule: ScoreRule
) -> torch.Tensor:
    """Attend by a rule for the rows of a step, whose keys and values are in the cache already.

    Shape: query [heads, rows, key dim]. Returns [rows, heads, value dim], of which only decode rows and those of
    segments are written.
    """
    out = query.new_empty(query.shape[1], query.shape[0], kept.value_dim)
    rows = step.decode_rows
    if rows:
        name = f"index of {rule.window}"
        if name not in step.scratch:
            step.scratch[name] = ContextIndex.of(
                step.tables,
                step.contexts,
                block_size=step.cache.block_size,
                window=rule.window,
                device=query.device,
            )
        decoding = query[:, :rows].transpose(0, 1)
        out[:rows] = decode_by_rule(decoding, kept, step.scratch[name], rule)
    for segment in step.segments:
        part = slice(segment.start, segment.stop)
        out[part] = prefill_by_rule(query[:, part], kept, segment.slots(), rule, segment.mutual)
    return out


def register() -> None:
    """Make `attend` known to transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
