"""One start under a limit of memory, with one request, and the verdict on its end."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from tests.e2e.asking import Ask, answer, drawn_image
from tests.patience import patience
from vsched import Engine
from vsched.config import load_config
from vsched.engine import Environment, make_launcher
from vsched.errors import VschedError

Stage = Literal["encode", "generate", "together"]
Verdict = Literal[
    "served", "told", "no setting", "wrong setting", "traceback", "other error", "hang"
]
GOOD: tuple[Verdict, ...] = ("served", "told")
DEMO = Path(__file__).parents[2] / "workers" / "demo-model"
KEYS = {"encode": "encode.memory_limit", "generate": "generate.memory_limit"}
AMPLE = "2GiB"
"""The limit of the other stage."""
SMALL_LOAD = (
    "encode.threads=1",
    "generate.threads=1",
    "generate.slots=8",
    "generate.context_tokens=2048",
    "generate.max_batch_tokens=1024",
    "arena.pixel_bytes=33554432",
    "arena.embedding_bytes=8388608",
)
PINNED = 'generate.memory={use="pinned", tokens=8192}'
"""The KV cache of cases that do not limit the generate stage's memory."""


class Case(NamedTuple):
    """One start. `stage` has the limit; with `together`, one process has both stages, and each half of the limit."""

    stage: Stage
    forked: bool
    limit_mib: int

    @property
    def settings(self) -> list[str]:
        limits = dict.fromkeys(KEYS, AMPLE)
        if self.stage == "together":
            half_bytes = (self.limit_mib << 20) // 2
            limits = {name: str(half_bytes) for name in KEYS}
        else:
            limits[self.stage] = f"{self.limit_mib}MiB"
        more = {"encode": [PINNED], "generate": [], "together": ["placement=together"]}[self.stage]
        return [
            f"model.path={DEMO}",
            *SMALL_LOAD,
            *(f"{KEYS[name]}={limit}" for name, limit in limits.items()),
            *more,
        ]


class Outcome(NamedTuple):
    """How a start ended; `message` is the error."""

    verdict: Verdict
    message: str = ""


async def attempt(case: Case) -> Outcome:
    """Start an engine and ask it one question about an image, without looking at the output of its processes.

    Blocks: up to the patience of tests, and as long as the engine takes to stop.
    """
    config = load_config(None, sets=case.settings, environ={}).config
    launcher = partial(make_launcher, forked=case.forked)
    engine = Engine(config, environment=Environment(make_launcher=launcher))
    try:
        async with patience(), engine:
            await answer(engine, Ask(images=[drawn_image(1)], count=8))
    except TimeoutError:
        return Outcome("hang")
    except VschedError as error:
        return Outcome(verdict_on(case.stage, str(error)), str(error))
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return Outcome("other error", f"{type(error).__name__}: {error}")
    return Outcome("served")


def verdict_on(stage: Stage, message: str) -> Verdict:
    """Judge whether an error names each setting that would help, and none that would not."""
    named = {name for name, key in KEYS.items() if key in message}
    if not named:
        return "no setting"
    helping = set(KEYS) if stage == "together" else {stage}
    return "told" if named == helping else "wrong setting"


def judged(outcome: Outcome, written: str) -> Outcome:
    """Return the outcome, given the standard error of the processes: a traceback is no clear error."""
    if outcome.verdict in GOOD and "Traceback (most recent call last)" in written:
        last = written.strip().splitlines()[-1]
        return Outcome("traceback", outcome.message or last)
    return outcome


def gist(message: str) -> str:
    """Return the cause in an error, without its numbers and its remedy."""
    what = re.split(r": value |\. Remedy|, under a memory limit| \(bytes\)", message)[0]
    what = re.sub(r"\(.*", "", what)
    return re.sub(r" on cpu limit of \d+| of \d+ tokens|rank \d+ ", "", what).strip()
