"""Trials of a GPU's kernels before a model is prepared with them.

Whether an importable kernel runs and is right depends on the device, the data type, the heads and the block size. So
attention kernels run over the new KV cache, and are compared with attention by gather. Triton kernels of other
operations are compared with torch's own.

Trials are tested with kernels on a CPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch

from vsched.errors import DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cuda.attention import (
    DirectFlashPrefill,
    FlashPrefill,
    KernelMissing,
    TritonDecode,
)
from vsched_workers.backends.cuda.device import has_triton
from vsched_workers.backends.cuda.products import FastKernel
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import (
    AttentionKernels,
    DecodeKernel,
    PagedStep,
    PrefillKernel,
    RuledDecode,
    ScoreRule,
    Segment,
    WindowedPrefill,
    decode_by_rule,
    prefill_by_rule,
)
from vsched_workers.memory.out_of_memory import typed_out_of_memory

logger = logging.getLogger(__name__)

TRIAL_ROWS, TRIAL_CONTEXT = 8, 1024
"""Sequences of a trial, and the context length of each, which is less if the cache is smaller."""

WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Accepted difference of results, by the data type of a model."""

_RUNS = 2
"""The first launch is by Triton, later ones without its dispatch (`products.FastKernel`)."""

Kernel = TypeVar("Kernel", DecodeKernel, PrefillKernel)
TritonKernels = TypeVar("TritonKernels", bound=tuple[Any, ...])


def passes(trial: Callable[[], float], dtype: torch.dtype, *, without: str) -> bool:
    """Return whether kernels run and agree with torch; otherwise log a warning that begins with `without`.

    `trial` returns the largest difference.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    try:
        with typed_out_of_memory("trying kernels"):
            found = [trial() for _ in range(_RUNS)]
    except DeviceOutOfMemory:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler may raise anything
        logger.warning("%s, which is slower: %s", without, error)
        return False
    for apart in found:
        if not apart <= WITHIN[dtype]:  # rejects NaNs, too
            logger.warning("%s, which is slower: results are wrong by %.2g", without, apart)
            return False
    return True


def load_kernels(kind: type[TritonKernels]) -> TritonKernels | None:
    """Return the kernels of `triton_kernels.py` that a named tuple has fields for; None without Triton."""
    if not has_triton():
        return None
    from vsched_workers.backends.cuda import triton_kernels

    untyped: Any = kind
    kernels = (FastKernel(getattr(triton_kernels, name)) for name in untyped._fields)
    found: TritonKernels = untyped(*kernels)
    return found


def usable_kernels(
    kind: type[TritonKernels],
    trial: Callable[[TritonKernels, torch.dtype, str], float],
    dtype: torch.dtype,
    device: str,
    *,
    what: str,
) -> TritonKernels | None:
    """Return the kernels of `load_kernels` if they run on a device and agree with torch's own operations.

    `trial` returns the largest difference; `what` names the kernels in the log.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    kernels = load_kernels(kind)
    if kernels is None:
        logger.info("no %s: Triton is not installed, or turned off", what)
        return None
    tried = functools.partial(trial, kernels, dtype, device)
    return kernels if passes(tried, dtype, without=f"no {what}") else None


def try_kernels(
    settings: WorkerSettings, dtype: torch.dtype, cache: KvCache, heads: int, *, ruled: bool
) -> AttentionKernels:
    """Return kernels with correct results over this cache, or attention by gather.

    Trials run on the cache; its first blocks are zeroed afterwards. `ruled` includes a trial with score rules.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    if settings.attention == "exact":
        return AttentionKernels(decode_by_gather, prefill_by_gather)
    with ExitStack() as stack:
        layers = layers_of_shapes(cache, heads)
        trials = [stack.enter_context(AttentionTrial.over(cache, heads, layer)) for layer in layers]
        plain = [trial for trial in trials if trial.plain]

        def decoded(kernel: DecodeKernel) -> torch.Tensor:
            return _joined([trial.decode(kernel) for trial in plain])

        def prefilled(kernel: PrefillKernel) -> torch.Tensor:
            return _joined([trial.prefill(kernel) for trial in plain])

        decode = first_right(
            "decode", [lambda: _triton_decode(settings.device)], decode_by_gather, decoded
        )
        flash = [] if dtype == torch.float32 else [DirectFlashPrefill, FlashPrefill]
        prefill = first_right("prefill", flash, prefill_by_gather, prefilled)
        if ruled and isinstance(decode, RuledDecode):
            decode.takes_rules = all(
                _agrees("decode by score rules", decode, trial.by_rule, None) for trial in trials
            )
        if ruled and isinstance(prefill, WindowedPrefill):
            prefill.takes_windows = all(
                _agrees("prefill in a window", prefill, trial.in_window, None) for trial in plain
            )
    return AttentionKernels(decode, prefill)


def _triton_decode(device: str) -> DecodeKernel:
    return TritonDecode(torch.cuda.get_device_properties(device).multi_processor_count)


def layers_of_shapes(cache: KvCache, heads: int) -> list[int]:
    """Return the first layer of each shape that has keys."""
    first: dict[object, int] = {}
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if keys[0].numel() and heads % keys.shape[1] == 0:
            first.setdefault((keys.shape, values.shape), layer)
    return list(first.values())


def _joined(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in results]) if results else torch.zeros(1)


def first_right(
    what: str,
    loaders: Sequence[Callable[[], Kernel]],
    plain: Kernel,
    run: Callable[[Kernel], torch.Tensor],
) -> Kernel:
    """Return the first kernel that is installed and has the same results as `plain`; `plain` itself if there is none.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    for load in loaders:
        try:
            kernel = load()
        except KernelMissing as error:
            logger.info("%s: attention kernel not available: %s", what, error)
            continue
        if _agrees(what, kernel, run, plain):
            logger.info("%s: %s is used", what, type(kernel).__name__)
            return kernel
    if loaders:
        logger.warning("%s: attention by gather is used, which is slow on a GPU", what)
    return plain


def _agrees(what: str, kernel: Any, run: Callable[[Any], torch.Tensor], plain: Any) -> bool:
    """Return whether a kernel attends as `plain` does.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    expected = run(plain)

    def trial() -> float:
        return float((run(kernel).float() - expected.float()).abs().max())

    return passes(trial, expected.dtype, without=f"{what} without {type(kernel).__name__}")


@dataclass
class AttentionTrial:
    """Random keys and values in the first blocks of a cache, and queries of one layer that attend to them."""

    cache: KvCache
    layer: int
    query: torch.Tensor
    step: PagedStep
    segment: Segment

    @classmethod
    def over(cls, cache: KvCache, heads: int, layer: int = 0) -> AttentionTrial:
        """Fill the first blocks of a layer; decode rows and half a prompt attend to all of them."""
        size = cache.block_size
        blocks = min(-(-TRIAL_CONTEXT // size), cache.blocks)
        context = blocks * size
        keys, values = cache.keys[layer], cache.values[layer]
        chance = torch.Generator().manual_seed(0)
        for held in (keys, values):
            held[:context].copy_(torch.randn(held[:context].shape, generator=chance))
        table: np.ndarray = np.arange(blocks, dtype=np.int32)
        step = PagedStep(
            cache=cache,
            decode=decode_by_gather,
            prefill=prefill_by_gather,
            slots=torch.empty(0, dtype=torch.int64),
            decode_rows=TRIAL_ROWS,
            tables=np.tile(table, (TRIAL_ROWS, 1)),
            contexts=np.linspace(1, context, TRIAL_ROWS).astype(np.int32),
            segments=[],
        )
        segment = Segment(
            table,
            start=0,
            first=context // 2,
            last=context,
            block_size=size,
            device=str(keys.device),
        )
        shape = (max(context - context // 2, TRIAL_ROWS), heads, keys.shape[2])
        query = torch.randn(shape, generator=chance).to(device=keys.device, dtype=keys.dtype)
        return cls(cache, layer, query, step, segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._kept:
            held[: self.segment.context].zero_()

    def decode(self, kernel: DecodeKernel) -> torch.Tensor:
        """Attend for the decode rows."""
        query = self.query[:TRIAL_ROWS]
        found: torch.Tensor = kernel(query, self.layer, self.step, self._scaling)
        return found

    def prefill(self, kernel: PrefillKernel) -> torch.Tensor:
        """Attend for the second half of a prompt."""
        first, last = self.segment.first, self.segment.context
        own = [held[first:last].transpose(0, 1) for held in self._kept]
        query = self.query[: last - first].transpose(0, 1)
        found: torch.Tensor = kernel(
            query, own[0], own[1], self.layer, self.segment, self.step, self._scaling
        )
        return found

    def by_rule(self, kernel: RuledDecode | None) -> torch.Tensor:
        """Attend for the decode rows with a window, soft-capping and sinks; None is attention by torch."""
        query, step = self.query[:TRIAL_ROWS], self.step
        sinks = torch.linspace(-1, 1, query.shape[1]).to(query)
        window = self.segment.context // 2 + 1
        rule = ScoreRule(self._scaling, window, softcap=5.0, sinks=sinks)
        if kernel is not None:
            return kernel.by_rule(query, self.layer, step, rule)
        index = step.context_index(window, query.device)
        return decode_by_rule(query, self.cache.layers[self.layer], index, rule)

    def in_window(self, kernel: WindowedPrefill | None) -> torch.Tensor:
        """Attend for the second half of a prompt in a window; None is attention by torch."""
        query = self.query[: self.segment.context - self.segment.first].transpose(0, 1)
        rule = ScoreRule(self._scaling, window=self.segment.context // 3 + 1)
        if kernel is not None:
            return kernel.in_window(query, self.layer, self.segment, self.step, rule)
        kept = self.cache.layers[self.layer]
        return prefill_by_rule(query, kept, self.segment.slots(), rule).transpose(0, 1)

    @property
    def plain(self) -> bool:
        """Whether kernels without rules may read the layer: its values are as wide as its keys."""
        keys, values = self._kept
        return keys.shape == values.shape

    @property
    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.keys[self.layer], self.cache.values[self.layer]

    @property
    def _scaling(self) -> float:
        return float(self.query.shape[2] ** -0.5)
