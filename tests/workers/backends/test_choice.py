"""Choice of a backend: the CPU's kernels need numba, and settings that no backend supports are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.each_case import each_case
from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cpu.kernels import simd
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather

DETERMINISTIC = ("model.deterministic:", {"deterministic": True})
WEIGHTS = ("weights: int8 is", {"weights": "int8"})
ROWS = ("activations: int8 is", {"activations": "int8"})


@each_case(
    ("key", "dtype", "more"),
    [
        (DETERMINISTIC, torch.float32, {}),
        (DETERMINISTIC, torch.float16, {}),
        (DETERMINISTIC, torch.bfloat16, {"device": "cuda"}),
        (DETERMINISTIC, torch.bfloat16, {"attention": "exact"}),
        (WEIGHTS, torch.float16, {}),
        (WEIGHTS, torch.bfloat16, {"attention": "exact"}),
        (ROWS, torch.float16, {}),
        (ROWS, torch.bfloat16, {"attention": "exact"}),
        (ROWS, torch.bfloat16, {"device": "cuda:0"}),
    ],
)
def test_settings_without_a_kernel_are_refused(
    key: tuple[str, dict[str, Any]], dtype: torch.dtype, more: dict[str, Any]
) -> None:
    name, given = key
    with pytest.raises(ConfigError, match=f"{name} not possible on .* Remedy: "):
        choose_backend(WorkerSettings(**given | more), dtype)


def test_int8_kv_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype: .*'int8' runs on cpu only, not on cuda. Rem"):
        choose_backend(WorkerSettings(device="cuda"), torch.bfloat16, "int8")


def test_deterministic_is_refused_on_a_processor_without_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simd, "has_bf16_dot", lambda: False)
    with pytest.raises(ConfigError, match="avx512_bf16"):
        choose_backend(WorkerSettings(deterministic=True), torch.bfloat16)


def test_attention_is_that_of_torch_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "vsched_workers.backends.cpu.backend", absent)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kernels = choose_backend(WorkerSettings(), dtype).choose_attention(absent, 1)
        assert (kernels.decode, kernels.prefill) == (decode_by_gather, prefill_by_gather)
