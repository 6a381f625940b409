"""The compiled kernels of a model, by name: to load in a rank, or to compile in child processes, on all cores, before.

A kernel takes seconds of a core, and the compiler 200 MiB. So child processes compile on all cores, and a rank reads
the results from disk (`kernel_store.py`). If that fails, the rank compiles each kernel on first use.

The processes are forked from one (`python -m vsched_workers.backends.cpu.compiling PROCESSES`), which has imported the
libraries and has one thread. It reads the kernels as JSON from standard input and writes the index of each compiled
kernel to standard output, one per line. All end with their parent process.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy.typing as npt
import torch

from vsched.worker.contract import Progress, WorkerSettings
from vsched.worker.memory import host_available
from vsched.worker.spec import usable_cores
from vsched_workers.backends.cpu import recurrences
from vsched_workers.backends.cpu.attention import (
    NumbaDecode,
    fits,
    operand,
    sample_cache,
)
from vsched_workers.backends.cpu.compiled_step import step as compiled_step
from vsched_workers.backends.cpu.kernel_store import kernel_folder, processor
from vsched_workers.backends.cpu.kernels import experts, prefill_attention, sampling
from vsched_workers.backends.cpu.kernels.bf16 import BF16
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.low_rank import add_low_rank
from vsched_workers.backends.cpu.kernels.norm import add_norm, add_normed, norm_parts
from vsched_workers.backends.cpu.kernels.prefill_attention import any_arguments
from vsched_workers.backends.cpu.kernels.rope import rope_patches, rope_prefill
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.language_layers import GATED
from vsched_workers.backends.cpu.products import (
    UNSCALED,
    QuantizedProduct,
    make_product,
    quantizes_activations,
    round_groups,
    widens_in_tiles,
)
from vsched_workers.backends.cpu.tiles.attention import attend_in_tiles
from vsched_workers.backends.cpu.tiles.kernel import has_tiles
from vsched_workers.backends.cpu.vision_layers import activation_of, can_fuse, has_bias, mlp_parts
from vsched_workers.families.decoders import Decoder, head_dim
from vsched_workers.families.generic import STATEFUL, layer_kinds
from vsched_workers.quantized.layers import HEAD_FORMAT
from vsched_workers.quantized.schemes import FOUR_BITS
from vsched_workers.quantized.weights import QuantizedWeight

_ACTIVATIONS = {each.py_func.__name__: each for each in GATED.values()}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Entries of configurations with the number of experts."""
_INPUTS = 64
"""Inputs of the weight used for compilation."""

Need = tuple[str, ...]
"""A kernel for one combination of argument types: its name in `KERNELS`, and the words that select the variant."""


def language_needs(
    settings: WorkerSettings,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    config: Any,
    decoder: Decoder | None,
    kinds: Sequence[str],
) -> Iterator[Need]:
    """Yield the kernels of a language model.

    `config` is the model's configuration, `decoder` describes its architecture if known, and `kinds` are the
    quantization formats of its checkpoint's weights.
    """
    kept = _word(kv_dtype)
    made = [settings.weights, HEAD_FORMAT] if settings.quantizes else []
    yield ("sampler",)
    yield from _product_needs(settings, dtype, [*kinds, *made])
    if dtype == torch.bfloat16:
        yield ("greedy sampler",)
        layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
        if any(fits(head_dim(each)) for each in layers) and not settings.deterministic:
            yield _many_rows_need()
    if dtype == torch.bfloat16 and any(getattr(config, name, None) for name in _EXPERTS):
        yield ("experts",)
    if STATEFUL & {*layer_kinds(config)}:
        for name in sorted(recurrences.KERNELS):
            yield ("recurrence", name, _word(dtype))
    if settings.adapters and dtype == torch.bfloat16:
        yield ("low rank",)
    unfused = decoder is None or (decoder.experts and not fuses_mixtures(settings, dtype))
    if dtype != torch.bfloat16 or decoder is None or unfused or decoder.unfit(config):
        yield ("decode attention of modules", _word(dtype), kept)
        if dtype == torch.bfloat16:
            yield ("norms of all kinds",)
        return
    yield ("norm",)
    yield ("rope", kept)
    if not decoder.adds_plainly or decoder.norms_all_heads:
        yield ("norms of all kinds",)
    yield ("activation", _name(GATED[decoder.activation(config)]))
    yield ("decode attention", kept)
    if settings.ranks == 1 and not decoder.experts:
        yield ("decode step", kept)


def fuses_mixtures(settings: WorkerSettings, dtype: torch.dtype) -> bool:
    """Return whether layers with mixtures of experts are fused, but for the experts."""
    return dtype == torch.bfloat16 and not settings.adapters and not settings.deterministic


def tower_needs(settings: WorkerSettings, dtype: torch.dtype, tower: Any) -> Iterator[Need]:
    """Yield the kernels of a vision tower, or of a model with one."""
    yield from _product_needs(settings, dtype, [settings.weights] if settings.quantizes else [])
    if dtype != torch.bfloat16:
        return
    yield _many_rows_need(deterministic=settings.deterministic)
    activations = [parts[2] for each in tower.modules() if (parts := mlp_parts(each)) is not None]
    if can_fuse(tower):
        yield ("norms of all kinds" if has_bias(tower.blocks[0].norm1) else "norm",)
        activations.append(activation_of(tower.blocks[0].mlp.act_fn))
        yield ("rope of patches",)
    yield from (("activation", _name(each)) for each in dict.fromkeys(activations))
    if settings.adapters:
        yield ("low rank",)


def _many_rows_need(*, deterministic: bool = False) -> Need:
    """Return the kernel of bfloat16 attention with many rows, of chunks or images."""
    if has_tiles() and not deterministic:
        return ("attention in tiles",)
    return ("prefill attention",)


def _product_needs(
    settings: WorkerSettings, dtype: torch.dtype, kinds: Sequence[str]
) -> Iterator[Need]:
    """Yield the kernels of products with activations of a type, for quantized weights of these kinds and others."""
    activations = "int8" if quantizes_activations(settings.activations, dtype) else "float"
    if settings.weights == "int4":
        yield ("rounding to int4",)
    for kind in dict.fromkeys(kinds):
        yield ("product", _word(dtype), kind, activations)
        if widens_in_tiles(settings, dtype):
            yield ("product in tiles", kind)
    # In a quantized model, unquantized weights use the same kind of product, in float32 as well.
    if dtype == torch.bfloat16 and has_bf16_dot():
        yield ("product of panels",)
    elif kinds or dtype == torch.bfloat16:
        yield ("product", _word(dtype), _word(dtype))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(kernel: Any) -> str:
    name: str = kernel.py_func.__name__
    return name


def _cached(kept: str) -> npt.NDArray[Any]:
    return sample_cache(getattr(torch, kept))


def _load_product(rows: str, kind: str, activations: str = "float") -> None:
    dtype: torch.dtype = getattr(torch, rows)
    weight: QuantizedWeight | torch.Tensor = torch.zeros(1, _INPUTS, dtype=dtype)
    if kind not in UNSCALED:
        weight = _quantized_zeros(kind, dtype)
    int8_activations = activations == "int8"
    product = QuantizedProduct(weight, None, threads=1, int8_activations=int8_activations)
    product(torch.zeros(1, _INPUTS, dtype=dtype))


def _load_tiles(kind: str) -> None:
    weight = _quantized_zeros(kind, torch.bfloat16)
    product = QuantizedProduct(weight, None, threads=1, tiles=True)
    product(torch.zeros(product.many_rows_min, _INPUTS).bfloat16())


def _quantized_zeros(kind: str, dtype: torch.dtype) -> QuantizedWeight:
    return QuantizedWeight(
        kind=kind,
        values=torch.zeros(
            *(1, _INPUTS // 2 if kind in FOUR_BITS else _INPUTS),
            dtype=torch.int8 if kind == "int8" else torch.uint8,
        ),
        scales=torch.ones(1, 1, dtype=torch.float32 if kind == "fp8" else torch.float16),
        group=_INPUTS,
        inputs=_INPUTS,
        dtype=dtype,
    )


def _load_panels() -> None:
    made = make_product(torch.zeros(_INPUTS, _INPUTS).bfloat16(), None, threads=1)
    made(torch.zeros(1, _INPUTS).bfloat16())


KERNELS: Mapping[str, Callable[..., object]] = {
    "decode attention": lambda kept: decode.address_of(_cached(kept), _cached(kept)),
    "sampler": sampling.warm_up,
    "decode attention of modules": lambda dtype, kept: NumbaDecode(
        getattr(torch, dtype), getattr(torch, kept), 1
    ).warm_up(),
    "prefill attention": lambda: prefill_attention.attend.address_of(any_arguments(operand())),
    "attention in tiles": lambda: attend_in_tiles.address_of(any_arguments(BF16)),
    "product": _load_product,
    "product of panels": _load_panels,
    "recurrence": lambda name, dtype: recurrences.warm_up(name, getattr(torch, dtype)),
    "experts": experts.warm_up,
    "rope": lambda kept: rope_prefill.address_of(_cached(kept), _cached(kept)),
    "norms of all kinds": lambda: (add_normed.address_of(), norm_parts.address_of()),
    "decode step": lambda kept: compiled_step.compile_for(_cached(kept)),
    "low rank": add_low_rank.address_of,
    "product in tiles": _load_tiles,
    "rope of patches": rope_patches.address_of,
    "norm": add_norm.address_of,
    "activation": lambda name: _ACTIVATIONS[name].address_of(),
    "greedy sampler": sampling.warm_up_greedy,
    "rounding to int4": lambda: round_groups(1, torch.zeros(1, 1, _INPUTS)),
}
"""Functions that read a kernel from disk or compile it; those that take longest, up to 15 s of a 3 GHz core, first."""


CHILD_BYTES = 512 << 20
"""Memory of a compiling process: libraries and the compiler."""
LOCK_S = 600.0
"""Maximum wait for another process that compiles for this processor; then both compile."""
_POLL_S = 0.2


def compile_ahead(wanted: Sequence[Need], progress: Progress) -> int:
    """Compile the kernels that are not on disk; return their number.

    Does nothing if the folder is not writable; the rank then compiles them, as it does if a child fails.
    """
    folder = kernel_folder()
    if folder is None or not os.access(folder, os.W_OK) or not missing(wanted, folder):
        return 0
    try:
        lock = open(folder / "compiling", "w", encoding="ascii")  # noqa: SIM115 - closed below
    except OSError:
        return 0
    with lock:
        _wait_for(lock, progress)
        found = missing(wanted, folder)
        if found:
            _compile(found, folder, progress)
        return len(found)


def missing(wanted: Sequence[Need], folder: Path) -> list[Need]:
    """Return the kernels, without duplicates, that were never compiled into a folder for this processor."""
    return [each for each in dict.fromkeys(wanted) if not mark_of(each, folder).exists()]


def mark_of(need: Need, folder: Path) -> Path:
    """Return the marker file of a kernel that is in a folder, for this processor."""
    described = repr((need, processor()))
    return folder / f"compiled-{hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}"


def at_once(count: int) -> int:
    """Number of processes that compile at a time, limited by cores and memory."""
    return max(1, min(count, usable_cores(), host_available() // CHILD_BYTES))


def _wait_for(lock: IO[str], progress: Progress) -> None:
    """Wait while another process compiles: it may compile the same kernels, and cores are shared."""
    deadline_s, reported = time.monotonic() + LOCK_S, False
    while time.monotonic() < deadline_s:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not reported:
            progress("waiting for another process that compiles kernels", 0.0)
            reported = True
        time.sleep(_POLL_S)


def _compile(wanted: Sequence[Need], folder: Path, progress: Progress) -> None:
    processes = at_once(len(wanted))
    kernels = "1 kernel" if len(wanted) == 1 else f"{len(wanted)} kernels"
    cores = "1 core" if processes == 1 else f"{processes} cores"
    what = f"compiling {kernels} for this processor, once, on {cores}"
    progress(what, 0.0)
    command = [sys.executable, "-m", "vsched_workers.backends.cpu.compiling"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(  # noqa: S603 - our own words
        [*command, str(processes)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as children:
        assert children.stdin is not None
        assert children.stdout is not None
        children.stdin.write(msgspec.json.encode(wanted))
        children.stdin.close()
        for done, line in enumerate(children.stdout, 1):
            with suppress(OSError):
                mark_of(wanted[int(line)], folder).touch()
            progress(what, done / len(wanted))


_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compile all, in the order of `KERNELS`; return 1 if any failed."""
    _end_with_parent()
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Need])
    order = [*KERNELS][::-1]
    waiting = sorted(range(len(wanted)), key=lambda index: order.index(wanted[index][0]))
    running: dict[int, int] = {}
    failed = False
    while waiting or running:
        while waiting and len(running) < int(sys.argv[1]):
            index = waiting.pop()
            running[_fork(wanted[index])] = index
        pid, status = os.wait()
        index = running.pop(pid)
        if status:
            failed = True
            sys.stderr.write(f"{wanted[index]} was not compiled: status {status}\n")
            continue
        sys.stdout.write(f"{index}\n")
        sys.stdout.flush()
    return int(failed)


def _fork(need: Need) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _end_with_parent()
        KERNELS[need[0]](*need[1:])
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does with an exception
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
