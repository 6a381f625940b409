"""Measurements at start hold under the maximum legal load, with a real limit on the process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.parts.memory import measure_memory
from tests.commands import PLAIN, run_command
from vsched.config import load_config
from vsched.engine import Engine
from vsched.types import SamplingParams
from vsched.worker.memory import status_bytes

pytestmark = pytest.mark.slow
on_one_loop = pytest.mark.asyncio(loop_scope="package")

LIMIT_BYTES = 3 << 29  # half of it are the libraries of torch with CUDA
ANSWERS = 14
LOAD_S = float(os.environ.get("VSCHED_LOAD_S", "0"))
"""`VSCHED_LOAD_S=600 pytest tests/e2e/test_memory.py` is the long run."""
SETTINGS = (
    "placement=together",
    "encode.memory_limit=1MiB",  # one process, and the limits add up
    "generate.context_tokens=2048",
    "generate.max_batch_tokens=1024",
    "generate.slots=12",
    "generate.step_target_ms=0",
    "encode.admission.max_items=4",
)


@on_one_loop
@pytest.mark.timeout(LOAD_S + 300)
@pytest.mark.usefixtures("own_fork_server")
async def test_adversarial_load_within_a_hard_limit_loses_nothing(
    checkpoints: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Largest images, full contexts and all slots at once."""
    run = await measure_memory(
        [
            *SETTINGS,
            f"model.path={checkpoints('nano25')}",
            f"generate.memory_limit={LIMIT_BYTES}",
            'generate.memory={use="auto-profile"}',
        ],
        seconds=LOAD_S,
        answers_min=ANSWERS,
    )
    assert run.verdict == "kept", run
    assert run.refusals == {}
    assert run.served >= ANSWERS
    assert run.kv_tokens > 2048
    assert "out of memory" not in capfd.readouterr().err
    # The limit was real, and close: more than half of it was in use.
    assert LIMIT_BYTES / 2 < run.peak_bytes <= LIMIT_BYTES + (1 << 20)


@on_one_loop
@pytest.mark.thorough
@pytest.mark.parametrize("pages", ["on_use", "at_start"])
@pytest.mark.usefixtures("own_fork_server")
async def test_kv_pages_come_when_configured(
    pages: str, checkpoints: Callable[[str], Path]
) -> None:
    """The sizes follow from the limit either way; the resident memory differs by the cache."""
    sets = [
        f"model.path={checkpoints('nano25')}",
        "generate.memory_limit=2GiB",
        f"generate.kv_pages={pages}",
        "generate.context_tokens=2048",
        "generate.max_batch_tokens=512",
    ]
    async with Engine(load_config(None, sets=sets, environ={}).config) as engine:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        stream = engine.stream(prompt="Hello", request_id="one", sampling=sampling)
        assert [text async for text in stream]
        (group,) = [group for group in engine.groups() if group["stage"] == "generate"]
        (rank,) = group["ranks"]
        kv_bytes = rank["memory"]["kv"]
        assert kv_bytes > 512 << 20
        resident = status_bytes("RssAnon", Path(f"/proc/{rank['pid']}/status"))
        assert resident > kv_bytes if pages == "at_start" else resident < kv_bytes / 2


def test_profile_writes_the_ledger(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """The procedure without serving; the table and the JSON agree."""
    limits = [f"generate.memory_limit={LIMIT_BYTES}", "generate.context_tokens=2048"]
    words = [word for each in limits for word in ("--set", each)]
    words += ["--json", str(tmp_path / "ledger.json")]
    printed = run_command("profile", checkpoints("nano25"), *words, env=PLAIN)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    limited = next(pool for pool in ledger["pools"] if pool["total"] == LIMIT_BYTES)
    kv_bytes = next(line["bytes"] for line in limited["lines"] if line["line"] == "kv")
    assert kv_bytes % ledger["kv_tokens"] == 0
    assert f"{ledger['kv_tokens']} tokens of KV cache" in printed
    assert [phase["action"] for phase in ledger["phases"]] == ["reserve", "probe", "build"]
    assert "generate: build" in printed
    assert re.search(rf"{limited['pool']} +total", printed)  # the widest pool sets the column
