"""The benchmark of `model.deterministic`, at its smallest."""

from __future__ import annotations

import pytest

from tests.bench import price as pair
from tests.bench.price import HEAD, Load, Price, measure
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.plugin import TRAINED


def test_table_has_the_median_and_the_range_of_paired_rounds() -> None:
    price = Price(Load(50, 32, 512), 1234, [(1.0, 1.1), (2.0, 1.0), (1.0, 0.9)])
    assert price.line() == "| 1,234 | 32 | 512 | 1.000 | 1.000 | 0.90 (0.50 to 1.10) | 3 |"
    assert price.line().count("|") == HEAD.splitlines()[0].count("|")


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16_dot(), reason="needs avx512_bf16")
def test_both_run_the_load_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "ROUND_S", 0.0)
    price = measure(str(TRAINED), Load(5, 3, 16, requests=2), rounds=2, threads=1)
    assert len(price.seconds) == 2
    assert all(off > 0 and on > 0 for off, on in price.seconds)
    assert price.prompt_tokens > 5
