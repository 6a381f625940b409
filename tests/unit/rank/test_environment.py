"""What a rank process finds in its environment."""

from __future__ import annotations

import pytest

from vsched.aio.process import rank_environment


def test_waiting_threads_look_for_a_while_and_then_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default waiting policy would spin for ever beside another stage; none at all waits for a waker each time."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    found = rank_environment(threads=2)
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 1_000 < int(found["GOMP_SPINCOUNT"]) < 10_000
    assert found["OMP_NUM_THREADS"] == "2"


def test_an_operator_can_say_how_long_threads_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert rank_environment(threads=1)["GOMP_SPINCOUNT"] == "0"
