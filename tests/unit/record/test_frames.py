"""Crashes and damage in a file of framed records."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsched.errors import RecordError
from vsched.record import files as frames
from vsched.record.files import FORMAT, VERSION, FrameReader, frame

START = FORMAT + VERSION
BODIES = [b"first", b"second" * 9, b"", b"the last of them"]


def read(path: Path, *, newest: bool = True) -> tuple[list[bytes], int]:
    reader = FrameReader(path, newest=newest)
    return [body for _, body in reader.bodies()], reader.dropped_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.vlog"
    path.write_bytes(START + b"".join(map(frame, BODIES)))
    return path


def test_frames_are_read_as_written(path: Path) -> None:
    assert read(path) == (BODIES, 0)
    (position, _) = list(FrameReader(path, newest=True).bodies())[-1]
    assert position == path.stat().st_size


def test_frames_cut_anywhere_are_read_up_to_the_last_complete_one(path: Path) -> None:
    """A crash may end a file at any byte."""
    whole = path.read_bytes()
    ends = [len(START)]
    for body in BODIES:
        ends.append(ends[-1] + len(frame(body)))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends[1:])
        dropped = length - ends[complete] if length >= ends[0] else 0
        assert read(path) == (BODIES[:complete], dropped)


def test_frames_cut_in_an_older_segment_are_an_error(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError, match="its end is missing, and newer segments follow"):
        read(path, newest=False)


def test_frames_flipped_in_the_middle_are_an_error_with_the_position(path: Path) -> None:
    """Every byte of a frame counts: its head, lengths included, as well as its body."""
    whole = path.read_bytes()
    start = len(START) + len(frame(BODIES[0]))
    for offset in range(start, start + len(frame(BODIES[1]))):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match=f"damaged at byte {start}: whole records follow"):
            read(path)


@pytest.mark.parametrize("tail", [bytes(4096), b"\xb5\x1e" * 40, frame(b"x" * 50)[:-1] + b"y"])
def test_frames_with_garbage_behind_them_are_read_up_to_it(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)
    assert read(path) == (BODIES, len(tail))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"\x80\x04\x95 any other file", "not a record"),
        (FORMAT + b"9\n", "format 9, this vsched reads format 2"),
    ],
)
def test_frames_of_another_format_are_refused(path: Path, start: bytes, message: str) -> None:
    path.write_bytes(start)
    with pytest.raises(RecordError, match=message):
        read(path)


def test_frames_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length counts only below the limit, which applies to the writer too."""
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 20)
    with pytest.raises(RecordError, match="value 21, limit 20 bytes"):
        frame(b"x" * 21)
    with pytest.raises(RecordError, match="damaged at byte"):
        read(path)
