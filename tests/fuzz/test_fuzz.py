"""A small fuzz for every run; `python -m tests.fuzz` is the large one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.fuzz.run import fuzz_engine, fuzz_sockets


@pytest.mark.slow
@pytest.mark.parametrize("fuzz", [fuzz_engine, fuzz_sockets])
def test_fuzz_is_answered(fuzz: Callable[[int, int], Counter[int]]) -> None:
    """No 500, no hang; and requests are close enough to legal ones that a fair part is served."""
    statuses = fuzz(1, 300)
    assert statuses.total() == 300
    assert statuses[200] > 25
    assert statuses[400] > 25
