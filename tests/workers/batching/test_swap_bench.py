"""`python -m tests.bench.swap` measures a request that continues after it was swapped."""

from __future__ import annotations

import pytest

from tests.bench.swap.__main__ import main
from tests.workers.driver import Checkpoints


@pytest.mark.slow
def test_swap_bench_has_a_row_for_each_length(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoints("nano25")), "--dtype", "float32", "--rounds", "1"]
    rows = main([*words, "--lengths", "20", "48", "--chunk", "16"])
    assert [row.tokens for row in rows] == [20, 48]
    assert [row.mib for row in rows] == [rows[0].mib, 1.5 * rows[0].mib]
    assert all(min(row) > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4
