"""Engines with real rank processes, shared by as many tests as possible: a start takes seconds."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.asking import Ask, held, in_flight, mixed_asks
from tests.patience import PATIENCE_S, until
from tests.traces import left_behind, traces
from tests.workers.parallel.ranks import forkable_everywhere
from tests.workers.reference import Reference
from vsched import Config, Engine, fork_server
from vsched.aio import launcher
from vsched.api.server import RunningServer, running_server
from vsched.config import load_config
from vsched.types import ModelInfo
from vsched.worker.contract import Preprocessor
from vsched_workers.plugin import plugin

KV_TOKENS = 480
"""So small that eight requests at a time do not fit."""
TIGHT = 'generate.memory={use="pinned", tokens=320}'
"""Room for two or three of the requests of `mixed_asks`, so that some are preempted on a busy machine, too."""
CONTEXT_TOKENS = 2048
WAITING_MAX = 24
IMAGES_MAX = 6
SETTINGS = (
    "encode.threads=1",
    "generate.threads=1",
    "generate.slots=8",
    "generate.chunk_tokens=48",
    "generate.max_batch_tokens=256",
    f"generate.max_waiting={WAITING_MAX}",
    f"generate.context_tokens={CONTEXT_TOKENS}",
    f'generate.memory={{use="pinned", tokens={KV_TOKENS}}}',
    "arena.pixel_bytes=33554432",
    "arena.embedding_bytes=8388608",
    f"media.images_max={IMAGES_MAX}",
    "media.threads=1",
    "media.prepare_s=300",  # a busy machine decodes the largest frames slowly
    # Their loop does not run during synchronous tests.
    "deadlines.rank_timeout_s=3600",
    "server.port=0",
)
BATCHED = {"VSCHED__ENCODE__ADMISSION__MAX_ITEMS": "4"}
"""By default a step would take one image on a CPU; these tests are about batches of them, with few exceptions."""


class SharedForkServer(fork_server.ForkServer):
    """Exists before the engines that use it, and outlives them."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    """Let all engines share one fork server, for each would import for seconds; see `own_fork_server`."""
    shared = SharedForkServer(forkable_everywhere())

    async def import_all() -> None:
        (await shared.open()).close()

    asyncio.run(import_all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "ForkServer", lambda *_: shared)
        yield
    fork_server.ForkServer.close(shared)


@pytest.fixture
def own_fork_server(shared_fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines of a test have fork servers of their own, as in production."""
    monkeypatch.setattr(launcher, "ForkServer", fork_server.ForkServer)


@pytest.fixture(scope="session")
def configure(checkpoints: Callable[[str], Path]) -> Callable[..., Config]:
    """Return the configuration of a checkpoint of the named size, with further settings."""

    def config(size: str, *settings: str) -> Config:
        sets = [*SETTINGS, f"model.path={checkpoints(size)}", f"model.name={size}", *settings]
        return load_config(None, sets=sets, environ=BATCHED).config

    return config


@pytest.fixture(scope="session")
def generated(
    checkpoints: Callable[[str], Path],
) -> Callable[[str, Sequence[Ask]], list[list[int]]]:
    """Return a function that answers questions with transformers' `generate`, greedily and with its options."""

    @functools.cache
    def load(size: str) -> tuple[Reference, Preprocessor]:
        path = checkpoints(size)
        info: ModelInfo = plugin.inspect(str(path), dtype="auto", item_tokens_max=0)
        return Reference(path), plugin.load_preprocessor(info)

    def generate(size: str, asks: Sequence[Ask], **options: object) -> list[list[int]]:
        reference, preprocessor = load(size)
        return [
            reference.generate(ask.prompt(preprocessor), ask.images, ask.count, **options)
            for ask in asks
        ]

    return generate


@pytest.fixture(scope="session")
def expected(
    generated: Callable[[str, Sequence[Ask]], list[list[int]]],
) -> Callable[[str], list[list[int]]]:
    """Return a function for the answers of transformers' `generate` to all mixed questions."""
    return functools.cache(lambda size: generated(size, mixed_asks()))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def server(configure: Callable[..., Config]) -> AsyncIterator[RunningServer]:
    """The server whose engine most tests use."""
    async with running_server(configure("nano25")) as running:
        yield running


@pytest.fixture(scope="package")
def shared_engine(server: RunningServer) -> Engine:
    """The engine that most tests use."""
    return server.engine


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def together_engine(configure: Callable[..., Config]) -> AsyncIterator[Engine]:
    """An engine with both stages in one rank process."""
    async with Engine(configure("nano3", "placement=together")) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="package")
async def engine(shared_engine: Engine) -> AsyncIterator[Engine]:
    """The shared engine, which must hold nothing after the test."""
    yield shared_engine
    await assert_idle(shared_engine)


@pytest_asyncio.fixture(loop_scope="package")
async def sdk(server: RunningServer, engine: Engine) -> AsyncIterator[Any]:
    """OpenAI's client of the shared server, without retries; `engine` checks that nothing is held after the test."""
    import openai

    del engine
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture
def temporary(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder for temporary files; nothing of any kind may be left after the test."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    before = traces(folder)
    yield folder
    assert not left_behind(folder, before)


async def assert_idle(engine: Engine) -> None:
    """Fail unless every request has returned its resources."""
    assert not any(held(engine).values()), held(engine)
    await until(lambda: not any(in_flight(engine).values()), f"steps end: {in_flight(engine)}")
    assert engine._running is not None
    engine._running.shell.kernel.check_invariants()
    assert engine.statistics()["policy_faults"] == {}
