"""Decode sampled frames of a video from untrusted bytes, with PyAV (FFmpeg); runs in forked processes only.

The first bytes choose the demuxer, and only the formats and codecs listed here are opened: FFmpeg has hundreds, some of
which open other files or URLs. The whole file is demuxed, which costs little, so the number of frames and their times
are facts and not claims of the header. Frames are decoded from the key frame before each sampled frame on; groups of
pictures without one are skipped.
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from PIL import Image

from vsched.errors import RequestRefused, one_of
from vsched.media.formats import VIDEO_FORMATS
from vsched.worker.contract import VideoFacts

CODECS: Final = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg", "gif")
"""Accepted codecs, by FFmpeg's names."""

STREAMS_MAX: Final = 32
PACKETS_MAX: Final = 300_000
RATE_MAX: Final = 1000.0
"""Maximum frames per second."""
HEADER_BYTES: Final = 512 << 20
"""Maximum memory for demuxing a file and decoding its first frame, besides the file."""
_OVERHEAD_BYTES: Final = 128 << 20
_REFERENCES: Final = 20
"""Decoded frames that a decoder may keep: 16 references, and frames in flight."""
_PIXEL_BYTES: Final = 3
"""Bytes of a pixel in a decoder: 4:2:0 with more than 8 bits, or 4:4:4."""
_RGB_COPIES: Final = 4
_TRUNCATED: Final = 0.9
"""Minimum share of the frames in the header that the file must have."""
_TURNS: Final = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


class VideoLimits(msgspec.Struct, frozen=True):
    """Limits of a video: pixels of a frame, seconds, and CPU seconds for decoding it."""

    pixels: int
    seconds: float
    decode_s: float


def has_decoder() -> bool:
    """Return True if PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def refuse_without_decoder() -> None:
    """Refuse a video file if PyAV is not installed.

    Raises:
        RequestRefused: With the remedy.
    """
    if not has_decoder():
        raise RequestRefused(
            "the server cannot decode video files: PyAV is not installed. "
            "Remedy: send the frames as images, or install vsched[video].",
            code="video_not_decoded",
        )


def decode_bytes(facts: VideoFacts, encoded: int) -> int:
    """Upper bound of the memory for decoding frames of a video one after the other, without their arena space."""
    pixels = facts.width * facts.height
    return _OVERHEAD_BYTES + 2 * encoded + pixels * (_REFERENCES * _PIXEL_BYTES + 3 * _RGB_COPIES)


def _invalid() -> RequestRefused:
    return RequestRefused(
        f"the video cannot be decoded: it is truncated, damaged, or not a {one_of(VIDEO_FORMATS.values())} file. "
        "Remedy: send a complete video in one of these formats.",
        code="video_invalid",
    )


def _demuxer(encoded: bytes) -> str:
    """Return FFmpeg's name of the container format."""
    if encoded[4:8] in {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"}:
        return "mov"
    if encoded.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if encoded.startswith(b"RIFF") and encoded[8:12] == b"AVI ":
        return "avi"
    if encoded.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if len(encoded) > 188 and encoded[0] == encoded[188] == 0x47:
        return "mpegts"
    raise _invalid()


@dataclass(slots=True)
class _Video:
    """An opened video.

    Attributes:
        packets: Its packets in decoding order, from the first key frame on.
        times: The time stamp of each packet, in `base` seconds.
        shown: The packets' indices in the order of presentation.
        keys: The indices of key frames.
        by_dts: Whether the time stamps are those of decoding, because the file has no others.
    """

    container: Any
    stream: Any
    packets: list[Any]
    times: list[int]
    shown: list[int]
    keys: list[int]
    base: float
    by_dts: bool

    @property
    def rate(self) -> float:
        """Frames per second: the container's, if it agrees with the time stamps."""
        count = len(self.shown)
        ticks = self.times[self.shown[-1]] - self.times[self.shown[0]]
        stated = float(self.stream.average_rate or 0)
        found = (count - 1) / (ticks * self.base) if ticks else stated or 1.0
        return stated if stated and abs(stated - found) <= 0.005 * found else found


def _open(encoded: bytes, limits: VideoLimits) -> _Video:
    av: Any = importlib.import_module("av")
    container = av.open(
        io.BytesIO(encoded),
        format=_demuxer(encoded),
        options={"protocol_whitelist": "none"},
        metadata_errors="replace",
    )
    if len(container.streams) > STREAMS_MAX:
        raise RequestRefused.of_limit(
            "the video has too many streams",
            value=f"{len(container.streams)} streams",
            limit=f"{STREAMS_MAX} streams",
            remedy="keep only the video stream",
            code="video_invalid",
        )
    attached = av.stream.Disposition.attached_pic
    stream: Any = next(
        (each for each in container.streams.video if not each.disposition & attached), None
    )
    if stream is None:
        raise RequestRefused(
            "the file has no video stream. Remedy: send a file with a picture.",
            code="video_invalid",
        )
    context = stream.codec_context
    name = context.codec.canonical_name
    if name not in CODECS:
        raise RequestRefused.of_limit(
            "the video's codec is not accepted",
            value=name,
            limit=one_of(CODECS),
            remedy="convert the video to one of these",
            code="video_codec_unsupported",
        )
    _check_pixels(context.width, context.height, limits)
    context.thread_count = 1
    for other in container.streams:
        if other is not stream:
            other.discard = av.stream.Discard.all
    packets = list(itertools.islice(_packets(container, stream), PACKETS_MAX + 1))
    return _timed(container, stream, packets, limits)


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream with data; a damaged end of the file is the end."""
    av: Any = importlib.import_module("av")
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:
            return
        if packet is None:
            return
        if packet.size and not packet.is_discard:
            yield packet


def _timed(container: Any, stream: Any, packets: list[Any], limits: VideoLimits) -> _Video:
    if len(packets) > PACKETS_MAX:
        raise RequestRefused.of_limit(
            "the video has too many frames",
            value=f"over {PACKETS_MAX} frames",
            limit=f"{PACKETS_MAX} frames",
            remedy="cut the video, or lower its frame rate",
            code="video_too_long",
        )
    if len(packets) < _TRUNCATED * min(stream.frames, PACKETS_MAX):
        raise _invalid()
    first = next((index for index, packet in enumerate(packets) if packet.is_keyframe), None)
    if first is None:
        raise _invalid()
    del packets[:first]
    by_dts = any(packet.pts is None for packet in packets)
    times: list[Any] = [packet.dts if by_dts else packet.pts for packet in packets]
    if None in times:
        raise _invalid()
    # Pictures shown before the first key frame refer to frames that are not there.
    shown = [index for index, time in enumerate(times) if time >= times[0]]
    shown.sort(key=times.__getitem__)
    base = float(stream.time_base or 0)
    keys = [index for index, packet in enumerate(packets) if packet.is_keyframe]
    video = _Video(container, stream, packets, times, shown, keys, base, by_dts)
    seconds = (times[shown[-1]] - times[shown[0]]) * base
    check_duration(seconds, limits.seconds)
    if not 0 < video.rate <= RATE_MAX:
        raise RequestRefused.of_limit(
            "the video's frame rate is not accepted",
            value=f"{video.rate:.4g} frames per second",
            limit=f"above 0, at most {RATE_MAX:g}",
            remedy="convert the video to a usual frame rate",
            code="video_invalid",
        )
    return video


def check_duration(seconds: float, seconds_max: float) -> None:
    """Reject a video that lasts too long."""
    if not 0 <= seconds <= seconds_max:
        raise RequestRefused.of_limit(
            "the video is too long",
            value=f"{seconds:.6g} s",
            limit=f"{seconds_max:g} s",
            remedy="cut the video, or raise media.video_seconds_max",
            code="video_too_long",
        )


def _check_pixels(width: int, height: int, limits: VideoLimits) -> None:
    if width < 1 or height < 1:
        raise _invalid()
    if width * height > limits.pixels:
        raise RequestRefused.of_limit(
            "a frame of the video has too many pixels",
            value=f"{width}x{height}",
            limit=f"{limits.pixels} pixels",
            remedy="send a smaller video or raise media.image_pixels_max",
            code="video_too_large",
            status=413,
        )


def inspect_video(encoded: bytes, limits: VideoLimits) -> VideoFacts:
    """Return the facts of a video; besides headers, only its first frame is decoded, which has the rotation.

    Raises:
        RequestRefused: If it is not an accepted video, or exceeds a limit.
    """
    try:
        video = _open(encoded, limits)
        facts = VideoFacts(1, 1, len(video.shown), video.rate)
        [(_, frame)] = _decoded(video, [0])
        image = _upright(frame, limits)
    except RequestRefused:
        raise
    except Exception:  # noqa: BLE001 - a decoder may raise anything on hostile bytes
        raise _invalid() from None
    return msgspec.structs.replace(facts, width=image.width, height=image.height)


def read_frames(
    encoded: bytes, frames: Sequence[int], limits: VideoLimits
) -> Iterator[Image.Image]:
    """Yield the upright RGB images of some frames, given by ascending numbers of `VideoFacts.frames`.

    With a variable frame rate, frame `n` is the one that is shown at the time n / rate.

    Raises:
        RequestRefused: If it is not an accepted video, or a frame is damaged.
    """
    try:
        video = _open(encoded, limits)
        for _, frame in _decoded(video, frames):
            yield _upright(frame, limits)
    except RequestRefused:
        raise
    except Exception:  # noqa: BLE001 - a decoder may raise anything on hostile bytes
        raise _invalid() from None


def _targets(video: _Video, frames: Sequence[int]) -> list[int]:
    """Return the packet of each frame: the last one shown before half a frame after its nominal time."""
    times = [video.times[index] for index in video.shown]
    ticks = (times[-1] - times[0]) / max(len(times) - 1, 1)
    found = []
    for frame in frames:
        place = bisect.bisect_right(times, times[0] + (frame + 0.5) * ticks) - 1
        found.append(video.shown[min(max(place, 0), len(times) - 1)])
    return found


def _start(video: _Video, packet: int) -> int:
    """Return the key frame to decode from for a packet; pictures shown before their key frame need the one before."""
    place = bisect.bisect_right(video.keys, packet) - 1
    is_leading = video.times[packet] < video.times[video.keys[place]]
    return video.keys[max(place - is_leading, 0)]


def _decoded(video: _Video, frames: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield (number, decoded frame) for ascending numbers of frames."""
    context = video.stream.codec_context
    position = 0
    waiting: list[Any] = []
    ended = False
    for number, target in zip(frames, _targets(video, frames), strict=True):
        time = video.times[target]
        start = _start(video, target)
        if start > position:
            context.flush_buffers()
            position, waiting = start, []
        while True:
            # The last frame stays: it may be wanted twice.
            while waiting and _time(waiting[0], video) < time and len(waiting) > 1:
                del waiting[0]
            if waiting and (_time(waiting[0], video) >= time or ended):
                break
            if ended:
                raise _invalid()
            if position < len(video.packets):
                waiting += context.decode(video.packets[position])
                position += 1
            else:
                waiting += context.decode(None)
                ended = True
        yield number, waiting[0]


def _time(frame: Any, video: _Video) -> int:
    time = frame.dts if video.by_dts else frame.pts
    return 0 if time is None else int(time)


def _upright(frame: Any, limits: VideoLimits) -> Image.Image:
    """Return a frame as an RGB image, turned as the file asks for."""
    _check_pixels(frame.width, frame.height, limits)
    image: Image.Image = frame.to_image()
    turn = _TURNS.get(round(frame.rotation) % 360)
    return image if turn is None else image.transpose(turn)
