"""The environment of a rank process, the pages of native code that it drops, and its end."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from vsched.aio.launcher import LocalLauncher
from vsched.errors import ConfigError, PeerLost
from vsched.fork_server import drop_code_pages, rank_environment
from vsched.rank import exit_status


def test_threads_of_openmp_spin_shortly_and_then_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default OpenMP would spin for ever and take cores from our threads.

    Without spinning each wait needs a wake-up. The environment of the engine may set the number.
    """
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    found = rank_environment(threads=2)
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(found["GOMP_SPINCOUNT"]) <= 1_000
    assert found["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert rank_environment(threads=1)["GOMP_SPINCOUNT"] == "0"


def code_kib() -> int:
    """Resident size of this process's native code, in KiB."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            is_code = rest.startswith("r-xp")
        elif is_code and first == "Rss:":
            total += int(rest.split()[0])
    return total


def test_drop_code_pages_unmaps_code_that_still_runs() -> None:
    before = code_kib()
    drop_code_pages()
    assert code_kib() < before
    assert sorted([2, 1]) == [1, 2]


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("why"), 2), (PeerLost("gone"), 1), (KeyError("bug"), 1)]
)
def test_rank_logs_a_traceback_of_unexpected_errors_only(
    caplog: pytest.LogCaptureFixture, error: Exception, status: int
) -> None:
    """If a rank of a group is killed, the others end, too, and the log has one line of each."""
    assert exit_status(error) == status
    assert (caplog.records[0].exc_info is not None) == isinstance(error, KeyError)


def test_run_folder_is_locked_while_the_engine_lives() -> None:
    """Then systemd-tmpfiles leaves it alone, which would delete the copies of adapters that a restart needs."""
    launcher = LocalLauncher()
    folder = os.open(launcher.run_dir, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        launcher.close()
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)
