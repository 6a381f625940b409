"""Engines whose ranks run on other hosts, which are processes at addresses of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.asking import Ask, drawn_image
from tests.patience import PATIENCE_S
from vsched import Config, Engine
from vsched.aio.hosts.link import write_key_file

ASKS = [
    Ask("What is in the image?", [drawn_image(1)]),
    Ask("What differs?", [drawn_image(2), drawn_image(3, (140, 100))], count=40),
    Ask("0 1 2 3 4 5"),
]
SILENCE_S = 10.0
"""The deadline of these tests: far below the deadline of a test, and far above the pauses of a live process."""


def new_key(folder: Path) -> Path:
    """Return a file with the secret of engine and hosts."""
    path = folder / "hosts.key"
    write_key_file(path)
    return path


@asynccontextmanager
async def engine_on(
    configure: Callable[..., Config],
    key: Path,
    near: str,
    far: str,
    *settings: str,
) -> AsyncIterator[Engine]:
    """Yield an engine that encodes at one address, and generates at another."""
    config = configure(
        "nano25",
        f'cluster.hosts={{near = "{near}", far = "{far}"}}',
        f"cluster.key_file={key}",
        'cluster.encode=["near"]',
        'cluster.generate=["far"]',
        f"cluster.connect_s={PATIENCE_S}",
        f"deadlines.rank_timeout_s={SILENCE_S}",
        *settings,
    )
    async with Engine(config) as engine:
        yield engine


def losses(engine: Engine) -> dict[str, dict[str, int]]:
    """Number of losses of each stage, by reason."""
    return {row["stage"]: row["losses"] for row in engine.groups()}
