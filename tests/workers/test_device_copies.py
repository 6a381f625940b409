"""Copies of arrays to and from a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vsched_workers.device_copies import fetched, sent


def test_arrays_are_copied_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[torch.Tensor] = []
    waits: list[bool] = []
    copy = torch.Tensor.to

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: torch.Tensor, device: object, *, non_blocking: bool = False) -> torch.Tensor:
        assert tensor is pinned[-1]
        waits.append(not non_blocking)
        return copy(tensor, device)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    array = np.arange(3)
    assert sent(array, "meta").device.type == "meta"
    assert waits == [False]
    assert torch.equal(pinned[0], torch.arange(3))
    assert sent(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    assert len(pinned) == 1


def test_results_of_a_device_are_fetched_into_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, pinned = torch.empty, []

    def noted(*shape: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **options)  # type: ignore[call-overload,no-any-return]

    there = torch.zeros(3, 2, device="meta")
    here = torch.zeros(3)
    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda kept, _: kept)
    found = fetched(there)
    assert (found.shape, found.device.type, pinned) == ((3, 2), "cpu", [True])
    assert fetched(here) is here
