"""The tower's attention in one call per layer, with torch's kernel written out on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.workers.backends.cuda.test_attention_trials import varlen_on_cpu
from tests.workers.driver import Driver, Question, Stage, drawn_image
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda import vision_attention

Stages = Callable[..., Stage]


def test_flash_gives_the_rows_of_attention_window_by_window(
    stages: Stages,
    checkpoints: Callable[[str], Path],
    size: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.attention import varlen

    plain = stages(size)  # shared by all tests: loaded before anything is replaced
    calls = []

    def counted(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(len(inputs[3]) - 1)
        return varlen_on_cpu(*inputs, **options)  # type: ignore[arg-type]

    counted.__signature__ = inspect.signature(varlen_on_cpu)  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    vision_attention.register()
    flash = Stage.load(str(checkpoints(size)), attention="exact", dtype="float32")
    vision_attention.switch(flash.encoder._tower.module)  # type: ignore[attr-defined]
    question = Question("Compare.", [drawn_image(2, 200, 70), drawn_image(4, 31, 150)])
    rows = []
    for stage in (plain, flash):
        driver = Driver(stage, chunk=64)
        driver.start(0, question)
        rows.append(driver.embeddings.view(np.float32))
    assert np.abs(rows[0] - rows[1]).max() < 1e-5
    assert len(calls) == len(flash.encoder._tower.module.blocks)  # type: ignore[attr-defined]
    assert min(calls) >= 2, "both images, and where there are windows all of them, in one call"


def test_flash_is_for_gpus_and_16_bit_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_attention, "runs", lambda *_: True)
    for settings, dtype, name in [
        (WorkerSettings(), torch.bfloat16, "sdpa"),
        (WorkerSettings(device="cuda"), torch.float32, "sdpa"),
        (WorkerSettings(device="cuda", attention="exact"), torch.bfloat16, "sdpa"),
        (WorkerSettings(device="cuda"), torch.bfloat16, vision_attention.FLASH),
    ]:
        tower: Any = nn.Module()
        tower.config, tower.blocks = SimpleNamespace(_attn_implementation="sdpa"), []
        choose_backend(settings, dtype).prepare_tower(tower)
        assert tower.config._attn_implementation == name


def test_flash_is_not_taken_where_it_does_not_run() -> None:
    """Torch's own kernel does not run on a CPU, which the trial detects."""
    assert not vision_attention.runs("cpu", torch.bfloat16)
