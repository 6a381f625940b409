"""Checkpoints and loaded workers, created once per session: the smallest of each family, float32, one torch thread."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.workers.driver import Stage  # noqa: E402
from tests.workers.parallel.ranks import Ranks  # noqa: E402
from tests.workers.reference import Reference  # noqa: E402
from vsched_workers.checkpoint.random_init import make_checkpoint  # noqa: E402

SIZES = ("nano25", "nano3")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a checkpoint of the named size."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(size: str) -> Path:
        make_checkpoint(str(root / size), size, dtype="float32")
        return root / size

    return make


@pytest.fixture(scope="session")
def stages(checkpoints: Callable[[str], Path]) -> Callable[..., Stage]:
    """Return the loaded workers of a checkpoint."""

    @functools.cache
    def load(size: str, attention: str = "exact", dtype: str = "float32") -> Stage:
        return Stage.load(str(checkpoints(size)), attention=attention, dtype=dtype)

    return load


@pytest.fixture(scope="session")
def references(checkpoints: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Return transformers' own model of a checkpoint."""

    @functools.cache
    def load(size: str) -> Reference:
        return Reference(checkpoints(size))

    return load


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return processes for up to four ranks."""
    made = Ranks(4, tmp_path_factory.mktemp("groups"))
    yield made
    made.stop()


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
