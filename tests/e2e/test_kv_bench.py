"""`python -m tests.bench.kv`: the same memory holds more tokens in 8 bits, which avoids preemptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.kv.__main__ import main


@pytest.mark.slow
def test_kv_bench_reports_what_8_bits_buy(checkpoints: Callable[[str], Path]) -> None:
    words = [str(checkpoints("nano25")), "--mib", "1", "--requests", "3"]
    load = ["--prompt", "100", "--output", "8", "--set", "model.dtype=float32"]
    plain, small = main([*words, *load, "--set", "generate.context_tokens=256"])
    assert small.bytes_per_token == 18 / 64 * plain.bytes_per_token, "for a head of 16 values"
    assert small.tokens > 3.5 * plain.tokens
    assert small.at_once >= plain.at_once
    assert small.preemptions <= plain.preemptions
