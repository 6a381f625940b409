"""Video files for tests: good ones, and a set of hostile ones."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np


def picture(index: int, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Return a frame whose brightness is its number."""
    width, height = size
    pixels = np.full((height, width, 3), (7 * index) % 250, np.uint8)
    pixels[: height // 2, : width // 2] = (250 - 3 * index) % 250
    return pixels


def video(
    count: int = 12,
    *,
    fmt: str = "mp4",
    codec: str = "libx264",
    size: tuple[int, int] = (64, 48),
    rate: Fraction | int = 10,
    rotation: int = 0,
    times: Sequence[int] | None = None,
    audio: bool = False,
    **options: str,
) -> bytes:
    """Return a video; `times` are time stamps in 1/1000 s, for a variable frame rate."""
    file = io.BytesIO()
    if codec == "libx264":
        options |= {"x264-params": "log-level=none"}
    with av.open(file, "w", format=fmt) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        stream.options = options
        if rotation:
            stream.set_display_rotation(rotation)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if audio:
            _add_audio(container)
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(picture(index, size), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _add_audio(container: Any) -> None:
    stream = container.add_stream("aac", rate=16000)
    silence = np.zeros((1, 1024), np.float32)
    for index in range(4):
        frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 1024 * index
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def sound() -> bytes:
    """Return an MP4 with only sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        _add_audio(container)
    return file.getvalue()


def hostile_files() -> Iterator[tuple[str, bytes]]:
    """Yield over 60 named files that no server should answer, or that it should answer within its limits."""
    good = {
        "mp4": video(),
        "fragmented": video(fmt="mp4", codec="mpeg4"),
        "webm": video(fmt="webm", codec="libvpx-vp9"),
        "avi": video(fmt="avi", codec="mpeg4"),
        "ts": video(fmt="mpegts"),
        "gif": video(fmt="gif", codec="gif"),
        "mjpeg": video(fmt="mov", codec="mjpeg"),
    }
    for name, file in good.items():
        for share in (0.03, 0.3, 0.6, 0.95):
            yield f"{name} cut at {share}", file[: int(share * len(file))]
        drawn = np.random.default_rng(len(name))
        for percent in (1, 20):
            damaged = np.frombuffer(file, np.uint8).copy()
            places = drawn.integers(16, len(file), max(len(file) * percent // 100, 1))
            damaged[places] = drawn.integers(0, 255, len(places))
            yield f"{name} with {percent} % noise", damaged.tobytes()
    mp4 = good["mp4"]
    yield "empty", b""
    yield "zeros", bytes(4096)
    yield "text", b"no video" * 100
    yield "only ftyp", mp4[:32]
    yield "playlist", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    yield "concat list", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield (
        "sdp",
        b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nm=video 9 RTP/AVP 96\r\n",
    )
    yield "only sound", sound()
    yield "sound and picture", video(audio=True)
    yield "png as mp4", b"\x89PNG\r\n\x1a\n" + mp4
    yield "matroska magic", b"\x1aE\xdf\xa3" + bytes(2048)
    yield "avi magic", b"RIFF\xff\xff\xff\xffAVI LIST" + bytes(2048)
    yield "gif magic", b"GIF89a" + bytes(2048)
    yield "gif of huge size", b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(64)
    yield "ts magic", (b"G" + bytes(187)) * 40
    yield "duration lies", _with(mp4, b"mvhd", 16, b"\xff\xff\xff\xf0")
    yield "time scale lies", _with(mp4, b"mdhd", 12, b"\0\0\0\x01")
    yield "no time scale", _with(mp4, b"mdhd", 12, b"\0\0\0\0")
    yield "size lies", _with(mp4, b"avc1", 24, struct.pack(">HH", 65535, 65535))
    yield "no size", _with(mp4, b"avc1", 24, struct.pack(">HH", 0, 0))
    yield "samples lie", _with(mp4, b"stsz", 8, b"\xff\xff\xff\xff")
    yield "chunks lie", _with(mp4, b"stco", 4, b"\xff\xff\xff\xff")
    yield "times lie", _with(mp4, b"stts", 4, b"\xff\xff\xff\xff")
    yield "box of size 0", _with(mp4, b"trak", -8, b"\0\0\0\0")
    yield "box of size 2^32", _with(mp4, b"trak", -8, b"\xff\xff\xff\xff")
    yield "moov missing", mp4.replace(b"moov", b"moof")
    yield "mdat missing", mp4.replace(b"mdat", b"free")
    yield "one frame", video(1)
    yield "two pixels", video(size=(2, 2), codec="mpeg4")
    yield "thin", video(size=(2048, 2), codec="mpeg4")
    yield "large frame", video(1, size=(4096, 4096), codec="mpeg4")
    yield "1 ms apart", video(12, fmt="matroska", codec="mpeg4", times=range(12))
    yield "a day", video(3, fmt="matroska", codec="mpeg4", times=[0, 1, 86_400_000])
    yield "variable rate", video(4, fmt="matroska", codec="mpeg4", times=[0, 10, 20, 5000])
    yield "rate of 1 in 1000 s", video(3, codec="mpeg4", rate=Fraction(1, 1000))
    yield "codec not accepted", video(fmt="matroska", codec="ffv1")
    yield "rotated", video(rotation=90)
    yield "odd rotation", video(rotation=33)


def _with(file: bytes, box: bytes, offset: int, content: bytes) -> bytes:
    """Return a file with other bytes at an offset after the name of a box."""
    at = file.index(box) + len(box) + offset
    at = at - len(box) if offset < 0 else at
    return file[:at] + content + file[at + len(content) :]


def expected_frames(file: bytes) -> list[np.ndarray[Any, Any]]:
    """Return all frames of a file, decoded from its beginning."""
    with av.open(io.BytesIO(file), "r") as container:
        frames: Any = container.decode(video=0)
        return [np.asarray(frame.to_image()) for frame in frames]
