"""Busy loops next to a server end with the measurement, and with the bench if it is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.servers.processes import LOOP, identities, neighbours
from tests.patience import PATIENCE_S


def test_neighbours_run_until_the_end_whatever_happens() -> None:
    pids: list[int] = []

    def stopped() -> None:
        with neighbours(2) as found:
            pids.extend(found)
            assert len(identities(pids)) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not identities(pids)
    with neighbours(0) as found:
        assert not found


def test_neighbour_ends_when_another_process_is_its_parent() -> None:
    """As after a kill of the bench, which has no time to end it."""
    command = [sys.executable, "-S", "-c", LOOP, "1"]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
