"""The environment of a rank process."""

from __future__ import annotations

import pytest

from vsched.fork_server import rank_environment


def test_threads_of_openmp_spin_shortly_and_then_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default OpenMP would spin for ever and take cores from our threads.

    Without spinning each wait needs a wake-up.
    """
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    found = rank_environment(threads=2)
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(found["GOMP_SPINCOUNT"]) <= 1_000
    assert found["OMP_NUM_THREADS"] == "2"


def test_spin_time_of_threads_is_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert rank_environment(threads=1)["GOMP_SPINCOUNT"] == "0"
