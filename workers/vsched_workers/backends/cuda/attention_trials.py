"""Trials of a GPU's kernels before a model is prepared with them.

Whether an importable kernel runs depends on the device, the data type, the heads and the block size. So `auto` runs
each attention kernel over the new KV cache, compares it with attention by gather, and times it. Triton kernels of other
operations are compared with torch's own.

Trials and choice are tested with kernels on a CPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch

from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cuda.attention import (
    DirectFlashPrefill,
    FlashPrefill,
    KernelMissing,
    TritonDecode,
    VarlenDecode,
)
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import (
    AttentionKernels,
    ContextIndex,
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

TRIAL_RUNS = 10
_WITHIN = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}

Kernel = TypeVar("Kernel", DecodeKernel, PrefillKernel)
Timer = Callable[[Callable[[], object]], float]
"""Runs a function and returns the device time in seconds."""


def load_decode(settings: WorkerSettings) -> DecodeKernel:
    """Return the configured decode kernel.

    Raises:
        ConfigError: When it is not installed.
    """
    try:
        if settings.attention == "triton":
            return _triton_decode(settings.device)
        if settings.attention == "varlen":
            return VarlenDecode()
    except KernelMissing as error:
        raise ConfigError(
            f"generate.attention: {settings.attention!r} is not installed. "
            "Remedy: install it, or use `auto`."
        ) from error
    assert settings.attention == "exact", f"{settings.attention} must be tried out first"
    return decode_by_gather


def _triton_decode(device: str) -> DecodeKernel:
    return TritonDecode(torch.cuda.get_device_properties(device).multi_processor_count)


def try_kernels(
    settings: WorkerSettings, dtype: torch.dtype, cache: KvCache, heads: int, *, ruled: bool
) -> AttentionKernels:
    """Return the configured kernels; `auto` is the fastest kernel with correct results.

    Trials run on the cache; its first blocks are zeroed afterwards. `ruled` includes a trial with score rules.

    Raises:
        ConfigError: When the configured kernel is not installed, or is wrong on this device.
        DeviceOutOfMemory: When the device's memory ran out.
    """
    if settings.attention == "exact":
        return AttentionKernels(decode_by_gather, prefill_by_gather)
    has_halves = dtype != torch.float32
    decodes: list[DecodeKernel] = []
    if settings.attention == "auto":
        loaders: list[Callable[[], DecodeKernel]] = [lambda: _triton_decode(settings.device)]
        decodes = _loaded([*loaders, VarlenDecode] if has_halves else loaders)
    prefills: list[PrefillKernel] = (
        _loaded([DirectFlashPrefill, FlashPrefill]) if has_halves else []
    )
    with ExitStack() as stack:
        layers = layers_of_shapes(cache, heads)
        trials = [stack.enter_context(AttentionTrial.over(cache, heads, layer)) for layer in layers]
        plain = [trial for trial in trials if trial.plain]

        def decoded(kernel: DecodeKernel) -> torch.Tensor:
            return _joined([trial.decode(kernel) for trial in plain])

        def prefilled(kernel: PrefillKernel) -> torch.Tensor:
            return _joined([trial.prefill(kernel) for trial in plain])

        if settings.attention == "auto":
            decode = fastest("decode", decodes, decode_by_gather, decoded, cuda_seconds)
        else:
            decode = load_decode(settings)
            require_right(settings.attention, decode, cache, decoded)
        prefill = fastest("prefill", prefills, prefill_by_gather, prefilled, cuda_seconds)
        if ruled and isinstance(decode, RuledDecode):
            decode.takes_rules = all(
                _is_right("decode by score rules", decode, trial.by_rule) for trial in trials
            )
        if ruled and isinstance(prefill, WindowedPrefill):
            prefill.takes_windows = all(
                _is_right("prefill in a window", prefill, trial.in_window) for trial in plain
            )
    return AttentionKernels(decode, prefill)


def layers_of_shapes(cache: KvCache, heads: int) -> list[int]:
    """Return the first layer of each shape that has keys."""
    first: dict[object, int] = {}
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if keys[0].numel() and heads % keys.shape[1] == 0:
            first.setdefault((keys.shape, values.shape), layer)
    return list(first.values())


def _joined(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in results]) if results else torch.zeros(1)


def _is_right(what: str, kernel: Any, run: Callable[[Any], torch.Tensor]) -> bool:
    """Return whether a kernel attends as torch does, which None runs.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    fault = _fault(kernel, run(None), run)
    if fault is not None:
        name = type(kernel).__name__
        logger.log(fault.level, "%s: %s %s here; not used", what, name, fault.what)
    return fault is None


def _loaded(loaders: Sequence[Callable[[], Kernel]]) -> list[Kernel]:
    found = []
    for load in loaders:
        try:
            found.append(load())
        except KernelMissing as error:
            logger.info("attention kernel not available: %s", error)
    return found


def fastest(
    what: str,
    candidates: Sequence[Kernel],
    plain: Kernel,
    run: Callable[[Kernel], torch.Tensor],
    timer: Timer,
) -> Kernel:
    """Return the fastest candidate with the same results as `plain`, or `plain` itself if there is none.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    expected = run(plain)
    best, least_s = plain, float("inf")
    for kernel in candidates:
        name = type(kernel).__name__
        fault = _fault(kernel, expected, run)
        if fault is not None:
            logger.log(fault.level, "%s: %s %s here; not used", what, name, fault.what)
            continue
        with typed_out_of_memory(f"trying {name}"):
            spent_s = timer(functools.partial(run, kernel))
        logger.info("%s: %s takes %.0f us", what, name, spent_s * 1e6)
        if spent_s < least_s:
            best, least_s = kernel, spent_s
    if best is plain and candidates:
        logger.warning("%s: attention by gather is used, which is slow on a GPU", what)
    return best


def require_right(
    name: str,
    kernel: DecodeKernel,
    cache: KvCache,
    run: Callable[[DecodeKernel], torch.Tensor],
) -> None:
    """Raise an error if a configured decode kernel is wrong over this cache.

    Raises:
        ConfigError: With the fault.
        DeviceOutOfMemory: When the device's memory ran out.
    """
    fault = _fault(kernel, run(decode_by_gather), run)
    if fault is not None:
        larger = "generate.block_size = 256, or " if cache.block_size % 256 else ""
        raise ConfigError(
            f"generate.attention: {name!r} {fault.what} on {cache.keys[0].device} with {cache.keys[0].dtype} and "
            f"blocks of {cache.block_size} tokens. Remedy: use {larger}`auto`."
        )


class _Fault(NamedTuple):
    """A fault of a kernel, and the level to log it at."""

    level: int
    what: str


def _fault(
    kernel: Kernel, expected: torch.Tensor, run: Callable[[Kernel], torch.Tensor]
) -> _Fault | None:
    """Return the fault in a kernel's results; None if there is none.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    try:
        with typed_out_of_memory(f"trying {type(kernel).__name__}"):
            run(kernel)  # compiles; later launches skip Triton's dispatch
            differs = float((run(kernel).float() - expected.float()).abs().max())
    except DeviceOutOfMemory:
        raise
    except Exception as error:  # noqa: BLE001  # kernels may raise anything
        return _Fault(logging.INFO, f"does not run ({error})")
    # Written so that NaNs are rejected, too.
    if not differs <= _WITHIN[expected.dtype]:
        return _Fault(logging.WARNING, f"is wrong by {differs:g}")
    return None


def cuda_seconds(run: Callable[[], object]) -> float:
    """Return the device time of a call on a warm GPU, in seconds."""
    cuda = torch.cuda
    run()
    start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    for _ in range(TRIAL_RUNS):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / TRIAL_RUNS


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
        index = ContextIndex.of(
            step.tables,
            step.contexts,
            block_size=self.cache.block_size,
            window=window,
            device=query.device,
        )
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


WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Accepted difference of results, by the data type of a model."""

_RUNS = 2
"""The first launch is by Triton, later ones without its dispatch (`products.FastKernel`)."""


def passes(
    trial: Callable[[], float], dtype: torch.dtype, *, doing: str, without: str, kernels: str
) -> bool:
    """Return whether kernels run and agree with torch; otherwise log a warning that begins with `without`.

    `trial` returns the largest difference; `kernels` names them in the warning.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out while `doing` so.
    """
    try:
        with typed_out_of_memory(doing):
            found = [trial() for _ in range(_RUNS)]
    except DeviceOutOfMemory:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler may raise anything
        logger.warning("%s, which is slower: %s", without, error)
        return False
    for apart in found:
        if not apart <= WITHIN[dtype]:  # rejects NaNs, too
            logger.warning("%s: %s are wrong by %.2g", without, kernels, apart)
            return False
    return True
