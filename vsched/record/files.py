"""Framed records in a file; after a crash it is readable up to its last complete frame.

A file begins with a line with format and version. A frame has a mark, a checksum of its header, the length and CRC-32
of its body, and the body. With a checksum of its own, a header with a damaged length is not mistaken for the end of the
file. At damage, the rest of the file is searched for another frame: if there is one, the file is damaged, else its end
was never written.

The files of a record: `run.vlog` is being written, `run.vlog.000001` and so on are the segments before it.

When a new record begins, the one of the same name is renamed to `run.vlog.previous`, with all its segments, and
replaces the record of that name.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from zlib import crc32

from vsched.errors import RecordError

FORMAT = b"vsched record "
VERSION = b"2\n"
FRAME_BYTES_MAX = 256 << 20
"""Maximum length of a body; a snapshot with a gigabyte of waiting prompts would stop the server for too long."""
_MARK = b"\xb5\x1e"
_TAIL = Struct("<II")
_HEAD = Struct("<2sHII")


def frame(body: bytes) -> bytes:
    """Return a body with its header.

    Raises:
        RecordError: If it is too long.
    """
    if len(body) > FRAME_BYTES_MAX:
        raise RecordError.of_limit(
            "a record is too long",
            value=len(body),
            limit=f"{FRAME_BYTES_MAX} bytes",
            remedy="lower generate.max_waiting_bytes",
        )
    tail = _TAIL.pack(len(body), crc32(body))
    return _MARK + (crc32(tail) & 0xFFFF).to_bytes(2, "little") + tail + body


def is_record(path: Path) -> bool:
    """Return True if a file begins like a record of any version; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(FORMAT)) == FORMAT
    except OSError:
        return False


class FrameReader:
    """Reads the frames of one file; `dropped_bytes` is the length of an incomplete end."""

    def __init__(self, path: Path, *, newest: bool) -> None:
        """Prepare to read; only the newest file of a record may have an incomplete end."""
        self.path = path
        self.dropped_bytes = 0
        self._newest = newest

    def bodies(self) -> Iterator[tuple[int, bytes]]:
        """Yield each body and the position after it.

        Raises:
            RecordError: If the file cannot be read, is no record, or is damaged before its end.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    self._check_start(b"")
                    return
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._check_start(data[: len(FORMAT + VERSION)])
                    yield from self._frames(data)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _check_start(self, start: bytes) -> None:
        if start == FORMAT + VERSION or (self._newest and (FORMAT + VERSION).startswith(start)):
            return
        if start.startswith(FORMAT):
            shown = start[len(FORMAT) :].decode("ascii", "replace").strip()
            raise RecordError(
                f"{self.path}: format {shown}, this vsched reads format {VERSION.decode().strip()}"
            )
        raise RecordError(f"{self.path}: not a record of vsched. Remedy: name the file of --record")

    def _frames(self, data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
        position = len(FORMAT + VERSION)
        while position < len(data):
            body = _body_at(data, position)
            if body is None:
                self._leave(data, position)
                return
            position += _HEAD.size + len(body)
            yield position, body

    def _leave(self, data: mmap.mmap, position: int) -> None:
        """Raise unless the unreadable part is an incomplete end of the newest file."""
        after = data.find(_MARK, position + 1)
        while after >= 0 and _body_at(data, after) is None:
            after = data.find(_MARK, after + 1)
        if after >= 0:
            raise RecordError(
                f"{self.path}: damaged at byte {position}: whole records follow from byte {after} on. "
                "Remedy: copy the file again from its server"
            )
        self.dropped_bytes = len(data) - position
        if not self._newest:
            raise RecordError(
                f"{self.path}: damaged at byte {position}: its end is missing, and newer segments follow"
            )


def _body_at(data: mmap.mmap, position: int) -> bytes | None:
    """Return the body of the frame at a position; None if there is no complete frame."""
    start = position + _HEAD.size
    if start > len(data):
        return None
    mark, check, length, body_check = _HEAD.unpack(data[position:start])
    if mark != _MARK or check != crc32(data[start - _TAIL.size : start]) & 0xFFFF:
        return None
    if length > FRAME_BYTES_MAX or start + length > len(data):
        return None
    body = data[start : start + length]
    return body if crc32(body) == body_check else None


_DIGITS = 6


def numbered(path: Path, segment: int) -> Path:
    """Return the name of a complete segment."""
    return path.with_name(f"{path.name}.{segment:0{_DIGITS}d}")


def previous(path: Path) -> Path:
    """Return the name of the record before this one."""
    return path.with_name(f"{path.name}.previous")


def complete_segments(path: Path) -> list[Path]:
    """Return the complete segments of a record, oldest first."""
    pattern = re.compile(rf"{re.escape(path.name)}\.(\d{{{_DIGITS},}})")
    found = [
        (int(match[1]), entry)
        for entry in path.parent.iterdir()
        if (match := pattern.fullmatch(entry.name))
    ]
    return [entry for _, entry in sorted(found)]


def find_segments(path: Path) -> list[Path]:
    """Return all segments of a record, oldest first.

    Raises:
        RecordError: If there are none.
    """
    if found := _segments(path):
        return found
    raise RecordError(f"{path}: no such record. Remedy: name the file of --record")


def _segments(path: Path) -> list[Path]:
    found = complete_segments(path) if path.parent.is_dir() else []
    return [*found, *([path] if path.is_file() else [])]


def set_aside(path: Path) -> None:
    """Rename a record to `previous`, and delete the record that had that name.

    Raises:
        OSError: If the folder does not allow it.
    """
    kept, earlier = previous(path), _segments(path)
    for old in _segments(kept) if earlier else ():
        old.unlink()
    for one in earlier:
        one.rename(kept.with_name(kept.name + one.name.removeprefix(path.name)))
