"""Attention on CUDA over the paged KV cache.

`attention_trials` tests each kernel on the device before it is used.

The decode kernels can be captured in a CUDA graph: they do not synchronize, and their allocations and grids depend on
the number of rows and on the width of the block tables, never on context lengths.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vsched_workers.backends.cuda.device import has_triton
from vsched_workers.backends.cuda.products import FastKernel, power_of_two
from vsched_workers.batching.paged_attention import ScoreRule
from vsched_workers.device_copies import sent

if TYPE_CHECKING:
    from vsched_workers.batching.paged_attention import PagedStep, Segment

PARTS_MAX = 64
"""The largest number of parts of a context; each needs memory, and time in the reduction."""

PROGRAMS_OF_SM = 4
"""Programs for each SM that keep it busy; with more, an SM reads no faster, and there is more to reduce."""

FEW_PROGRAMS = 32
"""Programs without a split, up to which a program has eight warps: its parts are short, and latency is all."""

PART_TOKENS_MIN, PART_TOKENS_MAX = 64, 1024
"""Usual lengths of parts, as in `triton_kernels.py`."""

TILE_BYTES = 16 << 10
"""Bytes of keys, and likewise of values, that a program reads at a time."""

GATHERED_BYTES = 256 << 20
"""Keys and values of a layer that are gathered for several chunks at once."""

STAGES = 2
"""Tiles of each that are loaded in parallel (pipeline stages)."""


class KernelMissing(ImportError):
    """A kernel is not installed, or this torch has an older one."""


def varlen_kernel(*needed: str) -> tuple[Any, dict[str, Any]]:
    """Return torch's variable-length attention, and its option for grouped-query attention if it needs one.

    Raises:
        KernelMissing: When it does not have the needed parameters.
    """
    from torch.nn.attention import varlen

    known = inspect.signature(varlen.varlen_attn).parameters
    missing = [name for name in needed if name not in known]
    if missing:
        raise KernelMissing(f"this torch's varlen_attn does not take {', '.join(missing)}")
    return varlen.varlen_attn, {"enable_gqa": True} if "enable_gqa" in known else {}


class TritonDecode:
    """The Triton kernels: an online softmax over each part of a context, and a reduction over the parts."""

    capturable = True
    takes_rules = True

    def __init__(self, processors: int) -> None:
        """Take the GPU's number of SMs, so that small batches can keep all of them busy.

        Raises:
            KernelMissing: When Triton is not installed.
        """
        if not has_triton():
            raise KernelMissing("triton is not installed, or turned off")
        from vsched_workers.backends.cuda.triton_kernels import decode_parts, merge_parts

        self._decode = FastKernel(decode_parts)
        self._merge = FastKernel(merge_parts)
        self._processors = processors

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for a query of the same shape."""
        return self.by_rule(query, layer, step, ScoreRule(scaling))

    def by_rule(
        self, query: torch.Tensor, layer: int, step: PagedStep, rule: ScoreRule
    ) -> torch.Tensor:
        """Return [rows, heads, value dim] for a query [rows, heads, key dim]."""
        if step.on_device is None:  # copied once per step
            step.on_device = sent(step.tables, query.device), sent(step.contexts, query.device)
        tables, contexts = step.on_device
        keys, values = step.cache.keys[layer], step.cache.values[layer]
        query = query.contiguous()
        rows, heads, head_dim = query.shape
        kv_heads, value_dim = keys.shape[1], values.shape[2]
        window, softcap, sinks = rule.window, rule.softcap, rule.sinks
        name = f"decode {rows} {heads} {head_dim} {kv_heads} {value_dim} {window}"
        plan = step.scratch.get(name)
        if plan is None:
            tokens = tables.shape[1] * step.cache.block_size
            plan = step.scratch[name] = self._plan(
                query,
                keys,
                value_dim,
                block_size=step.cache.block_size,
                tokens=tokens if window is None else min(tokens, window),
            )
        split, summed, highest, total, constants, merging = plan
        out = query.new_empty((rows, heads, value_dim))
        self._decode[(rows, kv_heads, split.parts)](
            query,
            keys,
            values,
            tables,
            contexts,
            summed,
            highest,
            total,
            rule.scaling,
            window or 0,
            softcap or 0.0,
            tables.stride(0),
            *split,
            **constants,
            WINDOWED=window is not None,
            CAPPED=softcap is not None,
        )
        self._merge[(rows * heads,)](
            contexts,
            summed,
            highest,
            total,
            total if sinks is None else sinks,
            out,
            window or 0,
            heads,
            *split,
            **merging,
            WINDOWED=window is not None,
            HAS_SINKS=sinks is not None,
        )
        return out

    def _plan(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        value_dim: int,
        *,
        block_size: int,
        tokens: int,
    ) -> tuple[Any, ...]:
        """Return the split, the memory and the constants that layers of a step share, for up to `tokens` tokens."""
        rows, heads, head_dim = query.shape
        kv_heads, itemsize = keys.shape[1], keys.element_size()
        constants = constants_of(heads, kv_heads, head_dim, value_dim, block_size, itemsize)
        split = split_of_contexts(rows * kv_heads, self._processors, tokens=tokens)
        summed = query.new_empty((rows, heads, split.parts, value_dim), dtype=torch.float32)
        highest, total = (
            query.new_empty((rows, heads, split.parts), dtype=torch.float32) for _ in range(2)
        )
        merging = {each: constants[each] for each in ("VALUE_DIM", "VALUE_DIMS", "TOKENS")}
        merging["PARTS"] = power_of_two(split.parts)
        merging["num_warps"] = merge_warps(split.parts, constants["VALUE_DIMS"])
        constants["num_stages"] = STAGES
        constants["num_warps"] = 8 if rows * kv_heads <= FEW_PROGRAMS else 4
        return split, summed, highest, total, constants, merging


class FlashPrefill:
    """Torch's flash attention over the gathered contexts of chunks: torch 2.11 and later, 16-bit types.

    Its causal mask aligns the last query with the last key, as a chunk requires; neither mask nor scores are stored in
    memory. The contexts of several chunks are gathered together if they are not too long.
    """

    takes_windows = True

    def __init__(self) -> None:
        self._attend, self._options = varlen_kernel("scale", "window_size")

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
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        if not segment.whole:
            slots = segment.slots()
            key = step.cache.keys[layer].index_select(0, slots)
            value = step.cache.values[layer].index_select(0, slots)
        spans = self._spans(query, len(key), segment, step)
        return self._causal(query.transpose(0, 1), key, value, spans, scaling).transpose(0, 1)

    def in_window(
        self, query: torch.Tensor, layer: int, segment: Segment, step: PagedStep, rule: ScoreRule
    ) -> torch.Tensor:
        """Return [heads, rows, head dim] for a query of the same shape; only the window's tokens are read."""
        assert rule.window is not None, "otherwise it is a plain layer"
        slots = segment.slots()[max(0, segment.first - rule.window + 1) :]
        key, value = (
            held[layer].index_select(0, slots) for held in (step.cache.keys, step.cache.values)
        )
        spans = self._spans(query, len(key), segment, step)
        packed = query.transpose(0, 1)
        found = self._causal(packed, key, value, spans, rule.scaling, window=rule.window)
        return found.transpose(0, 1)

    def _spans(
        self, query: torch.Tensor, context: int, segment: Segment, step: PagedStep
    ) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Return the bounds of one chunk's queries and of its context, and the length of each."""
        rows, name = query.shape[1], f"bounds {segment.start} {context}"
        bounds = step.scratch.get(name)
        if bounds is None:
            bounds = sent(np.array([[0, rows], [0, context]], dtype=np.int32), query.device)
            step.scratch[name] = bounds
        return bounds[0], bounds[1], rows, context

    def joins(self, step: PagedStep) -> bool:
        """Return whether the gathered contexts of a step's chunks fit into the memory limit for that."""
        if "joins" not in step.scratch:
            largest = max(keys[0].nbytes for keys in step.cache.keys)
            tokens = sum(segment.context for segment in step.segments)
            fits = 2 * tokens * largest <= GATHERED_BYTES
            step.scratch["joins"] = len(step.segments) > 1 and fits
        joins: bool = step.scratch["joins"]
        return joins

    def attend_all(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for the tokens of all chunks, of the same shape."""
        if "chunks" not in step.scratch:
            lengths = [[each.stop - each.start, each.context] for each in step.segments]
            ends = np.cumsum([[0, 0], *lengths], axis=0, dtype=np.int32)
            slots = torch.cat([segment.slots() for segment in step.segments])
            bounds = sent(np.ascontiguousarray(ends.T), query.device)
            step.scratch["chunks"] = slots, bounds, *np.max(lengths, axis=0).tolist()
        slots, bounds, rows, context = step.scratch["chunks"]
        key, value = (
            held[layer].index_select(0, slots) for held in (step.cache.keys, step.cache.values)
        )
        return self._causal(query, key, value, (bounds[0], bounds[1], rows, context), scaling)

    def _causal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: tuple[torch.Tensor, torch.Tensor, int, int],
        scaling: float,
        *,
        window: int = 0,
    ) -> torch.Tensor:
        """Attend within spans: bounds of the queries and of the contexts, and the largest length of each."""
        size = (window - 1, 0)  # earlier and later tokens that a token attends to; -1 is all
        out: torch.Tensor = self._attend(
            query, key, value, *spans, scale=scaling, window_size=size, **self._options
        )
        return out


class DirectFlashPrefill(FlashPrefill):
    """The same without the operator around it, whose checks take several times as long as the launch."""

    def __init__(self) -> None:
        found = getattr(torch.ops.aten, "_flash_attention_forward", None)
        if found is None:
            raise KernelMissing("this torch has no operator of flash attention")
        self._forward: Any = found

    def _causal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: tuple[torch.Tensor, torch.Tensor, int, int],
        scaling: float,
        *,
        window: int = 0,
    ) -> torch.Tensor:
        out: torch.Tensor = self._forward(
            query,
            key,
            value,
            *spans,
            dropout_p=0.0,
            is_causal=not window,
            return_debug_mask=False,
            scale=scaling,
            window_size_left=window - 1,
            window_size_right=0,
        )[0]
        return out


def constants_of(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, block_size: int, itemsize: int
) -> dict[str, int]:
    """Return the compile-time constants of the decode kernel."""
    # The tensor cores need at least 16 rows, and as many tokens.
    dims, value_dims = (max(16, power_of_two(each)) for each in (head_dim, value_dim))
    return {
        "BLOCK_SIZE": block_size,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "GROUP_ROWS": max(16, power_of_two(heads // kv_heads)),
        "HEAD_DIM": head_dim,
        "DIMS": dims,
        "VALUE_DIM": value_dim,
        "VALUE_DIMS": value_dims,
        "TOKENS": min(64, max(16, TILE_BYTES // (max(dims, value_dims) * itemsize))),
    }


class ContextSplit(NamedTuple):
    """The split of contexts: the largest number of parts, and the number if all contexts are equally long."""

    parts: int
    usual_parts: int


def split_of_contexts(programs: int, processors: int, *, tokens: int) -> ContextSplit:
    """Return the split of contexts of up to `tokens` tokens, for `programs` programs without it.

    It does not depend on context lengths, as required by captured steps; the kernels find the length of the parts.
    """
    usual = max(1, min(PROGRAMS_OF_SM * processors // programs, -(-tokens // PART_TOKENS_MIN)))
    parts = min(PARTS_MAX, max(usual, -(-tokens // PART_TOKENS_MAX)))
    return ContextSplit(parts, min(usual, parts))


def merge_warps(parts: int, dims: int) -> int:
    """Return the warps of a program of the reduction: with many rows, which have few parts, one is enough."""
    most = max(4, dims // 64)  # a thread keeps up to 128 values in registers
    return max(1, min(most, power_of_two(parts) * dims // 1024))
