"""Requests in progress are kept until their ends, within a bound, and read whatever happened to the files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from vsched.config import Config, ServerConfig
from vsched.config.sections import RecordConfig
from vsched.errors import ConfigError
from vsched.record.journal import (
    KeptRequest,
    PartialOutput,
    Progress,
    RequestJournal,
    folder_of,
    open_journal,
)

ONE = KeptRequest(request_id="one", path="/v1/completions", created=5, seed=7, body=b"{}" * 50)
TWO = msgspec.structs.replace(ONE, request_id="two", given_id="mine", tenant="blue", choices=3)


def journal(folder: Path, bytes_max: int = 1 << 20) -> RequestJournal:
    return RequestJournal(folder / "requests", bytes_max=bytes_max)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "requests").iterdir())


def test_requests_without_an_end_are_left_for_the_next(tmp_path: Path) -> None:
    first = journal(tmp_path)
    assert first.keep(ONE)
    assert first.keep(TWO)
    assert first.keep(msgspec.structs.replace(ONE, request_id="three"))
    first.end("one")
    first.end("one")
    assert [one.request.request_id for one in journal(tmp_path).left()] == ["two", "three"]
    assert next(journal(tmp_path).left()).request == TWO
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))


def test_state_of_a_choice_is_kept_with_its_request(tmp_path: Path) -> None:
    journal(tmp_path).keep(ONE)
    second = journal(tmp_path)
    assert [one.progress for one in second.left()] == [Progress()]
    second.note("one", Progress(resumed=1))
    second.note("one", Progress(resumed=2, started=PartialOutput(b"digest", (1, 2, 3))))
    third = journal(tmp_path)
    (left,) = third.left()
    assert left.progress == Progress(resumed=2, started=PartialOutput(b"digest", (1, 2, 3)))
    third.end("one")
    assert files(tmp_path) == []


def test_requests_beyond_the_bound_are_not_kept(tmp_path: Path) -> None:
    """Kept requests stay kept, and their space is free again at their ends."""
    one = journal(tmp_path, bytes_max=300)
    assert one.keep(ONE)
    assert not one.keep(TWO)
    one.end("two")
    assert len(files(tmp_path)) == 1
    one.end("one")
    assert one.keep(TWO)


def test_request_that_cannot_be_written_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = journal(tmp_path)
    (tmp_path / "requests").rmdir()
    assert not one.keep(ONE)
    assert not one.keep(TWO)
    assert caplog.text.count("requests are served, but not kept for another engine") == 1


def test_request_whose_client_leaves_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = journal(tmp_path)
    close = os.close

    def leaving(fd: int) -> None:
        close(fd)
        one.end("one")

    monkeypatch.setattr(os, "close", leaving)
    assert not one.keep(ONE)
    assert files(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_file_that_was_being_written_is_no_request(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No client waits for it: a request is accepted after it was written."""
    one = journal(tmp_path)
    one.keep(ONE)
    one.keep(TWO)
    half = files(tmp_path)[0]
    half.write_bytes(half.read_bytes()[:-cut])
    assert [each.request.request_id for each in journal(tmp_path).left()] == ["two"]
    assert "no complete request" in caplog.text
    assert len(files(tmp_path)) == 1


def test_file_of_something_else_is_told_and_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = journal(tmp_path)
    one.keep(ONE)
    one.keep(TWO)
    files(tmp_path)[0].write_bytes(b"something else altogether")
    assert [each.request.request_id for each in journal(tmp_path).left()] == ["two"]
    assert "a request of the engine before cannot be resumed: " in caplog.text
    assert "not a record of vsched" in caplog.text


def test_progress_that_was_being_written_is_as_it_was_before(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.keep(ONE)
    one.note("one", Progress(resumed=1))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert [each.progress for each in journal(tmp_path).left()] == [Progress()]


def test_journal_is_opened_where_it_is_requested(tmp_path: Path) -> None:
    path = str(tmp_path / "run.vlog")
    assert open_journal(Config(record=RecordConfig(path=path))) is None
    assert open_journal(Config(record=RecordConfig(path=path, resume=True))) is not None
    assert folder_of(tmp_path / "run.vlog").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=r"record.resume: .* Remedy: set record.path"):
        open_journal(Config(record=RecordConfig(resume=True)))
    several = Config(record=RecordConfig(path=path, resume=True), server=ServerConfig(processes=2))
    with pytest.raises(ConfigError, match=r"value server.processes = 2, limit 1. Remedy: "):
        open_journal(several)
    folder_of(tmp_path / "run.vlog").rmdir()
    folder_of(tmp_path / "run.vlog").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be used: File exists. Remedy: "):
        open_journal(Config(record=RecordConfig(path=path, resume=True)))
