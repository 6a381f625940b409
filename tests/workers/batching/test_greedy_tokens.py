"""Greedy tokens of rows whose logits are no numbers, in each backend."""

from __future__ import annotations

import math

import pytest
import torch

from tests.workers.backends.cuda.on_host import CudaOnHost
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.batching.sampling import UNDRAWN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Backend, CudaOnHost, choose_backend])
def test_row_without_a_finite_largest_logit_has_no_token(make: type, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    rows[0, 7] = rows[0, 9] = 40.0
    rows[1], rows[2, 3], rows[3] = math.nan, math.inf, -math.inf
    found = make(WorkerSettings(), dtype).argmax(rows.to(dtype))
    assert found.tolist() == [7, *[UNDRAWN] * 3, int(rows[4].to(dtype).argmax())]
