"""`python -m tests.bench.ab`: with drafts, the outputs of two engines are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.ab import main


@pytest.mark.slow
@pytest.mark.thorough
def test_ab_compares_rates_outputs_and_preemptions(checkpoints: Callable[[str], Path]) -> None:
    words = [str(checkpoints("nano25")), "--rounds", "1", "--tokens", "8", "--clients", "2"]
    for setting in ("encode.replicas=0", "generate.threads=1", "model.dtype=float32"):
        words += ["--set", setting]
    drafts = main([*words, "--equal", "--b", "generate.drafting.use=prompt-lookup"])
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in drafts]
    assert [row[:2] for row in cells] == [["repetitive", "2"], ["ordinary", "2"]]
    assert {row[6] for row in cells} == {"3 of 3"}
