"""Conversion of all out-of-memory errors to `DeviceOutOfMemory`: callers know no allocator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from vsched.errors import DeviceOutOfMemory
from vsched.worker.memory import DeviceMemory

_OUT_OF_MEMORY = re.compile(
    "not enough memory|can't allocate memory|cannot allocate memory|out of memory|bad_alloc|bad allocation"
    "|could not create a (memory|primitive|scratchpad)|could not (execute|run) a primitive",
    re.IGNORECASE,
)
"""Messages of untyped out-of-memory errors: torch's CPU allocator, oneDNN, the C++ library."""


STEP_REMEDY = (
    "make the KV cache smaller (generate.memory), or lower the token budgets of a step (encode.admission.max_tokens, "
    "generate.max_batch_tokens)"
)


def stage_remedy(stage: str) -> str:
    """Return the remedy if a stage's ranks run out of memory independent of the KV cache."""
    return (
        f"raise {stage}.memory_limit where that is the limit, quantize the model ({stage}.weights), or free the device "
        "of other processes"
    )


@contextmanager
def typed_out_of_memory(doing: str, *, remedy: str = STEP_REMEDY) -> Iterator[None]:
    """Convert every kind of out-of-memory error to `DeviceOutOfMemory`."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceOutOfMemory(f"memory ran out while {doing}", remedy=remedy) from error
    except (RuntimeError, OSError) as error:
        if _OUT_OF_MEMORY.search(str(error)):
            raise DeviceOutOfMemory(f"memory ran out while {doing}", remedy=remedy) from error
        raise


def require_available(memory: DeviceMemory, size: int, what: str) -> None:
    """Check that an allocation will fit.

    Hosts overcommit memory and kill a process later, so this fails early, with a proper error.

    Raises:
        DeviceOutOfMemory: When it does not fit.
    """
    if size > memory.available():
        memory.release()  # memory that the allocator caches counts as used, but can be freed
    available = memory.available()
    if size > available:
        raise DeviceOutOfMemory(
            f"{what} does not fit on {memory.name} (bytes): value {size}, limit {available}",
            remedy="make it smaller (generate.memory), or free memory on the device",
        )
