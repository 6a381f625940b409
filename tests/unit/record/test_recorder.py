"""Retention of records; recording never stops serving."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.unit.kernel.policy_pool import Locked
from tests.unit.record.recorded import config_for, record_run
from vsched.config import Config
from vsched.errors import ConfigError
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.events import GroupReady, TimerFired
from vsched.policy_host import SeatPolicies
from vsched.record import Recorder, check_record_path, open_recorder, replay
from vsched.testing.cluster import default_policies

LIMITS = SchedulerLimits(blocks=2000, slots=2, context_tokens=64, pages=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.vlog"


def begin(
    path: Path, policies: SeatPolicies | None = None, *, segment_bytes: int = 1 << 20
) -> tuple[Scheduler, Recorder]:
    policies = policies or default_policies()
    kernel = Scheduler(LIMITS, policies)
    recorder = open_recorder(config_for(path, policies, segment_bytes=segment_bytes), kernel)
    assert recorder is not None
    return kernel, recorder


def note(kernel: Scheduler, recorder: Recorder, times: int = 1) -> None:
    for _ in range(times):
        recorder.record_event(TimerFired(), 0, kernel.handle(TimerFired(), 0))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_recorder_writes_each_event_at_once_for_its_owner_only(path: Path) -> None:
    """A killed process loses no entry, and a record holds the clients' prompts."""
    kernel, recorder = begin(path)
    assert path.stat().st_mode & 0o777 == 0o600
    for number in range(1, 4):
        note(kernel, recorder)
        assert replay(path).events == number
    recorder.close()


def test_recorder_is_bounded_and_the_kept_segments_replay(path: Path, tmp_path: Path) -> None:
    cluster = record_run(path, 0, events=300, segment_bytes=4096, segments=3)
    found = names(tmp_path)
    assert len(found) == 3
    assert found[0] == "run.vlog"
    assert "run.vlog.000001" not in found
    report = replay(path)
    assert report.difference is None
    assert report.segments == 3
    assert report.first_event > 0
    assert report.first_event + report.events == len(cluster.received)


def test_recorder_does_not_write_a_large_state_after_every_event(tmp_path: Path) -> None:
    kernel, recorder = begin(tmp_path / "run.vlog", segment_bytes=4096)
    state_bytes = (tmp_path / "run.vlog").stat().st_size
    assert state_bytes > 4096
    note(kernel, recorder, 10)
    recorder.close()
    assert names(tmp_path) == ["run.vlog"]


def test_recorder_sets_an_earlier_record_aside(path: Path, tmp_path: Path) -> None:
    """A restart after a crash must not destroy its record; the record before it is deleted."""
    clusters = [record_run(path, seed, events=200, segment_bytes=4096) for seed in range(3)]
    runs = [len(cluster.received) for cluster in clusters]
    assert replay(path).events == runs[2]
    earlier = replay(tmp_path / "run.vlog.previous")
    assert earlier.events == runs[1]
    assert earlier.segments > 1
    assert not [name for name in names(tmp_path) if name.endswith(".new")]


def test_recorder_path_that_cannot_be_written_is_refused_and_checked_without_a_trace(
    tmp_path: Path,
) -> None:
    policies = default_policies()
    with pytest.raises(ConfigError, match=r"^record.path: .*No such file.*Remedy"):
        begin(tmp_path / "nowhere" / "run.vlog")
    check_record_path(Config())
    check_record_path(config_for(tmp_path / "run.vlog", policies))
    for path in (tmp_path / "nowhere" / "run.vlog", tmp_path):
        with pytest.raises(ConfigError, match=r"^record.path: .*folder.*Remedy"):
            check_record_path(config_for(path, policies))
    assert not names(tmp_path)


def test_recorder_refuses_a_record_that_another_server_writes(tmp_path: Path) -> None:
    kernel, recorder = begin(tmp_path / "run.vlog")
    with pytest.raises(ConfigError, match=r"^record.path: .*another server records here"):
        begin(tmp_path / "run.vlog")
    with pytest.raises(ConfigError, match=r"^record.path: .*another server records here"):
        check_record_path(config_for(tmp_path / "run.vlog", default_policies()))
    note(kernel, recorder)
    recorder.close()
    assert replay(tmp_path / "run.vlog").events == 1
    begin(tmp_path / "run.vlog")[1].close()


def test_recorder_reports_once_that_the_disk_is_full_and_serving_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, recorder = begin(path)
    note(kernel, recorder, 2)
    write = os.write
    left = [20]

    def full(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count, left[0] = left[0], 0
        return write(fd, bytes(data)[:count])

    monkeypatch.setattr(os, "write", full)
    note(kernel, recorder, 3)
    monkeypatch.undo()
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    assert "No space left on device" in said.getMessage()
    assert "after 2 events, serving goes on" in said.getMessage()
    report = replay(path)
    assert (report.events, report.dropped_bytes) == (2, 20)
    recorder.close()


def test_recorder_without_room_for_the_next_segment_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, recorder = begin(tmp_path / "run.vlog", segment_bytes=4096)

    full = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    monkeypatch.setattr(os, "open", Mock(side_effect=full))
    note(kernel, recorder, 1000)
    monkeypatch.undo()
    assert len(caplog.records) == 1
    assert names(tmp_path) == ["run.vlog"]
    assert replay(tmp_path / "run.vlog").difference is None


def test_recorder_does_not_begin_without_a_path_or_if_a_policy_cannot_be_recorded(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("an earlier record")
    assert open_recorder(Config(), Scheduler(LIMITS, default_policies())) is None, "no path"
    policies = default_policies(generate_eviction=Locked(early=True))
    assert open_recorder(config_for(path, policies), Scheduler(LIMITS, policies)) is None
    (said,) = caplog.records
    assert "lock" in said.getMessage()
    assert "LockedOrder" in said.getMessage()
    assert path.read_text() == "an earlier record"


def test_recorder_ends_if_a_policy_state_cannot_be_recorded(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policies = default_policies(generate_eviction=Locked(), encode_eviction=Locked())
    cluster = record_run(path, 0, policies=policies, events=300, segment_bytes=4096)
    (said,) = caplog.records
    assert "the record ends after" in said.getMessage()
    report = replay(path)
    assert report.difference is None
    assert 0 < report.events < len(cluster.received)


def test_recorder_outlives_anything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, recorder = begin(tmp_path / "run.vlog")
    recorder.record_event(GroupReady("encode"), 0, [object()])  # type: ignore[list-item]
    recorder.record_event(GroupReady("encode"), 0, [])
    assert len(caplog.records) == 1
    recorder.close()
    recorder.close()
