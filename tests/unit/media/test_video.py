"""Decoding of videos: exactly the sampled frames, and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("av")

from tests.each_case import each_case
from tests.unit.media.video_files import expected_frames, video
from vsched.errors import RequestRefused
from vsched.media import video as video_module
from vsched.media.video import VideoLimits, inspect_video, read_frames
from vsched.worker.contract import VideoFacts

LIMITS = VideoLimits(pixels=1 << 20, seconds=60.0, decode_s=10.0)
FILES = {
    "mp4, B-frames": {"bf": "3", "g": "8"},
    "open groups": {"fmt": "mpegts", "bf": "2", "g": "8", "x264opts": "open-gop=1"},
    "webm": {"fmt": "webm", "codec": "libvpx-vp9", "g": "8"},
    "avi": {"fmt": "avi", "codec": "mpeg4", "g": "6", "bf": "2"},
    "gif": {"fmt": "gif", "codec": "gif"},
}


@each_case("name", list(FILES))
def test_sampled_frames_equal_those_of_decoding_everything(name: str) -> None:
    """Ascending numbers, far apart, adjacent, and the last one."""
    file = video(30, **FILES[name])  # type: ignore[arg-type]
    expected = expected_frames(file)
    assert inspect_video(file, LIMITS).frames == len(expected) == 30
    for numbers in ([0], [29], [5, 6, 7, 8, 9], [0, 7, 15, 16, 23, 29], [28, 29], [3, 17]):
        found = read_frames(file, numbers, LIMITS)
        for number, image in zip(numbers, found, strict=True):
            assert np.array_equal(np.asarray(image), expected[number]), (numbers, number)


class Wrapped:
    """An object of PyAV with other attributes."""

    def __init__(self, inner: Any, **own: object) -> None:
        self._inner = inner
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_groups_without_a_sampled_frame_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 groups of 8 frames, the decoder gets the packets of two."""
    file = video(80, g="8", bf="0", sc_threshold="0")
    sent: list[object] = []
    opened = video_module._open

    def open_counted(encoded: bytes, limits: VideoLimits) -> Any:
        found: Any = opened(encoded, limits)
        context = found.stream.codec_context

        def decode(packet: Any) -> Any:
            sent.append(packet)
            return context.decode(packet)

        found.stream = Wrapped(found.stream, codec_context=Wrapped(context, decode=decode))
        return found

    monkeypatch.setattr(video_module, "_open", open_counted)
    assert len(list(read_frames(file, [1, 78], LIMITS))) == 2
    assert sum(packet is not None for packet in sent) <= 2 * 8 + 4


def test_facts_of_a_video() -> None:
    """Size as shown, number of frames and rate; a frame that is shown is that of its time."""
    assert inspect_video(video(rotation=90), LIMITS) == VideoFacts(48, 64, 12, 10.0)
    times = [0, 100, 200, 1000, 1100, 1200, 1300, 3000]
    file = video(8, fmt="matroska", codec="mpeg4", times=times)
    facts = inspect_video(file, LIMITS)
    assert facts.frames == 8
    assert facts.rate == pytest.approx(7 / 3, rel=0.01)
    expected = expected_frames(file)
    shown = read_frames(file, range(8), LIMITS)
    # Half a frame is 214 ms: 0 + 214, 429 + 214, 857 + 214, ...
    for image, index in zip(shown, [2, 2, 3, 6, 6, 6, 6, 7], strict=True):
        assert np.array_equal(np.asarray(image), expected[index])


def test_a_frame_is_turned_upright() -> None:
    [upright] = read_frames(video(1, rotation=90), [0], LIMITS)
    [lying] = read_frames(video(1), [0], LIMITS)
    assert np.array_equal(np.asarray(upright), np.rot90(np.asarray(lying)))


@each_case(
    ("limits", "key"),
    [
        (VideoLimits(64 * 48 - 1, 60.0, 10.0), "media.image_pixels_max"),
        (VideoLimits(1 << 20, 1.0, 10.0), "media.video_seconds_max"),
    ],
)
def test_limits_are_named(limits: VideoLimits, key: str) -> None:
    """The refusal has the value, the limit and the setting."""
    with pytest.raises(RequestRefused, match=key):
        inspect_video(video(), limits)
