"""Copies of arrays between the host and a device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def sent(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Return an array on a device without synchronizing: it is copied from pinned memory.

    Torch keeps the pinned memory until the copy is done. On a CPU, the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """Return a device tensor on the host after its computation; pinned memory makes the copy at least twice as fast."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
