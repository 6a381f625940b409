"""A small version of `python -m tests.reservation`."""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE_S
from tests.reservation.__main__ import run
from vsched_workers.plugin import plugin


@pytest.mark.slow
def test_random_batches_stay_within_the_reservation() -> None:
    """Under a limit on the process, batches of any legal shapes need no more than was reserved, and not much less."""
    found = run(plugin.trained_checkpoint(), tokens=128, batches=12, seed=1, limit_s=PATIENCE_S)
    assert found.above == 0
    assert found.reserved_bytes / 3 < found.most_bytes <= found.reserved_bytes
