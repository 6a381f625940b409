"""Decoding of videos: exactly the sampled frames, and limits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("av")

from tests.each_case import each_case
from tests.unit.media.video_files import expected_frames, video
from vsched.errors import RequestRefused
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


def test_groups_of_pictures_without_a_sampled_frame_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 groups of 8 frames, the decoder gets the packets of two."""
    from vsched.media import video as module

    file = video(80, g="8", bf="0", sc_threshold="0")
    sent: list[int] = []
    opened = module._open

    class Counted:
        def __init__(self, context: object) -> None:
            self._context = context

        def __getattr__(self, name: str) -> object:
            return getattr(self._context, name)

        def decode(self, packet: object) -> object:
            sent.append(packet is not None)
            return self._context.decode(packet)  # type: ignore[attr-defined]

    class Stream:
        def __init__(self, stream: object) -> None:
            self._stream = stream
            self.codec_context = Counted(stream.codec_context)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self._stream, name)

    def open_counted(encoded: bytes, limits: VideoLimits) -> object:
        found = opened(encoded, limits)
        found.stream = Stream(found.stream)
        return found

    monkeypatch.setattr(module, "_open", open_counted)
    assert len(list(read_frames(file, [1, 78], LIMITS))) == 2
    assert sum(sent) <= 2 * 8 + 4


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
    "limits",
    [(64 * 48 - 1, 60.0, "pixels"), (1 << 20, 1.0, "seconds")],
)
def test_limits_are_named(limits: tuple[int, float, str]) -> None:
    """The refusal has the value, the limit and the setting."""
    pixels, seconds, what = limits
    key = {"pixels": "media.image_pixels_max", "seconds": "media.video_seconds_max"}[what]
    with pytest.raises(RequestRefused, match=key):
        inspect_video(video(), VideoLimits(pixels, seconds, 10.0))
