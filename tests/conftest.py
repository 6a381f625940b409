"""What every test runs under: uvloop, as in production, and one thread for what computes, if it asks for no more."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Two workers of pytest have all cores at work: a thread that waits by looking would take one from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Where there is no GPU, Triton's kernels run in its interpreter; it is chosen when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Checkpoints are made on the spot: whatever asks a hub is a mistake, and fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_finish() -> None:
    """Spare garbage collections, of which tests order hundreds, the objects of thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(
    config: pytest.Config,
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on the loop that serves requests."""
    return {"uvloop": uvloop.new_event_loop}
