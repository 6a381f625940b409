"""Trials of Triton kernels against torch's own operations, before a model is prepared with them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from vsched.errors import DeviceOutOfMemory
from vsched_workers.memory.out_of_memory import typed_out_of_memory

logger = logging.getLogger(__name__)

WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Accepted difference of results, by the data type of a model."""

_RUNS = 2
"""The first launch is by Triton, later ones without its dispatch (`launching.py`)."""


def passes(
    trial: Callable[[], float], dtype: torch.dtype, *, doing: str, without: str, kernels: str
) -> bool:
    """Return whether kernels run and agree with torch; otherwise log a warning that begins with `without`.

    `trial` returns the largest difference; `kernels` names them in the warning.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out while `doing` so.
    """
    try:
        with typed_out_of_memory(doing):
            found = [trial() for _ in range(_RUNS)]
    except DeviceOutOfMemory:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler may raise anything
        logger.warning("%s, which is slower: %s", without, error)
        return False
    for apart in found:
        if not apart <= WITHIN[dtype]:  # rejects NaNs, too
            logger.warning("%s: %s are wrong by %.2g", without, kernels, apart)
            return False
    return True
