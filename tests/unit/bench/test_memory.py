"""`python -m tests.bench.parts memory`: a load within the checkpoint's limits, and the verdicts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.bench.parts.memory import MemoryRun, Verdict, default_settings
from vsched.assembly import context_tokens, inspect_checkpoint
from vsched.config import load_config
from vsched.config.policies import resolve_policies

DEMO = str(Path(__file__).parents[3] / "workers" / "demo-model")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"served": 3}, "kept"),
        ({"served": 3, "lost": Counter(group_lost=1)}, "broken"),
        ({"served": 3, "losses": 1}, "broken"),
        ({"lost": Counter(encode_failed=1)}, "broken"),
        ({"failure": "no room"}, "no start"),
        ({}, "inconclusive"),
        ({"refusals": Counter(too_large=5)}, "inconclusive"),
    ],
)
def test_memory_run_reports_no_more_than_was_seen(
    changes: dict[str, Any], verdict: Verdict
) -> None:
    """If nothing finished, the result is inconclusive."""
    assert MemoryRun(**changes).verdict == verdict


def test_memory_load_fits_the_context_of_the_demo_model() -> None:
    """The model was trained for less than 8,192 tokens; an image may take half of them."""
    config = load_config(None, sets=default_settings(DEMO), environ={}).config
    info = inspect_checkpoint(config, resolve_policies(config))
    assert context_tokens(config, info) == info.context_tokens == 4096
    assert config.generate.max_batch_tokens == 2048
