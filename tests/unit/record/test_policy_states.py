"""Records of stateful policies: replayed byte for byte, from any segment on, with differences reported."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.kernel.policy_pool import (
    Tallied,
)
from tests.unit.kernel.test_snapshot import RestoredCluster, noting
from tests.unit.record.recorded import record_run
from vsched.policy_host import SeatPolicies
from vsched.record import replay
from vsched.record.files import find_segments
from vsched.testing import ModelCluster, default_policies, run_random


def remembering(fails: int) -> SeatPolicies:
    admission = Tallied(fails=fails)
    return default_policies(
        encode_admission=admission,
        generate_admission=admission,
        encoding=Tallied(fails=fails),
        preemption=Tallied(fails=fails),
        routing=Tallied(fails=fails),
    )


@pytest.mark.parametrize("fails", [0, 3])
def test_replay_gives_policies_the_recorded_state(tmp_path: Path, fails: int) -> None:
    """Even if a part of the record is gone, so that it begins with their state."""
    path = tmp_path / "record"
    record_run(path, 3, policies=remembering(fails), events=200, segment_bytes=16384, segments=99)
    segments = find_segments(path)
    assert len(segments) > 2
    assert replay(path).difference is None
    segments[0].unlink()
    report = replay(path)
    assert report.difference is None
    assert report.first_event > 0


@pytest.mark.parametrize("seed", range(4))
def test_snapshot_and_restart_go_on_alike(seed: int) -> None:
    """A run that is restored before every event decides as one without restarts, failing calls included."""
    decided: list[list[str]] = []
    for make in (ModelCluster, RestoredCluster):
        commands: list[str] = []
        run_random(random.Random(seed), remembering(4), make=noting(make, commands))
        decided.append(commands)
    assert decided[0] == decided[1]
