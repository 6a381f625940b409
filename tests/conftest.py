"""Setup of all tests: uvloop, as in production, and one compute thread unless a test sets another number."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Pytest's workers keep all cores busy: a thread that waits by spinning would take one from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without a GPU, Triton's kernels run in its interpreter, which is chosen when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
else:  # servers that tests start have the defaults and the arithmetic of a CPU
    os.environ["VSCHED__ENCODE__DEVICE"] = os.environ["VSCHED__GENERATE__DEVICE"] = "cpu"
# Checkpoints are generated: access to a hub is an error, and fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"

_begun: set[Path] = set()
"""Modules of which a test has run."""


def pytest_configure() -> None:
    """Let `device = "auto"` be the CPU in this process, also on a machine with a GPU."""
    from vsched.config import devices

    devices.DEVICE_FILES = ("/no GPU in tests",)


def pytest_collectstart() -> None:
    """Import the modules of tests without garbage collections, a quarter of the time otherwise."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze the objects of collected tests, so that the garbage collections of tests do not traverse them."""
    _freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze the remaining objects of earlier modules: some tests collect garbage often, to find leaks."""
    if item.path not in _begun:
        _begun.add(item.path)
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on the event loop of production."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def context() -> Iterator[object]:
    """Context of ZeroMQ, with its sockets."""
    import zmq

    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a float32 checkpoint of the named size; the test needs torch."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from vsched_workers.checkpoint.random_init import make_checkpoint

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(size: str) -> Path:
        make_checkpoint(str(root / size), size, dtype="float32")
        return root / size

    return make
