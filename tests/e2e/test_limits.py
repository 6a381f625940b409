"""The engine under limits of memory: served, or one clear error that names the right settings, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.asking import Ask, answer, drawn_image
from tests.patience import patience
from vsched import Engine
from vsched.aio.launcher import LocalLauncher
from vsched.config import load_config
from vsched.engine import Environment
from vsched.errors import VschedError
from vsched.worker.spec import RankSpec

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

DEMO = Path(__file__).parents[2] / "workers" / "demo-model"
KEYS = {"encode": "encode.memory_limit", "generate": "generate.memory_limit"}
SETTINGS = (
    f"model.path={DEMO}",
    "encode.threads=1",
    "generate.threads=1",
    "generate.slots=8",
    "generate.context_tokens=2048",
    "generate.max_batch_tokens=1024",
    "arena.pixel_bytes=33554432",
    "arena.embedding_bytes=8388608",
)


def limits(stage: str, limit_mib: int) -> list[str]:
    """Return the settings that limit a stage; with `together`, one process has both, each with half of the limit."""
    if stage == "together":
        halves = [f"{key}={(limit_mib << 20) // 2}" for key in KEYS.values()]
        return ["placement=together", *halves]
    other = next(name for name in KEYS if name != stage)
    pinned = 'generate.memory={use="pinned", tokens=8192}'
    more = [pinned] if stage == "encode" else []
    return [f"{KEYS[stage]}={limit_mib}MiB", f"{KEYS[other]}=2GiB", *more]


class Spawning(LocalLauncher):
    """Each rank is a new interpreter."""

    def fork_server(self, spec: RankSpec) -> None:
        return None


@pytest.mark.parametrize(
    ("stage", "limit_mib", "forked", "serves"),
    [
        ("encode", 50, True, False),
        ("generate", 300, True, False),
        pytest.param("together", 300, True, False, marks=pytest.mark.thorough),
        ("together", 1600, True, True),  # 800 are the libraries of torch with CUDA
        # A new process meets the limit while it imports libraries, which die of it.
        ("generate", 120, False, False),
    ],
)
async def test_limit_is_served_or_an_error_names_its_setting(
    stage: str, limit_mib: int, *, forked: bool, serves: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, sets=[*SETTINGS, *limits(stage, limit_mib)], environ={}).config
    environment = Environment() if forked else Environment(make_launcher=lambda _: Spawning())
    engine = Engine(config, environment=environment)
    message = ""
    try:
        async with patience(), engine:
            await answer(engine, Ask(images=[drawn_image(1)], count=8))
    except VschedError as error:
        message = str(error)
    assert serves == (not message), message
    named = {name for name, key in KEYS.items() if key in message}
    helping = set(KEYS) if stage == "together" else {stage}
    assert named == (helping if message else set()), message
    assert "Traceback" not in capfd.readouterr().err
