"""The choice of a backend for a device name, and the check that the device exists."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.reference.backend import Backend

KERNELS = ("auto", "exact")
"""Values of `generate.attention`."""


def check_device(device: str, *, key: str) -> None:
    """Raise an error if a rank cannot use a device; `key` is the path of the configuration key that names it.

    Raises:
        ConfigError: With value, limit and remedy.
    """
    kind, _, number = device.partition(":")
    if device == "cpu":
        return
    what, limit, remedy = f"{key}: not a device", "cpu, cuda or cuda:N", f"set {key} to cpu"
    if kind == "cuda":
        count = torch.cuda.device_count()
        if torch.version.cuda is None and torch.version.hip is None:
            what = f"{key}: this build of torch ({torch.__version__}) cannot use a GPU"
            limit = "cpu"
            remedy = f"set {key} to cpu, or install a build of torch with CUDA"
        elif count == 0:
            what, limit = f"{key}: torch finds no GPU", "cpu"
            remedy = f"set {key} to cpu, or see whether `nvidia-smi` lists a GPU, and CUDA_VISIBLE_DEVICES allows it"
        elif int(number or 0) >= count:
            what, limit = f"{key}: no such GPU; every rank takes one", f"cuda:{count - 1}"
            remedy = f"lower {key}, replicas or tensor_parallel"
        else:
            return
    raise ConfigError.of_limit(what, value=device, limit=limit, remedy=remedy)


def torch_threads(settings: WorkerSettings) -> int:
    """Return the number of threads for torch's own operations.

    Its GELU rounds some values differently at the end of a thread's part, so `deterministic` uses one thread. Matrix
    products and attention have kernels with threads of their own.
    """
    return 1 if settings.deterministic else settings.threads


def threads_here(backend: Backend) -> int:
    """Return the number of threads that this process computes with at present."""
    if backend.device != "cpu":
        return 0
    if not backend.compiles:  # all its operations are torch's, with a constant number of threads
        return backend.settings.threads
    from vsched_workers.backends.cpu.threads import process_pool  # requires numba

    return process_pool().active


def choose_backend(settings: WorkerSettings, dtype: torch.dtype, kv_dtype: str = "auto") -> Backend:
    """Return the backend for a device, a data type of weights and the configured attention.

    `kv_dtype` is that in `ModelInfo`.

    Raises:
        ConfigError: When there is no such attention kernel, or it cannot run with this device and type.
    """
    if settings.quantizes:
        check_quantized(
            settings, dtype, what=f"generate.weights, encode.weights: {settings.weights}"
        )
    if settings.activations == "int8":
        what = "generate.activations, encode.activations: int8 is"
        _check_kernels(what, "auto", settings, dtype, (torch.bfloat16, torch.float32))
    if settings.attention not in KERNELS:
        raise ConfigError(
            f"generate.attention: unknown value {settings.attention!r}. Known: {', '.join(KERNELS)}."
        )
    kept = torch.int8 if kv_dtype == "int8" else dtype
    if kept != dtype and settings.device != "cpu":
        raise ConfigError(
            f"generate.kv_dtype: 'int8' runs on cpu only, not on {settings.device}. "
            "Remedy: set it to auto, or generate.device to cpu."
        )
    if settings.deterministic:
        _check_kernels("model.deterministic:", "false", settings, dtype, (torch.bfloat16,))
        _check_processor()
    if settings.device.startswith("cuda"):
        from vsched_workers.backends.cuda.backend import CudaBackend

        return CudaBackend(settings, dtype)
    if settings.attention == "exact" or dtype not in {torch.float32, torch.bfloat16}:
        return Backend(settings, dtype, kept)
    try:
        from vsched_workers.backends.cpu.backend import CpuBackend
    except ImportError:
        return Backend(settings, dtype, kept)
    return CpuBackend(settings, dtype, kept)


def _check_kernels(
    what: str, off: str, settings: WorkerSettings, dtype: torch.dtype, types: Sequence[torch.dtype]
) -> None:
    """Check that the kernels of the CPU backend run, with these types; the error begins with `what`.

    Raises:
        ConfigError: With the supported combination, and `off`, the value that avoids it.
    """
    if settings.device != "cpu" or settings.attention == "exact" or dtype not in types:
        raise ConfigError(
            f"{what} not possible on {settings.device} with {_name(dtype)} and attention "
            f"{settings.attention!r}, only on cpu with {' or '.join(map(_name, types))} and `auto`. "
            f"Remedy: use these, or set it to {off}."
        )


def _check_processor() -> None:
    """Check that the processor has batch-invariant kernels.

    Raises:
        ConfigError: When it does not, or numba is not installed.
    """
    try:
        from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
    except ImportError as error:
        raise ConfigError(
            "model.deterministic: it needs numba, which is not installed. "
            "Remedy: install it, or set it to false."
        ) from error
    if not has_bf16_dot():
        raise ConfigError(
            "model.deterministic: its kernels need a processor with avx512_bf16, which this one lacks. "
            "Remedy: use another host, or set it to false."
        )


def check_quantized(settings: WorkerSettings, dtype: torch.dtype, *, what: str) -> None:
    """Check that quantized weights are supported; the error begins with `what`.

    Raises:
        ConfigError: With the supported combination.
    """
    if settings.device.startswith("cuda"):
        return
    has_numba = find_spec("numba") is not None
    if (
        dtype not in {torch.float32, torch.bfloat16}
        or settings.attention == "exact"
        or not has_numba
    ):
        raise ConfigError(
            f"{what} is not possible on {settings.device} with {_name(dtype)}, "
            f"attention {settings.attention!r} and {'' if has_numba else 'without '}numba, only on cuda, and on cpu "
            "with bfloat16 or float32, `auto` and numba. Remedy: use these, or weights that are not quantized (of a "
            "GGUF file: vsched make-checkpoint --gguf FILE PATH --dtype bfloat16)."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
