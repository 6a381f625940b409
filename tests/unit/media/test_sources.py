from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pybase64
import pytest

from tests.unit.media.fakes import data_url, image_bytes
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import base64_text
from vsched.media.formats import FORMATS, VIDEO, VIDEO_FORMATS
from vsched.media.sources import frames_of, read_local

SETTINGS = MediaConfig(image_bytes_max=3000)


def test_data_url_yields_its_bytes() -> None:
    content = image_bytes()
    assert read_local(data_url(content), SETTINGS) == content
    assert read_local(data_url(content).replace("data:image", "DATA:Image"), SETTINGS) == content


@pytest.mark.parametrize(
    "reference",
    [
        "data:image/png;base64,A",
        "data:image/png;base64,AAA==",
        "data:image/png;base64,AA=",
        "data:image/png;base64,AA-_",
        "data:image/png;base64,AA%2",
        "data:image/png;base64,AA%2G",
        "data:image/png;base64,%20\n",
        "data:image/png;base64,AAAA====",
        "data:image/png;base64,AA==AA==",
        "data:image/png;base64,Ã¤Ã¤",
        "data:image/png;base64,",
        "data:image/png;base64;charset=utf-8,AAAA",
        "data:image/png",
        "data:image/png,%89PNG",
        f"data:image/png;name={'x' * 1000};base64,AAAA",
    ],
)
def test_malformed_data_url_is_refused(reference: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_local(reference, SETTINGS)
    assert caught.value.status == 400
    assert caught.value.code == "image_reference_invalid"


CONTENT = bytes(range(256)) * 8 + b"!"
BASE64 = pybase64.b64encode(CONTENT).decode()
LINES = pybase64.encodebytes(CONTENT).decode()


@pytest.mark.parametrize(
    "reference",
    [
        f"data:image/png;charset=utf-8;base64,{BASE64}",
        f'data:image/png;name="a b.png";base64,{BASE64}',
        f"data:image/png;  base64,{BASE64}",
        f"data: Image/PNG ; charset = x;BASE64,{BASE64}",
        f"  \n DATA:image/png;base64,{BASE64}\r\n ",
        f"data:;charset=utf-8;base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:png;base64,{BASE64}",
        f"data:text/plain;base64,{BASE64}",
        f"data:application/octet-stream;base64,{BASE64}",
        f"data:image/png;base64,{LINES}",
        f"data:image/png;base64,{LINES}".replace("\n", "\r\n"),
        f"data:image/png;base64, {LINES} ".replace("\n", " \t\f"),
        f"data:image/png;base64,{BASE64.rstrip('=')}",
    ],
    ids=range(14),
)
@pytest.mark.parametrize("piece_bytes", [5, 1024 * 1024])
def test_data_url_is_read_with_parameters_and_whitespace(
    reference: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any piece boundaries."""
    monkeypatch.setattr(base64_text, "_PIECE_BYTES", piece_bytes)
    assert read_local(reference, SETTINGS) == CONTENT


def test_data_url_line_breaks_do_not_count_as_size() -> None:
    lines = pybase64.encodebytes(bytes(3000)).decode()
    assert len(read_local(f"data:;base64,{lines}", SETTINGS)) == 3000
    lines = pybase64.encodebytes(bytes(3003)).decode()
    with pytest.raises(RequestRefused, match="limit 3000 bytes"):
        read_local(f"data:;base64,{lines}", SETTINGS)


@pytest.mark.parametrize("size", [5, 6, 7, 12, 13])
def test_data_url_is_decoded_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any piece boundaries all of it is decoded; padding in the middle is detected."""
    pieces: list[bytes] = []

    def decode(text: bytes, *, validate: bool) -> bytes:
        pieces.append(text)
        return pybase64.b64decode(text, validate=validate)

    monkeypatch.setattr(base64_text, "_PIECE_BYTES", 8)
    monkeypatch.setattr(base64_text, "pybase64", SimpleNamespace(b64decode=decode))
    content = bytes(range(size))
    assert read_local(data_url(content), SETTINGS) == content
    assert b"".join(pieces).decode() == data_url(content).partition(",")[2]
    assert max(map(len, pieces)) <= 8
    for wrong in ("AAAAAA==AAAA", "AAAAAAA=AAAAAAAA", "AAAAAAAA=AAA", "AAAAAAAA===="):
        with pytest.raises(RequestRefused, match="base64"):
            read_local(f"data:image/png;base64,{wrong}", SETTINGS)


@pytest.mark.parametrize("kind", FORMATS)
def test_data_url_takes_every_format(kind: str) -> None:
    """The decoder, data URLs and fetches accept the same: there is one list."""
    assert read_local(data_url(b"x", kind), SETTINGS) == b"x"


@pytest.mark.parametrize("name", [*VIDEO_FORMATS, "video/mov", "video/mpegts", "video/mkv"])
def test_data_url_takes_common_names_of_video_formats(name: str) -> None:
    assert read_local(data_url(b"x", name), SETTINGS, kind=VIDEO) == b"x"


def test_data_url_refuses_other_media_types() -> None:
    """A MIME allow-list."""
    with pytest.raises(RequestRefused, match="image/jpeg, image/webp, image/gif or image/bmp"):
        read_local(data_url(b"x", "image/svg+xml"), SETTINGS)


@pytest.mark.parametrize(("size", "accepted"), [(3000, True), (3001, False), (3002, False)])
def test_data_url_size_is_bounded_exactly(size: int, accepted: bool) -> None:
    """An equal size is accepted, one byte more is a 413 with value, limit and remedy."""
    reference = data_url(bytes(size))
    if accepted:
        assert len(read_local(reference, SETTINGS)) == size
        return
    with pytest.raises(RequestRefused, match=r"limit 3000 bytes.*image_bytes_max") as caught:
        read_local(reference, SETTINGS)
    assert caught.value.status == 413


def test_data_url_length_is_checked_before_base64() -> None:
    """50 MB cost no memory."""
    reference = "data:image/png;base64," + "A" * 50_000_000
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefused, match="too large"):
            read_local(reference, SETTINGS)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reference", ["ftp://x/y", "", "/etc/passwd", "javascript:x", "blob"])
def test_unknown_scheme_is_refused(reference: str) -> None:
    with pytest.raises(RequestRefused, match="unknown scheme"):
        read_local(reference, SETTINGS)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "media" / "sub").mkdir(parents=True)
    (tmp_path / "media" / "sub" / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret.png").write_bytes(b"outside")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "c.png").write_bytes(b"neighbour")
    (tmp_path / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "media" / "fine.png").symlink_to(tmp_path / "media" / "sub" / "a b.png")
    return tmp_path


def file_settings(tree: Path) -> MediaConfig:
    return MediaConfig(image_bytes_max=3000, directory=str(tree / "media"))


def test_file_is_off_by_default() -> None:
    with pytest.raises(RequestRefused, match=r"switched off.*media\.directory"):
        read_local("file:///etc/hostname", SETTINGS)


@pytest.mark.parametrize(
    "path", ["media/sub/a%20b.png", "media/fine.png", "media2/../media/fine.png"]
)
def test_file_under_the_directory_is_read(tree: Path, path: str) -> None:
    assert read_local(f"file://{tree}/{path}", file_settings(tree)) == b"inside"
    assert read_local(f"file://localhost{tree}/{path}", file_settings(tree)) == b"inside"


@pytest.mark.parametrize(
    "reference",
    [
        "file://{tree}/secret.png",
        "file://{tree}/media/../secret.png",
        "file://{tree}/media/%2e%2e/secret.png",
        "file://{tree}/media/link.png",
        "file://{tree}/media2/c.png",
        "file://{tree}/media/none.png",
        "file://{tree}/media/sub",
        "file://{tree}/media",
        "file://{tree}/media/fine.png%00",
        "file://{tree}/media/%ff.png",
        "file://otherhost{tree}/media/fine.png",
        "file:media/fine.png",
        "file://[bad",
    ],
)
def test_file_escapes_and_absences_read_alike(tree: Path, reference: str) -> None:
    """The error reveals nothing of the file system."""
    with pytest.raises(RequestRefused) as caught:
        read_local(reference.format(tree=tree), file_settings(tree))
    assert caught.value.code == "image_file_refused"
    assert "cannot be read" in caught.value.message
    assert str(tree) not in caught.value.message


def test_file_fifo_does_not_hang(tree: Path) -> None:
    os.mkfifo(tree / "media" / "pipe.png")
    with pytest.raises(RequestRefused, match="cannot be read"):
        read_local(f"file://{tree}/media/pipe.png", file_settings(tree))


def test_file_size_is_bounded(tree: Path) -> None:
    (tree / "media" / "big.png").write_bytes(bytes(3001))
    with pytest.raises(RequestRefused) as caught:
        read_local(f"file://{tree}/media/big.png", file_settings(tree))
    assert caught.value.status == 413


def test_a_video_of_commas_makes_a_bounded_number_of_urls() -> None:
    frames = frames_of("data:video/jpeg;base64," + 100_000 * ",")
    assert len(frames) == 65_537  # more than media.video_frames_max: it is refused
