"""What a rank process finds in its environment."""

from __future__ import annotations

import pytest

from tests.machines import pretend_cores
from vsched.aio.environment import local_launcher
from vsched.aio.replicas.rank_environment import rank_environment
from vsched.config import load_config


def test_waiting_threads_look_for_a_while_and_then_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default waiting policy would spin for ever beside another stage; none at all waits for a waker each time."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    found = rank_environment(threads=2, oversubscribed=True)
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 1_000 < int(found["GOMP_SPINCOUNT"]) < 10_000
    assert found["OMP_NUM_THREADS"] == "2"


def test_threads_with_a_core_each_look_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert int(rank_environment(threads=2, oversubscribed=False)["GOMP_SPINCOUNT"]) > 20_000


def test_an_operator_can_say_how_long_threads_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert rank_environment(threads=1, oversubscribed=True)["GOMP_SPINCOUNT"] == "0"


@pytest.mark.parametrize(
    ("sets", "oversubscribed"),
    [
        ([], False),
        (["encode.threads=4"], False),
        (["encode.threads=4", "generate.threads=5"], True),
        (["encode.replicas=3", "generate.replicas=4", "encode.threads=2"], True),
        (["placement=together"], False),
        (["placement=together", "encode.threads=8", "generate.threads=8"], False),
        (["placement=together", "encode.threads=9"], True),
    ],
)
def test_ranks_crowd_where_they_have_more_threads_than_there_are_cores(
    sets: list[str], *, oversubscribed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 8)
    config = load_config(None, sets=sets, environ={}).config
    assert config.oversubscribed == oversubscribed
    launcher = local_launcher(config)
    try:
        assert launcher.oversubscribed == oversubscribed
    finally:
        launcher.close()
