from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pybase64
import pytest

from tests.each_case import each_case
from tests.unit.media.fakes import data_url
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import base64_text
from vsched.media.formats import FORMATS, IMAGE, VIDEO, VIDEO_FORMATS, MediaKind
from vsched.media.sources import frames_of, read_local

SETTINGS = MediaConfig(image_bytes_max=3000)


BAD_BASE64 = (
    "A", "AAA==", "AA=", "AA-_", "AA%2", "AA%2G", "%20\n", "AAAA====", "AA==AA==",
    "AAAAAA==AAAA", "AAAAAAA=AAAAAAAA", "AAAAAAAA=AAA", "AAAAAAAA====", "Ã¤Ã¤", "",
)  # fmt: skip
MALFORMED = [
    *(f"data:image/png;base64,{text}" for text in BAD_BASE64),
    *("data:image/png;base64;charset=utf-8,AAAA", "data:image/png", "data:image/png,%89PNG"),
    f"data:image/png;name={'x' * 1000};base64,AAAA",
]


@each_case("piece_bytes", [8, 1024 * 1024])
def test_malformed_data_url_is_refused(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding in the middle, too, also where a piece ends."""
    monkeypatch.setattr(base64_text, "_PIECE_BYTES", piece_bytes)
    for reference in MALFORMED:
        with pytest.raises(RequestRefused) as caught:
            read_local(reference, SETTINGS)
        assert caught.value.status == 400, reference
        assert caught.value.code == "image_reference_invalid", reference


CONTENT = bytes(range(256)) * 8 + b"!"
BASE64 = pybase64.b64encode(CONTENT).decode()
LINES = pybase64.encodebytes(CONTENT).decode()


@each_case(
    "reference",
    [
        f"data:image/png;charset=utf-8;base64,{BASE64}",
        f'data:image/png;name="a b.png";base64,{BASE64}',
        f"data:image/png;  base64,{BASE64}",
        f"data: Image/PNG ; charset = x;BASE64,{BASE64}",
        f"  \n DATA:Image/png;base64,{BASE64}\r\n ",
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
)
def test_data_url_is_read_with_parameters_and_whitespace(
    reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any piece boundaries."""
    for piece_bytes in (5, 12, 1024 * 1024):
        monkeypatch.setattr(base64_text, "_PIECE_BYTES", piece_bytes)
        assert read_local(reference, SETTINGS) == CONTENT


@each_case(
    ("name", "kind"),
    [
        *((name, IMAGE) for name in FORMATS),
        *((name, VIDEO) for name in (*VIDEO_FORMATS, "video/mov", "video/mpegts", "video/mkv")),
    ],
)
def test_data_url_takes_every_format(name: str, kind: MediaKind) -> None:
    """The decoder, data URLs and fetches accept the same; of videos, common names as well."""
    assert read_local(data_url(b"x", name), SETTINGS, kind=kind) == b"x"


LARGE = r"limit 3000 bytes.*image_bytes_max"


@each_case(
    ("reference", "status", "text"),
    [
        # A MIME allow-list.
        (data_url(b"x", "image/svg+xml"), 400, "image/jpeg, image/webp, image/gif or image/bmp"),
        (data_url(bytes(3001)), 413, LARGE),
        (data_url(bytes(3002)), 413, LARGE),
        (f"data:;base64,{pybase64.encodebytes(bytes(3003)).decode()}", 413, LARGE),
        *(
            (reference, 400, "unknown scheme")
            for reference in ("ftp://x/y", "", "/etc/passwd", "javascript:x", "blob")
        ),
        ("file:///etc/hostname", 400, r"switched off.*media\.directory"),
    ],
)
def test_other_references_or_large_data_are_refused(reference: str, status: int, text: str) -> None:
    """Exactly the limit is accepted, and line breaks do not count."""
    with pytest.raises(RequestRefused, match=text) as caught:
        read_local(reference, SETTINGS)
    assert caught.value.status == status
    assert len(read_local(data_url(bytes(3000)), SETTINGS)) == 3000
    lines = pybase64.encodebytes(bytes(3000)).decode()
    assert len(read_local(f"data:;base64,{lines}", SETTINGS)) == 3000


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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "media" / "sub").mkdir(parents=True)
    (tmp_path / "media" / "sub" / "a b.png").write_bytes(b"inside")
    (tmp_path / "media" / "big.png").write_bytes(bytes(3001))
    (tmp_path / "secret.png").write_bytes(b"outside")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "c.png").write_bytes(b"neighbour")
    (tmp_path / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "media" / "fine.png").symlink_to(tmp_path / "media" / "sub" / "a b.png")
    os.mkfifo(tmp_path / "media" / "pipe.png")
    return tmp_path


def file_settings(tree: Path) -> MediaConfig:
    return MediaConfig(image_bytes_max=3000, directory=str(tree / "media"))


@each_case("path", ["media/sub/a%20b.png", "media/fine.png", "media2/../media/fine.png"])
def test_file_under_the_directory_is_read(tree: Path, path: str) -> None:
    settings = file_settings(tree)
    assert read_local(f"file://{tree}/{path}", settings) == b"inside"
    assert read_local(f"file://localhost{tree}/{path}", settings) == b"inside"
    with pytest.raises(RequestRefused) as caught:
        read_local(f"file://{tree}/media/big.png", settings)
    assert caught.value.status == 413


@each_case(
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
        "file://{tree}/media/pipe.png",
    ],
)
def test_file_escapes_and_absences_read_alike(tree: Path, reference: str) -> None:
    """The error reveals nothing of the file system."""
    with pytest.raises(RequestRefused) as caught:
        read_local(reference.format(tree=tree), file_settings(tree))
    assert caught.value.code == "image_file_refused"
    assert "cannot be read" in caught.value.message
    assert str(tree) not in caught.value.message


def test_a_video_of_commas_makes_a_bounded_number_of_urls() -> None:
    frames = frames_of("data:video/jpeg;base64," + 100_000 * ",")
    assert len(frames) == 65_537  # more than media.video_frames_max: it is refused
