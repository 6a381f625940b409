"""Fused towers of a GPU compared with transformers' modules, with kernels in Triton's interpreter or on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.bench.gpu.kernels import compiled
from tests.workers.backends.cuda.test_attention_trials import varlen_on_cpu
from tests.workers.driver import Driver, Question, Stage, drawn_image
from vsched.worker.contract import WorkerSettings
from vsched_workers import vision
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda import fused_tower
from vsched_workers.backends.cuda.fused_tower import (
    FusedTower,
    fits,
    layout_of,
    merge,
    pad_inner,
    usable_kernels,
)
from vsched_workers.backends.reference.backend import ReferenceBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("default")
IMAGES = [drawn_image(2, 200, 70), drawn_image(4, 31, 150), drawn_image(5, 300, 290)]


class FusedOnHost(ReferenceBackend):
    """The host with the fused tower of a GPU, or with only padded MLPs."""

    fused = True

    def prepare_tower(self, tower: Any) -> int:
        pad_inner(tower)
        if self.fused:
            kernels = usable_kernels(self.dtype, "cpu")
            assert kernels is not None
            assert fits(tower)
            merge(tower)
        size = super().prepare_tower(tower)
        if self.fused:
            tower.forward = FusedTower(tower, kernels, flash=False)
        return size


class PaddedOnHost(FusedOnHost):
    fused = False


def rows_of(stage: Stage) -> np.ndarray:
    driver = Driver(stage, chunk=64)
    driver.start(0, Question("Compare.", IMAGES))
    return driver.embeddings.view(np.float32).copy()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [FusedOnHost, PaddedOnHost])
def test_rows_equal_those_of_the_modules(
    backend: type[ReferenceBackend],
    stages: Callable[..., Stage],
    checkpoints: Callable[[str], Path],
    size: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = stages(size)
    monkeypatch.setattr(vision, "choose_backend", backend)
    fused = Stage.load(str(checkpoints(size)), attention="exact", dtype="float32")
    wanted, found = rows_of(plain), rows_of(fused)
    print(np.abs(wanted).max(), np.abs(found - wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
