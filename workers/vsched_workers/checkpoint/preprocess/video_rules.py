"""Choice, sizes and times of a video's frames, as in transformers' video processors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import RequestRefused
from vsched.worker.contract import (
    FrameSize,
    PixelBounds,
    VideoFacts,
    VideoSampling,
    no_pixel_bounds,
)
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    ResizeLimits,
    clamp_limits,
    pixel_limits,
    replaced,
    resized,
)
from vsched_workers.families.video_processors import (
    USUAL_FRAMES,
    VideoProcessor,
    Wanted,
)

PIXELS_MAX = 1 << 31
"""Maximum of a request's pixel bounds."""
SIDE_MAX = 4096
"""Maximum side of a frame whose longer side is resized to a setting."""
UNKNOWN_RATE = 24.0
"""Rate of a video without one, if the checkpoint has none either."""

TIMESTAMPS = "timestamps"
"""Name of a tensor with the embeddings of a video: seconds of each frame group, or of each sampled frame."""


def embedded_frames_refused(value: str, frames_max: int) -> RequestRefused:
    """Return the error that a video of embeddings has too many frames, or none."""
    return RequestRefused.of_limit(
        "the embedded video has too many frames, or none",
        value=value,
        limit=f"{frames_max} frames",
        remedy="encode fewer frames, or raise media.video_frames_max",
        code="video_frames_exceeded",
    )


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """The frames of a video.

    Attributes:
        frames: Their numbers; the last one is repeated to fill its group.
        size: The size that they are resized to.
        seconds: The time of each sampled frame.
        times: The time of each group in seconds.
        interval: Seconds per group.
        duration: Seconds of the video.
    """

    frames: tuple[int, ...]
    size: FrameSize
    seconds: tuple[float, ...]
    times: tuple[float, ...]
    interval: float
    duration: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """The rules of one checkpoint.

    Attributes:
        processor: The class of its video processor.
        settings: All settings of the video processor.
        temporal: Frames per group.
        factor: Side of a token in pixels, if sizes are bounded by pixels.
        limits: Pixels of a frame, or of all frames.
        fps: Frames to sample per second; 0 for none.
        usual: Number of frames to sample instead; 0 for a rate.
        frames_min: Minimum number of frames, if the video has enough.
        tokens_capped: Tokens per frame, or of all frames, to which `cap_pixels_per_frame` limits; 0 for none.
        levels: The processor's result for each of the 256 values of each channel.
    """

    processor: VideoProcessor
    settings: Mapping[str, Any]
    temporal: int
    factor: int
    limits: ResizeLimits
    fps: float
    usual: int
    frames_min: int
    frames_max: int
    tokens_capped: int
    levels: list[list[float]]

    def layout(
        self,
        facts: VideoFacts,
        sampling: VideoSampling,
        *,
        frames_max: int,
        sample: bool,
        tokens: int,
    ) -> VideoLayout:
        """Sample the frames of a video; `tokens` is the maximum of a group.

        Raises:
            RequestRefused: When an option is out of bounds.
        """
        rate = facts.rate or self.fps or UNKNOWN_RATE
        sampled = list(range(facts.frames))
        if sample:
            sampled = self._sampled(facts, rate, sampling, frames_max)
        size = self.size(facts.width, facts.height, len(sampled), tokens, sampling.bounds)
        sampled_rate = len(sampled) / facts.frames * rate
        numbers = sampled + [sampled[-1]] * (-len(sampled) % self.temporal)
        seconds = [number / rate for number in numbers]
        times = tuple(
            (seconds[first] + seconds[first + self.temporal - 1]) / 2
            for first in range(0, len(numbers), self.temporal)
        )
        return VideoLayout(
            frames=tuple(numbers),
            size=size,
            seconds=tuple(seconds[: len(sampled)]),
            times=times,
            interval=self.temporal / sampled_rate,
            duration=facts.frames / rate,
        )

    def _sampled(
        self, facts: VideoFacts, rate: float, sampling: VideoSampling, frames_max: int
    ) -> list[int]:
        total = facts.frames
        wanted = sampling.num_frames
        if wanted is not None and sampling.fps is not None:
            raise RequestRefused(
                "fps and num_frames exclude each other. Remedy: send one of them.",
                code="video_sampling_invalid",
            )
        asked = max(wanted or 0, sampling.max_frames or 0)
        if asked > frames_max:
            raise RequestRefused.of_limit(
                "too many frames of a video are asked for",
                value=f"{asked} frames",
                limit=f"{frames_max} frames",
                remedy="send a smaller num_frames or max_frames, or raise media.video_frames_max",
                code="video_frames_exceeded",
            )
        most = min(sampling.max_frames or self.frames_max, frames_max, total)
        fps = sampling.fps or self.fps
        if wanted is not None:
            count: float = min(wanted, most)
        elif self.usual and sampling.fps is None:
            count = min(self.usual, most)
        else:
            # A bound of the request below the checkpoint's minimum comes first.
            count = min(max(total / rate * fps, self.frames_min), most)
        exact = wanted is not None
        return self.processor.choose(
            Wanted(total, rate, count, most, exact, fps, self.temporal, self.settings)
        )

    def resize_frame(self, frame: Image.Image) -> npt.NDArray[np.uint8]:
        """Return the pixels of a frame of a fixed size, [height, width, channels]."""
        resample = Image.Resampling(self.settings["resample"])
        made = frame if frame.mode == "RGB" else frame.convert("RGB")
        for size in self.steps(made.width, made.height):
            made = made.resize((size.width, size.height), resample=resample)
        if self.settings.get("do_center_crop"):
            crop = self.settings["crop_size"]
            width, height = int(crop["width"]), int(crop["height"])
            left, top = int((made.width - width) / 2), int((made.height - height) / 2)
            made = made.crop((left, top, left + width, top + height))  # padded with black
        return np.asarray(made)

    def steps(self, width: int, height: int) -> Sequence[FrameSize]:
        """Return the sizes that a frame is resized to, one after the other."""
        size = self.settings["size"]
        if not self.settings["do_resize"]:
            return ()
        if size.get("height"):
            return (FrameSize(int(size["width"]), int(size["height"])),)
        if size.get("shortest_edge"):
            shorter = int(size["shortest_edge"])
            longer = int(shorter * max(width, height) / min(width, height))
            wide = width > height
            return (FrameSize(longer, shorter) if wide else FrameSize(shorter, longer),)
        longer = min(int(size["longest_edge"]), SIDE_MAX)
        aspect = width / height
        if width >= height:
            other = int(longer / aspect)
            first = FrameSize(longer, max(other + other % 2, 1))
        else:
            other = int(longer * aspect)
            first = FrameSize(max(other + other % 2, 1), longer)
        side = int(self.settings["max_image_size"]["longest_edge"])
        return first, FrameSize(side, side)

    def _fixed_size(self, width: int, height: int) -> FrameSize:
        if self.settings.get("do_center_crop"):
            crop = self.settings["crop_size"]
            return FrameSize(int(crop["width"]), int(crop["height"]))
        return (FrameSize(width, height), *self.steps(width, height))[-1]

    def size(
        self,
        width: int,
        height: int,
        frames: int,
        tokens: int,
        bounds: PixelBounds = PixelBounds(),  # noqa: B008 - frozen
    ) -> FrameSize:
        """Return the size that frames are resized to; `tokens` is the maximum of a group.

        Raises:
            RequestRefused: When they are too thin, or the bounds are not accepted.
        """
        if self.processor.sizes == "fixed":
            if bounds != PixelBounds():
                raise no_pixel_bounds()
            return self._fixed_size(width, height)
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter > ASPECT_RATIO_MAX:
            raise RequestRefused.of_limit(
                f"a video of {width} x {height} pixels is too thin (longer over shorter side)",
                value=round(longer / shorter, 1),
                limit=ASPECT_RATIO_MAX,
                remedy="crop or pad the video",
                code="video_aspect_ratio",
            )
        limits = self._capped(self._bounded(bounds), frames)
        if self.processor.sizes == "frame":
            limits = clamp_limits(limits, tokens=tokens, factor=self.factor)
            rows, columns = resized(height, width, factor=self.factor, limits=limits)
            return FrameSize(columns, rows)
        return self._size_of_volume(width, height, max(frames, self.temporal), limits, tokens)

    def _size_of_volume(
        self, width: int, height: int, frames: int, limits: ResizeLimits, tokens: int
    ) -> FrameSize:
        """Apply limits of the pixels of all frames; to the last rounding as the processor does."""
        factor = self.factor
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        rows = round(height / factor) * factor
        columns = round(width / factor) * factor
        depth = round(frames / self.temporal) * self.temporal
        most = tokens * factor * factor * depth if tokens else None
        if limits.maximum is not None:
            most = limits.maximum if most is None else min(most, limits.maximum)
        if most is not None and depth * rows * columns > most:
            shrink = math.sqrt((frames * height * width) / most)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif depth * rows * columns < limits.minimum:
            grow = math.sqrt(limits.minimum / (frames * height * width))
            rows = math.ceil(height * grow / factor) * factor
            columns = math.ceil(width * grow / factor) * factor
        return FrameSize(columns, rows)

    def _bounded(self, bounds: PixelBounds) -> ResizeLimits:
        limits = replaced(self.limits, bounds)
        most = limits.maximum or PIXELS_MAX
        if not 0 < limits.minimum <= most <= PIXELS_MAX:
            raise RequestRefused.of_limit(
                "min_pixels or max_pixels of a video is out of bounds",
                value=f"{limits.minimum} to {limits.maximum} pixels",
                limit=f"1 to {PIXELS_MAX} pixels, min_pixels at most max_pixels",
                remedy="send both within the limit",
                code="pixel_bounds_invalid",
            )
        return limits

    def _capped(self, limits: ResizeLimits, frames: int) -> ResizeLimits:
        """Return the limits with `cap_pixels_per_frame`."""
        if not self.tokens_capped or limits.maximum is None:
            return limits
        area, least = self.factor * self.factor, int(limits.minimum * 1.05)
        if self.processor.sizes == "video":
            share = min(self.tokens_capped * area, limits.maximum // frames)
            return ResizeLimits(limits.minimum, max(share, least) * frames)
        whole = int(self.tokens_capped * area * 0.9)
        share = min(limits.maximum, whole * self.temporal // frames)
        return ResizeLimits(limits.minimum, max(share, least))


def video_rules(processor: VideoProcessor, settings: Mapping[str, Any]) -> VideoRules:
    """Return the rules of a checkpoint from its class of video processors and all settings of it."""
    is_fixed = processor.sizes == "fixed"
    number, fps = settings.get("num_frames"), float(settings.get("fps") or 0)
    usual = 0
    if processor.number == "number":
        usual = int(number or 0) or (0 if fps else USUAL_FRAMES)
    most = number if processor.number == "maximum" else settings.get("max_frames")
    capped = settings["cap_pixels_per_frame"] and settings.get("max_video_tokens")
    return VideoRules(
        processor=processor,
        settings=settings,
        temporal=int(settings.get("temporal_patch_size") or 1),
        factor=0 if is_fixed else int(settings["patch_size"]) * int(settings["merge_size"]),
        limits=ResizeLimits(1, None) if is_fixed else pixel_limits(settings, ResizeLimits(1, None)),
        fps=fps,
        usual=usual,
        frames_min=int(settings.get("min_frames") or 1),
        frames_max=int(most or PIXELS_MAX),
        tokens_capped=int(capped or 0),
        levels=video_levels(settings),
    )


def video_levels(settings: Mapping[str, Any]) -> list[list[float]]:
    """Return the video processor's result for each value of each channel, [channels, 256].

    Like torchvision, it subtracts mean and divides by standard deviation in float32, both scaled to bytes if it
    rescales.
    """
    mean = np.array(settings["image_mean"], np.float32)[:, None]
    values = np.broadcast_to(np.arange(256, dtype=np.float32), (len(mean), 256))
    factor = settings["rescale_factor"] if settings["do_rescale"] else 1.0
    if not settings["do_normalize"]:
        found: list[list[float]] = (values * np.float32(factor)).tolist()
        return found
    scale = np.float32(1.0 / factor)
    deviation = np.array(settings["image_std"], np.float32)[:, None]
    normalized: list[list[float]] = ((values - mean * scale) / (deviation * scale)).tolist()
    return normalized
