"""After an engine's death: requests kept until their ends, tokens that were sent, and an engine that goes on."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import msgspec
import pytest

from tests.unit.kernel.policy_pool import random_policies
from tests.unit.kernel.setups import image_request, make_cluster
from tests.unit.record.recorded import downgrade, read_bodies, record_run, write_bodies
from vsched.config import Config, ServerConfig
from vsched.config.sections import RecordConfig
from vsched.errors import ConfigError, RequestRefused
from vsched.kernel.commands import RefusalCode
from vsched.kernel.events import Cleared, Submitted
from vsched.record import journal as journal_module
from vsched.record.entries import decode_entry, decode_header, encode_entry
from vsched.record.files import find_segments
from vsched.record.journal import (
    KeptRequest,
    PartialOutput,
    RequestJournal,
    ResumeProgress,
    folder_of,
    open_journal,
    prompt_digest,
    read_left,
)
from vsched.record.replay import Replay
from vsched.sim.ranks.stepped import correct_outputs
from vsched.testing import ModelCluster
from vsched.types import FinishReason

ONE = KeptRequest(request_id="one", path="/v1/completions", created=5, seed=7, body=b"{}" * 50)
TWO = msgspec.structs.replace(ONE, request_id="two", given_id="mine", tenant="blue", choices=3)


def journal(folder: Path, bytes_max: int = 1 << 20) -> RequestJournal:
    return RequestJournal(folder / "requests", bytes_max=bytes_max)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "requests").iterdir())


def test_requests_without_an_end_are_left_for_the_next(tmp_path: Path) -> None:
    first = journal(tmp_path)
    assert first.keep_request(ONE)
    assert first.keep_request(TWO)
    assert first.keep_request(msgspec.structs.replace(ONE, request_id="three"))
    first.delete_request("one")
    first.delete_request("one")
    assert [one.request.request_id for one in journal(tmp_path).left()] == ["two", "three"]
    assert next(journal(tmp_path).left()).request == TWO
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))


def test_state_of_a_choice_is_kept_with_its_request(tmp_path: Path) -> None:
    journal(tmp_path).keep_request(ONE)
    second = journal(tmp_path)
    assert [one.progress for one in second.left()] == [ResumeProgress()]
    second.append_progress("one", ResumeProgress(resumed=1))
    progress = ResumeProgress(resumed=2, started=PartialOutput(b"digest", (1, 2, 3)))
    second.append_progress("one", progress)
    third = journal(tmp_path)
    (left,) = third.left()
    assert left.progress == ResumeProgress(resumed=2, started=PartialOutput(b"digest", (1, 2, 3)))
    third.delete_request("one")
    assert files(tmp_path) == []


def test_requests_beyond_the_bound_are_not_kept(tmp_path: Path) -> None:
    """Kept requests stay kept, and their space is free again at their ends."""
    one = journal(tmp_path, bytes_max=300)
    assert one.keep_request(ONE)
    assert not one.keep_request(TWO)
    one.delete_request("two")
    assert len(files(tmp_path)) == 1
    one.delete_request("one")
    assert one.keep_request(TWO)


def test_request_that_cannot_be_written_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = journal(tmp_path)
    (tmp_path / "requests").rmdir()
    assert not one.keep_request(ONE)
    assert not one.keep_request(TWO)
    assert caplog.text.count("requests are served, but not kept for another engine") == 1


def test_request_whose_client_leaves_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = journal(tmp_path)
    close = os.close

    def leaving(fd: int) -> None:
        close(fd)
        one.delete_request("one")

    monkeypatch.setattr(os, "close", leaving)
    assert not one.keep_request(ONE)
    assert files(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_files_that_are_no_requests_harm_no_other(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No client waits for one that was being written: a request is accepted after that."""
    one = journal(tmp_path)
    for request in (ONE, TWO, msgspec.structs.replace(ONE, request_id="three")):
        one.keep_request(request)
    half, _, other = files(tmp_path)
    half.write_bytes(half.read_bytes()[:-cut])
    other.write_bytes(b"something else altogether")
    assert [each.request.request_id for each in journal(tmp_path).left()] == ["two"]
    assert half not in files(tmp_path)
    assert "no complete request" in caplog.text
    assert "a request of the engine before cannot be resumed: " in caplog.text
    assert "not a record of vsched" in caplog.text


def test_progress_that_was_being_written_is_as_it_was_before(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.keep_request(ONE)
    one.append_progress("one", ResumeProgress(resumed=1))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    second = journal(tmp_path)
    assert [each.progress for each in second.left()] == [ResumeProgress()]
    second.append_progress("one", ResumeProgress(resumed=1))
    assert [each.progress for each in journal(tmp_path).left()] == [ResumeProgress(resumed=1)]


def test_progress_that_found_no_room_on_the_disk_is_as_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = journal(tmp_path)
    one.keep_request(ONE)

    def write_half(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(journal_module, "write_all", write_half)
        with pytest.raises(OSError, match="No space"):
            one.append_progress("one", ResumeProgress(resumed=1))
    one.append_progress("one", ResumeProgress(resumed=2))
    assert [each.progress for each in journal(tmp_path).left()] == [ResumeProgress(resumed=2)]


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


def cut(path: Path, share: float) -> tuple[int, int]:
    """Cut the newest segment, as if the engine had been killed there; return the range of its remaining events."""
    bodies = read_bodies(path)
    kept = max(2, int(len(bodies) * share))
    write_bodies(path, bodies[:kept], b"\xb5\x1e half")
    first = decode_header(bodies[0]).number
    return first, first + min(kept, len(bodies)) - 1


@pytest.mark.parametrize(("seed", "share"), [*enumerate([0.3, 0.6, 0.9, 1.0, 0.3, 0.6])])
def test_answers_go_on_behind_the_reported_tokens(tmp_path: Path, seed: int, share: float) -> None:
    """Also with speculative decoding, swaps and any policies, and if earlier segments are not read."""
    path = tmp_path / "run.vlog"
    policies = random_policies(random.Random(seed)) if seed % 2 else None
    segment_bytes = 4096 if seed % 3 else 64 << 20
    first = record_run(path, seed, policies=policies, segment_bytes=segment_bytes)
    begin, events = cut(path, share)
    reported, ended = first.seen[events - 1]
    left = read_left(path, reported.keys())
    assert not left.trouble
    if begin:  # requests that had ended by then are in earlier segments
        before = first.seen[begin - 1][1]
        ended = ended - before
        reported = {name: count for name, count in reported.items() if name not in before}
    broken = FinishReason.ABORT, FinishReason.ERROR
    gone = {name for name in ended if first.ended[name].reason in broken}
    assert left.ended.keys() == gone
    assert left.started.keys() == reported.keys() - gone
    second = ModelCluster(first.limits)
    for name, started in left.started.items():
        request = first.requests[name]
        expected = correct_outputs(request)
        known = reported[name] - (name in ended)  # its last token leads to the end again
        assert started.token_ids == tuple(expected[: max(known, 0)])
        assert started.prompt == prompt_digest(request)
        second.hand_in(Submitted(request, emitted=started.continued(request)))
        second.drain()
        assert name not in second.refused
        assert second.outputs[name] == expected[len(started.token_ids) :]
        assert second.ended[name].reason is FinishReason.LENGTH


def end_server(path: Path, code: str) -> None:
    """Append the event with which a server ends its requests."""
    bodies, replay = read_bodies(path), Replay(None, None)
    replay.run([path])
    assert replay.kernel is not None
    last, event = decode_entry(bodies[-1]), Cleared("the server ends", code)
    commands = replay.kernel.handle(event, last.now_ns)
    write_bodies(path, [*bodies, encode_entry(last.number + 1, last.now_ns, event, commands)])


@pytest.mark.parametrize("code", ["stopping", "given_up", "cleared"])
def test_answers_that_ended_with_their_server_go_on(tmp_path: Path, code: str) -> None:
    """Unread answers continue; an answer cleared by an operator keeps its error."""
    path = tmp_path / "run.vlog"
    names = [*record_run(path, 1).requests]
    cut(path, 0.6)
    before = read_left(path, names)
    assert any(one.token_ids for one in before.started.values())
    end_server(path, code)
    after = read_left(path, names)
    assert not after.trouble
    if code == "cleared":
        assert {after.ended[name].code for name in before.started.keys() & after.ended} == {code}
        return
    assert (after.started, after.ended) == (before.started, before.ended)


def test_answers_go_on_after_an_upgrade_that_cannot_read_the_snapshots(tmp_path: Path) -> None:
    """All segments are replayed then; without the first one, the reason is reported."""
    path = tmp_path / "run.vlog"
    record_run(path, 2, segment_bytes=4096)
    cut(path, 0.6)
    names = [*record_run(tmp_path / "same.vlog", 2).requests]
    before = read_left(path, names)
    assert before.started
    downgrade(path)
    after = read_left(path, names)
    assert not after.trouble
    assert before.started.items() <= after.started.items()
    find_segments(path)[0].unlink()
    assert "snapshots cannot be read here" in read_left(path, names).trouble


def test_answer_that_has_all_its_tokens_is_refused() -> None:
    request = image_request("full", (b"a", 4))
    cluster = make_cluster()
    cluster.hand_in(Submitted(request, emitted=tuple(correct_outputs(request))))
    assert cluster.refused["full"].code is RefusalCode.EMPTY


def test_another_prompt_or_image_is_refused() -> None:
    request = image_request("r", (b"a", 4), (b"b", 4))
    started = PartialOutput(prompt_digest(request), (1, 2))
    (first, *others) = request.items
    items = (msgspec.structs.replace(first, key=b"another" * 4), *others)
    for changed in (
        msgspec.structs.replace(request, prompt_token_ids=[*request.prompt_token_ids, 5]),
        msgspec.structs.replace(request, items=items),
    ):
        with pytest.raises(RequestRefused, match=r"Remedy: send the request again") as caught:
            started.continued(changed)
        assert (caught.value.code, caught.value.status) == ("prompt_changed", 409)


def test_damaged_record_reports_the_events_before_the_damage(tmp_path: Path) -> None:
    """The tokens are a prefix of the sent ones, and the error names the place."""
    path = tmp_path / "run.vlog"
    first = record_run(path, 3)
    names = list(first.requests)
    whole = path.read_bytes()
    position = len(whole) * 2 // 3
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    left = read_left(path, names)
    assert "damaged at byte" in left.trouble
    assert left.started
    for name, started in left.started.items():
        expected = correct_outputs(first.requests[name])
        assert started.token_ids == tuple(expected[: len(started.token_ids)])


@pytest.mark.parametrize("data", [None, b"", b"not a record"])
def test_record_that_cannot_be_read_reports_only_why(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "run.vlog"
    if data is not None:
        path.write_bytes(data)
    left = read_left(path, ["a"])
    assert (left.started, left.ended) == ({}, {})
    assert left.trouble
