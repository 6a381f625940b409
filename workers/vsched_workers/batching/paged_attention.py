"""Attention over a paged KV cache.

The modelling code calls `attend` through transformers' attention interface, once per layer, with the queries, keys and
values of one packed batch. `attend` writes keys and values into their slots of the cache and reads each sequence's
context back through its block table.

  rows   | d0 | d1 | d2 | a0 a1 .. | b0 b1 b2 .. |      d: decode rows, one token of a sequence each
  decode_rows = 3         segments = [A, B]              A, B: prefill chunks

No mask function is registered under the same name, so transformers builds no mask: visibility follows from a token's
position in its sequence.

The metadata of a step is computed once, in `PagedStep`, and shared by all layers. It is passed to the attention
function in a context variable (`running`), as not every model passes keyword arguments on; a context variable, not a
global, so that two models can run in one process.

Layers with sliding windows, logit soft-capping, sinks, bidirectional spans, or values of another size than keys use
`attend_by_rule`: the backend's kernels if they support the rule, otherwise torch. In torch, scores and softmax are
float32, tokens before a window are not read, and a chunk is split so that temporary memory stays within `PART_BYTES`
(or that of one row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import Spans
from vsched_workers.batching.kv_cache import KvCache, LayerKv
from vsched_workers.device_copies import sent
from vsched_workers.memory.sparse_runs import pieces, room_for

if TYPE_CHECKING:
    from torch import nn


PART_BYTES = 64 << 20
"""Bytes of scores, or of gathered keys and values, at a time; one row may need more."""


class ScoreRule(NamedTuple):
    """Variants of the attention scores.

    Attributes:
        scaling: Factor of the scores.
        window: Tokens that a row attends to, itself included; None without a sliding window.
        softcap: Bound of logit soft-capping; None without it.
        sinks: [heads], attention sinks: scores in the softmax without a value; None without them.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class ContextIndex(NamedTuple):
    """Contexts of decode rows: slots int64 [rows, longest], and the mask of valid ones, [rows, longest]."""

    slots: torch.Tensor
    is_visible: torch.Tensor

    @classmethod
    def of(
        cls,
        tables: npt.NDArray[np.int32],
        contexts: npt.NDArray[np.int32],
        *,
        block_size: int,
        window: int | None,
        device: torch.device,
    ) -> ContextIndex:
        """Build it for block tables [rows, blocks] and context lengths [rows]."""
        starts = np.zeros_like(contexts) if window is None else np.maximum(contexts - window, 0)
        longest = int((contexts - starts).max())
        positions = starts[:, None] + np.arange(longest)
        is_visible = positions < contexts[:, None]
        # Slots of the first token exist, and are masked.
        positions = np.where(is_visible, positions, 0)
        blocks = np.take_along_axis(tables, positions // block_size, axis=1).astype(np.int64)
        slots = blocks * block_size + positions % block_size
        return cls(sent(slots, device), sent(is_visible, device))


def decode_by_rule(
    query: torch.Tensor, kept: LayerKv, index: ContextIndex, rule: ScoreRule
) -> torch.Tensor:
    """Attend for decode rows.

    Shape: query [rows, heads, key dim]. Returns [rows, heads, value dim].
    """
    rows, heads, key_dim = query.shape
    kv_heads = kept.keys.shape[1]
    width = kv_heads * (key_dim + kept.value_dim) * query.itemsize
    count = max(1, PART_BYTES // max(1, index.slots.shape[1] * width))
    out = room_for(query, rows, heads, kept.value_dim)
    for start in pieces(range(0, rows, count)):
        part = slice(start, start + count)
        slots, is_visible = index.slots[part], index.is_visible[part]
        grouped = query[part].reshape(len(slots), kv_heads, heads // kv_heads, -1)
        keys, values = kept.read(slots, query.dtype)
        scores = grouped @ keys.permute(0, 2, 3, 1)
        weights = _weights(scores, is_visible[:, None, None], rule, (kv_heads, -1, 1))
        out[part] = (weights @ values.transpose(1, 2)).flatten(1, 2)
    return out


def prefill_by_rule(
    query: torch.Tensor,
    kept: LayerKv,
    slots: torch.Tensor,
    rule: ScoreRule,
    bidirectional_spans: Spans = (),
) -> torch.Tensor:
    """Attend for the tokens of a chunk, the last ones of a context, each to the tokens up to itself.

    Attention is bidirectional within each span of `bidirectional_spans`; the spans are within the context.

    Shape: query [heads, rows, key dim]; `slots` int64 [context]. Returns [rows, heads, value dim].
    """
    heads, rows, _ = query.shape
    kv_heads = kept.keys.shape[1]
    out = room_for(query, rows, heads, kept.value_dim)
    grouped_out = out.unflatten(1, (kv_heads, -1))
    group = heads // kv_heads
    # As many KV heads at a time as leave a part all rows. Widened for one head at a time, as float32 keys of all heads
    # take twice the memory.
    widens = _multiplies_slowly(query)
    seen = len(slots) if rule.window is None else min(len(slots), rows + rule.window)
    count, dtype = min(kv_heads, PART_BYTES // (4 * group * rows * seen)), query.dtype
    if widens or not count:
        count, dtype = 1, torch.float32 if widens else dtype
    before = len(slots) - rows
    parts = list(_parts(rows, len(slots), group * count, rule.window))
    start_of_keys = parts[0][2]
    # Read once: the parts' contexts overlap.
    all_keys, all_values = kept.read(slots[start_of_keys:], query.dtype)
    for first, last, low, causal_high in pieces(parts):
        spans = [
            each
            for each in bidirectional_spans
            if each[0] < causal_high and each[1] > before + first
        ]
        high = max([causal_high, *(end for _, end in spans)])
        near = slice(low - start_of_keys, high - start_of_keys)
        keys, values = all_keys[near], all_values[near]
        grouped = query[:, first:last].unflatten(0, (kv_heads, -1))
        position = torch.arange(before + first, before + last, device=query.device)[:, None]
        other = torch.arange(low, high, device=query.device)
        is_visible = other <= position
        for start, end in spans:
            is_visible |= (position >= start) & (position < end) & (other >= start) & (other < end)
        if rule.window is not None:
            is_visible &= other > position - rule.window
        for head in range(0, kv_heads, count):
            part = slice(head, head + count)
            sinks = None if rule.sinks is None else rule.sinks.unflatten(0, (kv_heads, -1))[part]
            # One product for the heads of a group: with broadcast keys, torch would copy them.
            asked = grouped[part].to(dtype)
            scores = asked.flatten(1, 2) @ keys[:, part].to(dtype).permute(1, 2, 0)
            own, shape = rule._replace(sinks=sinks), (len(asked), -1, 1, 1)
            weights = _weights(scores.unflatten(1, asked.shape[1:3]), is_visible, own, shape)
            attended = weights.flatten(1, 2) @ values[:, part].to(dtype).transpose(0, 1)
            grouped_out[first:last, part] = (
                attended.unflatten(1, asked.shape[1:3]).permute(2, 0, 1, 3).to(out.dtype)
            )
    return out


def _multiplies_slowly(rows: torch.Tensor) -> bool:
    """Return whether torch multiplies such matrices at a fraction of the rate of float32: on a CPU without AVX512."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


def _parts(
    rows: int, context: int, heads: int, window: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows [first, last) of a chunk with the range of tokens [low, causal_high) that they attend to causally."""
    before = context - rows
    first = 0
    while first < rows:
        low = 0 if window is None else max(0, before + first - window + 1)
        count = max(1, PART_BYTES // (4 * heads * (context - low)))
        last = min(rows, first + count)
        yield first, last, low, before + last
        first = last


def _weights(
    scores: torch.Tensor, is_visible: torch.Tensor, rule: ScoreRule, sinks_shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the softmax of scores [..., keys] over the visible tokens; `sinks_shape` broadcasts the sinks."""
    # In place: each further copy of the scores takes as long as a product.
    exact = scores.to(torch.float32, copy=True).mul_(rule.scaling)
    if rule.softcap is not None:
        exact.div_(rule.softcap).tanh_().mul_(rule.softcap)
    exact.masked_fill_(~is_visible, -torch.inf)
    if rule.sinks is None:
        return exact.softmax(dim=-1).to(scores.dtype)
    sinks = rule.sinks.float().reshape(sinks_shape)
    highest = torch.maximum(exact.amax(dim=-1, keepdim=True), sinks)
    shares = exact.sub_(highest).exp_()
    total = shares.sum(dim=-1, keepdim=True).add_(torch.exp(sinks - highest))
    return shares.div_(total).to(scores.dtype)


NAME = "vsched_paged"


class DecodeKernel(Protocol):
    """Attention of single query rows over contexts in the cache."""

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for a query of the same shape."""
        ...


@runtime_checkable
class RuledDecode(Protocol):
    """A decode kernel for windows, soft-capping, sinks, and values of another size than keys.

    Attributes:
        takes_rules: Whether its results with such rules are right on this device.
    """

    takes_rules: bool

    def by_rule(
        self, query: torch.Tensor, layer: int, step: PagedStep, rule: ScoreRule
    ) -> torch.Tensor:
        """Return [rows, heads, value dim] for a query [rows, heads, key dim]."""
        ...


class PrefillKernel(Protocol):
    """Causal attention of the tokens of one chunk over their context."""

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
class WindowedPrefill(Protocol):
    """A prefill kernel for sliding windows.

    Attributes:
        takes_windows: Whether its results with windows are right on this device.
    """

    takes_windows: bool

    def in_window(
        self, query: torch.Tensor, layer: int, segment: Segment, step: PagedStep, rule: ScoreRule
    ) -> torch.Tensor:
        """Return [heads, rows, head dim] for a query of the same shape; the rule has no more than a window."""
        ...


@runtime_checkable
class RuledPrefill(Protocol):
    """A prefill kernel for windows, soft-capping and sinks, if values have the size of keys."""

    def by_rule(
        self, query: torch.Tensor, layer: int, segment: Segment, step: PagedStep, rule: ScoreRule
    ) -> torch.Tensor:
        """Return [heads, rows, head dim] for a query of the same shape."""
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
        """Return [rows, heads, head dim] for the tokens of all chunks, of the same shape."""
        ...


class AttentionKernels(NamedTuple):
    """The attention kernels of a step."""

    decode: DecodeKernel
    prefill: PrefillKernel


PatchKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor], None]
"""Bidirectional attention within each of several sequences of equal length, given query, key, value, scaling and `out`.

Shape: query, key and value [heads, sequences, rows, head dim]; `out` [sequences, rows, heads, head dim].
"""


class Segment:
    """One chunk: positions [first, last) of its sequence, rows [start, stop) of the packed batch.

    `context` is `last`, the tokens up to its last row. `whole` means that the chunk is its whole context: nothing is
    read from the cache, and attention is plain causal.

    If `keeps_indices` is set, as on a GPU, slots and mask are computed once per step and shared by the layers.
    Otherwise every layer computes them again: on the host that takes a fiftieth of the layer's time, while keeping them
    for all chunks would take more memory than anything else in a step.

    `prompt_length` is the number of prompt tokens of its sequence. Attention is bidirectional within each span of
    `bidirectional_spans`; a chunk that overlaps a span contains its end.
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
        bidirectional_spans: Spans = (),
    ) -> None:
        self.start = start
        self.stop = start + last - first
        self.first = first
        self.context = last
        self.whole = first == 0
        self.prompt_length = prompt_length
        self.bidirectional_spans = tuple(
            span for span in bidirectional_spans if span[0] < last and span[1] > first
        )
        self.table = table
        self.blocks = -(-last // block_size)
        self._block_size = block_size
        self._device = device
        self._keeps_indices = keeps_indices
        self._slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def last_row(self) -> Segment:
        """Return the last row as a segment, for a layer whose other rows are not needed."""
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
        """Return the attention mask to add to the scores, [rows, context]; None if nothing is masked."""
        rows = self.stop - self.start
        if rows == 1 or self._mask is not None:
            return self._mask
        mask = torch.full((rows, self.context), -torch.inf, dtype=dtype, device=self._device)
        mask.triu_(self.first + 1)
        if self._keeps_indices:
            self._mask = mask
        return mask


class StatesOfStep(NamedTuple):
    """Slots of the recurrent states of a step's sequences, and the snapshots to write.

    Attributes:
        slots: int64 [decode rows + segments], the slot of each sequence.
        chunks: Snapshots of each segment: the row after the last token of each, and the snapshot's slot.
    """

    slots: torch.Tensor
    chunks: list[list[tuple[int, torch.Tensor]]]


@dataclass(slots=True)
class PagedStep:
    """Metadata that the layers of one step share.

    Shape:
        slots: int64 [rows], the slot for each row's key and value.
        tables: int32 [decode rows, blocks], the block tables of the decode rows, cut to the longest.
        contexts: int32 [decode rows], tokens that each decode row attends to, itself included.
        on_device: tables and contexts on a GPU, once copied; a step captured in a CUDA graph has only these.
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
        """Tokens of the longest context; those of a captured step are as long as its tables allow."""
        decoding = 0
        if self.decode_rows and self.on_device is not None and not len(self.contexts):
            decoding = self.on_device[0].shape[1] * self.cache.block_size
        elif self.decode_rows:
            decoding = int(self.contexts.max())
        return max([decoding, *(each.context for each in self.segments)])

    def context_index(self, window: int | None, device: torch.device) -> ContextIndex:
        """Return the contexts of the decode rows, or their last `window` tokens; computed once per step."""
        name = f"index of {window}"
        if name not in self.scratch:
            size = self.cache.block_size
            self.scratch[name] = ContextIndex.of(
                self.tables, self.contexts, block_size=size, window=window, device=device
            )
        found: ContextIndex = self.scratch[name]
        return found

    def as_decode_rows(self) -> PagedStep:
        """Return the step with every token of a chunk as a decode row, with the context up to itself."""
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
        return replace(self, decode_rows=rows, tables=tables, contexts=contexts, segments=[])


def context_slots(
    table: npt.NDArray[np.int32], length: int, block_size: int
) -> npt.NDArray[np.int64]:
    """Return the cache slots of the first `length` tokens of a sequence."""
    blocks = table[: -(-length // block_size)].astype(np.int64)
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:length]


_RUNNING: ContextVar[PagedStep] = ContextVar("running paged step")


@contextmanager
def running(step: PagedStep) -> Iterator[None]:
    """Provide the step to `attend` until the context ends."""
    token = _RUNNING.set(step)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_step() -> PagedStep:
    """Return the current step."""
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
    """Attend for one layer of a packed batch.

    Shape: query [1, heads, rows, head dim], key and value [1, kv heads, rows, head dim]; returns [1, rows, heads, head
    dim of the values]. `s_aux` [heads] are attention sinks: scores in the softmax without a value. A `mask_window` of
    the module is a sliding window that its model expresses by a mask alone.
    """
    layer: Any = module.layer_idx
    sliding_window = sliding_window or getattr(module, "mask_window", None)
    step = _RUNNING.get()
    kept = step.cache.layers[layer]
    key, value = kept.put(step.slots, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and step.longest <= sliding_window:
        sliding_window = None
    plain = sliding_window is None and softcap is None and s_aux is None
    plain = plain and not any(segment.bidirectional_spans for segment in step.segments)
    if plain and key.shape[-1] == value.shape[-1]:
        return attend_with_kernels(query[0], key, value, layer, step, scale)[None], None
    rule = ScoreRule(scale, sliding_window, softcap, s_aux)
    return attend_by_rule(query[0], layer, step, rule)[None], None


def attend_with_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend for a step with the backend's kernels; keys and values are in the cache already.

    Shape: query [heads, rows, head dim]; key and value, of the rows themselves, [kv heads, rows, head dim]. Returns
    [rows, heads, head dim].
    """
    queries = query.transpose(0, 1)
    rows = step.decode_rows
    if not step.segments:
        return step.decode(queries, layer, step, scaling)
    several = len(step.segments) > 1
    if not rows and not several and step.segments[0].stop == len(queries):
        found = step.prefill(query, key, value, layer, step.segments[0], step, scaling)
        return found.transpose(0, 1)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if rows:
        out[:rows] = step.decode(queries[:rows], layer, step, scaling)
    if several and isinstance(step.prefill, JoinedPrefill) and step.prefill.joins(step):
        out[rows:] = step.prefill.attend_all(queries[rows:], layer, step, scaling)
        return out
    for segment in step.segments:
        part = slice(segment.start, segment.stop)
        # One segment at a time, so that its temporary memory is reused by the next.
        own = query[:, part], key[:, part], value[:, part]
        out[part] = step.prefill(*own, layer, segment, step, scaling).transpose(0, 1)
    return out


def attend_by_rule(
    query: torch.Tensor, layer: int, step: PagedStep, rule: ScoreRule
) -> torch.Tensor:
    """Attend for a step with a score rule; keys and values are in the cache already.

    Shape: query [heads, rows, key dim]. Returns [rows, heads, value dim]; rows that belong to neither decode nor a
    segment are not written.
    """
    kept, rows = step.cache.layers[layer], step.decode_rows
    kernel = step.decode if isinstance(step.decode, RuledDecode) else None
    if kernel is not None and not kernel.takes_rules:
        kernel = None
    if kernel is not None and not step.segments:
        return kernel.by_rule(query.transpose(0, 1), layer, step, rule)
    out = query.new_empty(query.shape[1], query.shape[0], kept.value_dim)
    if kernel is not None and rows:
        out[:rows] = kernel.by_rule(query[:, :rows].transpose(0, 1), layer, step, rule)
    elif rows and rule.window is None and _is_plain_within_window(rule, kept):
        # Only chunks differ: images that see each other.
        out[:rows] = step.decode(query[:, :rows].transpose(0, 1), layer, step, rule.scaling)
    elif rows:
        if len(step.contexts) < rows:
            raise RuntimeError("no kernel for this score rule can be captured in a CUDA graph")
        decoding, index = (
            query[:, :rows].transpose(0, 1),
            step.context_index(rule.window, query.device),
        )
        out[:rows] = decode_by_rule(decoding, kept, index, rule)
    prefill = None
    if isinstance(step.prefill, RuledPrefill) and kept.keys.shape == kept.values.shape:
        prefill = step.prefill.by_rule
    elif isinstance(step.prefill, WindowedPrefill) and step.prefill.takes_windows:
        windowed = rule.window is not None and _is_plain_within_window(rule, kept)
        prefill = step.prefill.in_window if windowed else None
    for segment in step.segments:
        part = slice(segment.start, segment.stop)
        if prefill is not None and not segment.bidirectional_spans:
            found = prefill(query[:, part], layer, segment, step, rule)
            out[part] = found.transpose(0, 1)
        else:
            out[part] = prefill_by_rule(
                query[:, part], kept, segment.slots(), rule, segment.bidirectional_spans
            )
    return out


def _is_plain_within_window(rule: ScoreRule, kept: LayerKv) -> bool:
    """Return whether attention is plain, but for a window if there is one."""
    return rule.softcap is None and rule.sinks is None and kept.keys.shape == kept.values.shape


def register() -> None:
    """Register `attend` with transformers as `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
