"""`python -m tests.bench.kernel` drives the real kernel, for the configured numbers."""

from __future__ import annotations

import sys

import pytest

from tests.bench import kernel
from tests.bench.kernel import Fleet
from vsched.testing import default_policies


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_replica_runs_its_requests_and_visitors_come_and_go(replicas: int) -> None:
    fleet = Fleet(replicas, 2, policies=default_policies(), events=30)
    for _ in range(10):
        for name in fleet.names:
            fleet.step(name)
        visit = fleet.visit()
        assert 0 < visit.arrival_ns <= visit.all_ns
    fleet.kernel.check_invariants()
    statistics = fleet.kernel.statistics()
    assert statistics["running"] == statistics["generate"]["decoding"] == 2 * replicas
    assert statistics["encode"]["items_encoded"] == statistics["finished"]["length"] == 10
    assert not statistics["policy_faults"]
    each = [one["decoding"] for one in statistics["generate"]["groups"].values()]
    assert each == [2] * replicas


def test_the_command_prints_a_table_and_how_far_a_kernel_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    options = "--replicas 2 1 --running 1 --events 2 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["kernel", *options.split()])
    kernel.main(lines.append)
    assert [line.split("|")[1].strip() for line in lines[1:3]] == ["1", "2"]
    assert "One core drives" in lines[-1]
