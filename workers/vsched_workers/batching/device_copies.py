"""How what the host has made for a step gets to its device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def sent(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Return an array on a device, without waiting for what that has to do first: it is copied from pinned memory.

    Torch keeps the pinned memory until the copy is done. On the host the tensor is the array.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a device on the host, once it is there; into pinned memory, which is twice as fast or more."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
