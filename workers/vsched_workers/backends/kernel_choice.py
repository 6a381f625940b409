"""Which attention kernel runs: what the configuration names, or else the fastest that gives the right answer here.

Importing a kernel does not tell whether it runs: on a GPU that depends on the device, the type, the heads and the size
of a block. So there `auto` tries each on the device, over the KV cache that was just built, compares it with attention
by gather, and times it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import torch

from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu.modules import MakeOwn
from vsched_workers.batching.paged_attention import (
    DecodeKernel,
    KvCache,
    PagedStep,
    PatchKernel,
    PrefillKernel,
    Segment,
    decode_by_gather,
    prefill_by_gather,
)
from vsched_workers.memory.device_memory import typed_out_of_memory

logger = logging.getLogger(__name__)
KERNELS = ("auto", "exact", "numba", "triton", "varlen")

TRIAL_ROWS, TRIAL_CONTEXT = 8, 1024
"""What a kernel is tried on: so many sequences of so many tokens, or as many as the cache holds."""

TRIAL_RUNS = 10
_WITHIN = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}

Kernel = TypeVar("Kernel", DecodeKernel, PrefillKernel)
Timer = Callable[[Callable[[], object]], float]
"""Runs something and returns the seconds that the device took."""


def choose_decode(settings: WorkerSettings, dtype: torch.dtype) -> DecodeKernel:
    """Return the decode kernel that `settings.attention` asks for; `auto` takes the fastest that is to be had here.

    On a GPU, what `auto` gives is tried against others by `try_kernels` when there is a cache.

    Raises:
        ConfigError: When there is no such kernel, or it cannot run here.
    """
    choice = settings.attention
    if choice not in KERNELS:
        raise ConfigError(
            f"generate.attention: unknown kernel {choice!r}. Known: {', '.join(KERNELS)}."
        )
    if choice == "exact":
        return decode_by_gather
    wanted = choice
    if choice == "auto":
        half_or_single = dtype in {torch.float32, torch.bfloat16}
        wanted = "triton" if _on_cuda(settings) else "numba" if half_or_single else "exact"
    try:
        return _load_kernel(wanted, settings, dtype)
    except ImportError as error:
        if choice == "auto":
            return decode_by_gather
        raise ConfigError(
            f"generate.attention: {choice!r} is not installed. Remedy: install it, or use `auto`."
        ) from error


def choose_prefill(settings: WorkerSettings, dtype: torch.dtype) -> PrefillKernel:
    """Return the prefill kernel: torch's own where `exact` is asked for, and else the custom one or oneDNN's."""
    here = settings.device == "cpu" and dtype == torch.bfloat16 and settings.attention != "exact"
    if not here:
        return prefill_by_gather
    try:
        from vsched_workers.backends.cpu.prefill_attention import prefill as custom_prefill
        from vsched_workers.backends.cpu.tiled_attention import prefill as tiled_prefill
    except ImportError:
        return prefill_by_gather
    return custom_prefill if _custom_pays(settings.threads) else tiled_prefill


def choose_patches(threads: int) -> PatchKernel:
    """Return the kernel for the patches of images, in bfloat16 on a CPU."""
    from vsched_workers.backends.cpu import prefill_attention, tiled_attention

    if _custom_pays(threads):
        return prefill_attention.attend_patches
    return tiled_attention.attend_patches


def choose_products(settings: WorkerSettings) -> MakeOwn | None:
    """Return what makes the products of packed weights, in bfloat16 on a CPU, that are not oneDNN's; None for none."""
    if settings.attention == "exact":
        return None
    try:
        from vsched_workers.backends.cpu.products import panel_product
    except ImportError:
        return None
    return functools.partial(panel_product, threads=settings.threads)


def _custom_pays(threads: int) -> bool:
    """Return whether the custom kernel attends for many rows of bfloat16 here, or oneDNN; compile the one that does.

    The custom kernel leaves heads of odd sizes to oneDNN; the profiling run compiles for them.
    """
    from vsched_workers.backends.cpu import operand_choice
    from vsched_workers.backends.cpu.kernels import prefill_attention, softmax

    if not operand_choice.pays_here():
        softmax.warm_up(threads=threads)
        return False
    prefill_attention.warm_up(operand_choice.operand(), threads=threads)
    return True


def _on_cuda(settings: WorkerSettings) -> bool:
    return settings.device.startswith("cuda")


def _load_kernel(kernel: str, settings: WorkerSettings, dtype: torch.dtype) -> DecodeKernel:
    name = str(dtype).removeprefix("torch.")
    if kernel in {"triton", "varlen"} and not _on_cuda(settings):
        raise ConfigError(
            f"generate.attention: {kernel!r} runs on cuda only, not on {settings.device}. "
            "Remedy: use `auto`."
        )
    if kernel == "numba":
        if settings.device != "cpu" or dtype not in {torch.float32, torch.bfloat16}:
            raise ConfigError(
                f"generate.attention: 'numba' runs on cpu with float32 or bfloat16 only, not on "
                f"{settings.device} with {name}. Remedy: use `auto`."
            )
        from vsched_workers.backends.cpu.decode_attention import NumbaDecode

        return NumbaDecode(dtype, settings.threads)
    if kernel == "triton":
        from vsched_workers.backends.cuda.attention import TritonDecode

        processors = torch.cuda.get_device_properties(settings.device).multi_processor_count
        return TritonDecode(processors)
    if kernel == "varlen":
        if dtype == torch.float32:
            raise ConfigError(
                f"generate.attention: 'varlen' runs with 16-bit types only, not with {name}. "
                "Remedy: use `auto`."
            )
        from vsched_workers.backends.cuda.attention import VarlenDecode

        return VarlenDecode()
    return decode_by_gather


def try_kernels(
    settings: WorkerSettings, dtype: torch.dtype, cache: KvCache, heads: int
) -> tuple[DecodeKernel, PrefillKernel]:
    """Return the kernels for a GPU; `auto` tries what there is over a cache, whose first blocks are zeros afterwards.

    Not yet run on a GPU.

    Raises:
        ConfigError: When the configuration names a kernel that there is not.
        DeviceOutOfMemory: When the device's memory ran out.
    """
    if settings.attention == "exact":
        return decode_by_gather, prefill_by_gather
    if settings.attention != "auto":
        decodes = [choose_decode(settings, dtype)]
    else:
        decodes = _loaded([lambda: _load_kernel("triton", settings, dtype)])
        if dtype != torch.float32:
            decodes += _loaded([lambda: _load_kernel("varlen", settings, dtype)])
    prefills: list[PrefillKernel] = [] if dtype == torch.float32 else _loaded([_flash_prefill])
    with Trial.over(cache, heads) as trial:
        if settings.attention == "auto":
            decode = fastest("decode", decodes, decode_by_gather, trial.decode, cuda_seconds)
        else:
            decode = decodes[0]
        return decode, fastest("prefill", prefills, prefill_by_gather, trial.prefill, cuda_seconds)


def _flash_prefill() -> PrefillKernel:
    from vsched_workers.backends.cuda.attention import FlashPrefill

    return FlashPrefill()


def _loaded(loaders: Sequence[Callable[[], Kernel]]) -> list[Kernel]:
    found = []
    for load in loaders:
        try:
            found.append(load())
        except ImportError as error:
            logger.info("an attention kernel is not to be had: %s", error)
    return found


def fastest(
    what: str,
    candidates: Sequence[Kernel],
    plain: Kernel,
    run: Callable[[Kernel], torch.Tensor],
    timer: Timer,
) -> Kernel:
    """Return the fastest of the candidates that give what `plain` gives; `plain` itself where none does.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    expected = run(plain)
    best, least_s = plain, float("inf")
    for kernel in candidates:
        name = type(kernel).__name__
        try:
            with typed_out_of_memory(f"trying {name}"):
                differs = float((run(kernel).float() - expected.float()).abs().max())
                # Written so that a result that is no number is turned down, too.
                if not differs <= _WITHIN[expected.dtype]:
                    logger.warning("%s: %s is wrong by %g here; not used", what, name, differs)
                    continue
                spent_s = timer(functools.partial(run, kernel))
        except DeviceOutOfMemory:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises here, it is not used
            logger.info("%s: %s does not run here: %s", what, name, error)
            continue
        logger.info("%s: %s takes %.0f us", what, name, spent_s * 1e6)
        if spent_s < least_s:
            best, least_s = kernel, spent_s
    if best is plain and candidates:
        logger.warning("%s: attention by gather is used, which is slow on a GPU", what)
    return best


def cuda_seconds(run: Callable[[], object]) -> float:
    """Return the seconds that a GPU takes for it, once it is warm."""
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
class Trial:
    """Random keys and values in the first blocks of a cache, and queries that see them."""

    cache: KvCache
    query: torch.Tensor
    step: PagedStep
    segment: Segment

    @classmethod
    def over(cls, cache: KvCache, heads: int) -> Trial:
        """Fill the first blocks of the first layer, and have rows of decode and half a prompt see all of them."""
        size = cache.block_size
        blocks = min(-(-TRIAL_CONTEXT // size), cache.blocks)
        context = blocks * size
        keys, values = cache.keys[0], cache.values[0]
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
        return cls(cache, query, step, segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for held in (self.cache.keys[0], self.cache.values[0]):
            held[: self.segment.context].zero_()

    def decode(self, kernel: DecodeKernel) -> torch.Tensor:
        """Attend for the decode rows."""
        found: torch.Tensor = kernel(self.query[:TRIAL_ROWS], 0, self.step, self._scaling)
        return found

    def prefill(self, kernel: PrefillKernel) -> torch.Tensor:
        """Attend for the second half of a prompt."""
        first, last = self.segment.first, self.segment.context
        own = [
            held[first:last].transpose(0, 1) for held in (self.cache.keys[0], self.cache.values[0])
        ]
        query = self.query[: last - first].transpose(0, 1)
        found: torch.Tensor = kernel(
            query, own[0], own[1], 0, self.segment, self.step, self._scaling
        )
        return found

    @property
    def _scaling(self) -> float:
        return float(self.query.shape[2] ** -0.5)
