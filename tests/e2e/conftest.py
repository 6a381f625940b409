"""Engines with real rank processes, shared by as many tests as can be: a start takes seconds."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.asking import crowd, held, in_flight, until  # noqa: E402
from tests.workers.reference import Reference  # noqa: E402
from vsched import Config, Engine  # noqa: E402
from vsched.config import load_config  # noqa: E402
from vsched.types import ModelInfo  # noqa: E402
from vsched_workers.make_checkpoint import make_checkpoint  # noqa: E402
from vsched_workers.plugin import plugin  # noqa: E402

KV_TOKENS = 480
"""So small that eight requests at a time do not fit."""
CONTEXT_TOKENS = 2048
SETTINGS = (
    "encode.threads=1",
    "generate.threads=1",
    "generate.slots=8",
    "generate.chunk_tokens=48",
    "generate.max_batch_tokens=256",
    "generate.max_waiting=24",
    f"generate.context_tokens={CONTEXT_TOKENS}",
    f"generate.memory.tokens={KV_TOKENS}",
    "arena.pixel_bytes=33554432",
    "arena.embedding_bytes=8388608",
    "media.threads=1",
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a float32 checkpoint of the named size."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(size: str) -> Path:
        make_checkpoint(str(root / size), size, dtype="float32")
        return root / size

    return make


@pytest.fixture(scope="session")
def configure(checkpoints: Callable[[str], Path]) -> Callable[..., Config]:
    """Return the configuration of a checkpoint of the named size, with further settings."""

    def config(size: str, *settings: str) -> Config:
        sets = [*SETTINGS, f"model.path={checkpoints(size)}", f"model.name={size}", *settings]
        return load_config(None, sets=sets, environ={}).config

    return config


@pytest.fixture(scope="session")
def expected(checkpoints: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """Return what transformers' `generate` answers the crowd with."""

    @functools.cache
    def generate(size: str) -> list[list[int]]:
        path = checkpoints(size)
        info: ModelInfo = plugin.inspect(str(path), dtype="auto", item_tokens_max=0)
        preprocessor = plugin.load_preprocessor(info)
        reference = Reference(path)
        return [
            reference.generate(ask.prompt(preprocessor), ask.images, ask.count) for ask in crowd()
        ]

    return generate


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(configure: Callable[..., Config]) -> AsyncIterator[Engine]:
    """The engine that most tests use."""
    async with Engine(configure("nano25")) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: Engine) -> AsyncIterator[Engine]:
    """The shared engine; whatever a test does, nothing may be held after it."""
    yield shared_engine
    await assert_idle(shared_engine)


async def assert_idle(engine: Engine) -> None:
    """Fail unless every request has given everything back."""
    assert not any(held(engine).values()), held(engine)
    await until(lambda: not any(in_flight(engine).values()), f"steps end: {in_flight(engine)}")
    for replica in engine._replicas:
        assert replica._kernel is not None
        replica._kernel.check_invariants()
    assert engine.statistics()["policy_faults"] == {}
