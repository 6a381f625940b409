"""Out-of-memory of every kind as one error, `DeviceOutOfMemory`: nothing above this file knows an allocator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.worker.memory import DeviceMemory

_OUT_OF_MEMORY = re.compile(
    "not enough memory|can't allocate memory|cannot allocate memory|out of memory|bad_alloc|bad allocation"
    "|could not create a (memory|primitive|scratchpad)|could not (execute|run) a primitive",
    re.IGNORECASE,
)
"""How errors without a type of their own say it: torch's CPU allocator, oneDNN, the C++ library."""


STEP_REMEDY = (
    "make the KV cache smaller (generate.memory), or lower the token budgets of a step (encode.admission.max_tokens, "
    "generate.max_batch_tokens)"
)


def stage_remedy(stage: str) -> str:
    """Return what helps where the memory of a stage's ranks does not suffice, whatever the KV cache takes."""
    return (
        f"raise {stage}.memory_limit where that is the limit, or free the device of other processes"
    )


@contextmanager
def typed_out_of_memory(doing: str, *, remedy: str = STEP_REMEDY) -> Iterator[None]:
    """Turn every kind of out-of-memory into the one error that the rest of the system knows."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceOutOfMemory(_message(doing, remedy)) from error
    except (RuntimeError, OSError) as error:
        if _OUT_OF_MEMORY.search(str(error)):
            raise DeviceOutOfMemory(_message(doing, remedy)) from error
        raise


def _message(doing: str, remedy: str) -> str:
    return f"memory ran out while {doing}. Remedy: {remedy}."


def require_available(memory: DeviceMemory, size: int, what: str) -> None:
    """Check that something will fit before it is allocated.

    A host hands out more memory than it has and kills somebody later; so the failure is made here, where it has a name.

    Raises:
        DeviceOutOfMemory: When it does not fit.
    """
    if size > memory.available():
        memory.release()  # what its allocator caches is not available, and is no obstacle
    available = memory.available()
    if size > available:
        raise DeviceOutOfMemory(
            limit_message(
                f"{what} does not fit on {memory.name} (bytes)",
                value=size,
                limit=available,
                remedy="make it smaller (generate.memory), or free memory on the device",
            )
        )
