"""Kernels that are wrong or do not run, in place of one of a module's kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch


class Idle:
    """A kernel that writes zeros to all of its tensors."""

    def __getitem__(self, grid: object) -> Callable[..., object]:
        return lambda *arguments, **_: [
            each.zero_() for each in arguments if isinstance(each, torch.Tensor)
        ]


def check_not_used(
    module: ModuleType,
    broken: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: str,
) -> None:
    """Check that `usable_kernels` of a module returns none if one is wrong, with this text in the log, or fails."""
    right = module.load_kernels()
    assert right is not None
    assert module.usable_kernels(torch.float32, device) is not None
    monkeypatch.setattr(module, "load_kernels", lambda: right._replace(**{broken: Idle()}))
    assert module.usable_kernels(torch.float32, device) is None
    assert wrong in caplog.text
    monkeypatch.setattr(module, "load_kernels", lambda: right._replace(**{broken: None}))
    assert module.usable_kernels(torch.float32, device) is None
    assert "which is slower" in caplog.text
