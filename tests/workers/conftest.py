"""Loaded workers, created once per session: the smallest of each family, float32, one torch thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.workers.driver import Checkpoints, Stage, Stages
from tests.workers.parallel.ranks import Ranks
from tests.workers.reference import Reference

SIZES = ("nano25", "nano3")


@pytest.fixture(scope="session")
def stages(checkpoints: Checkpoints) -> Stages:
    """Return the loaded workers of a checkpoint."""

    @functools.cache
    def load(size: str, attention: str = "exact", dtype: str = "float32") -> Stage:
        return Stage.load(checkpoints(size), attention=attention, dtype=dtype)

    return load


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> Callable[[str], Reference]:
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
