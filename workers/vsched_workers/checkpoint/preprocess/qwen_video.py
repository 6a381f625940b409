"""Rules of the Qwen-VL video processors: sampling, sizes and times of frames, as in transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsched.errors import RequestRefused, limit_message
from vsched.worker.contract import FrameSize, PixelBounds, VideoFacts, VideoSampling
from vsched_workers.checkpoint.facts import PROCESSOR_DEFAULT_LIMITS
from vsched_workers.families.base import Family
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    ResizeLimits,
    clamp_limits,
    pixel_limits,
    replaced,
    resized,
)

PIXELS_MAX = 1 << 31
"""Maximum of a request's pixel bounds."""


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """The frames of a video.

    Attributes:
        frames: Their numbers; the last one is repeated to fill its group.
        size: The size that they are resized to.
        times: The time of each group in seconds.
        interval: Seconds per group.
    """

    frames: tuple[int, ...]
    size: FrameSize
    times: tuple[float, ...]
    interval: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """The rules of one checkpoint.

    Attributes:
        temporal: Frames per group.
        factor: Side of a token in pixels.
        limits: Pixels of a frame, or with `writes_timestamps` of all frames.
        frames_min: Minimum number of frames, if the video has so many.
        tokens_capped: Tokens per frame, or of all frames, to which `cap_pixels_per_frame` limits; 0 for none.
        start: The token before the placeholders of a group with a timestamp; `end` is the one after them.
        levels: The processor's result for each of the 256 values of each channel.
    """

    temporal: int
    factor: int
    limits: ResizeLimits
    fps: float
    frames_min: int
    frames_max: int
    tokens_capped: int
    writes_timestamps: bool
    start: int
    end: int
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
        rate = facts.rate or self.fps
        numbers = list(range(facts.frames))
        if sample:
            numbers = self._sampled(facts, rate, sampling, frames_max)
        size = self._size(facts, len(numbers), sampling.bounds, tokens)
        sampled_rate = len(numbers) / facts.frames * rate
        numbers += [numbers[-1]] * (-len(numbers) % self.temporal)
        seconds = [number / rate for number in numbers]
        times = tuple(
            (seconds[first] + seconds[first + self.temporal - 1]) / 2
            for first in range(0, len(numbers), self.temporal)
        )
        return VideoLayout(tuple(numbers), size, times, self.temporal / sampled_rate)

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
            message = limit_message(
                "too many frames of a video are asked for",
                value=f"{asked} frames",
                limit=f"{frames_max} frames",
                remedy="send a smaller num_frames or max_frames, or raise media.video_frames_max",
            )
            raise RequestRefused(message, code="video_frames_exceeded")
        most = min(sampling.max_frames or self.frames_max, frames_max, total)
        if wanted is None:
            # A bound of the request below the checkpoint's minimum comes first.
            wished = total / rate * (sampling.fps or self.fps)
            found = min(max(wished, self.frames_min), most)
        else:
            found = min(wanted, most)
        if self.writes_timestamps:
            count = max(int(found), 1)
            return [int(each) for each in np.linspace(0, total - 1, count).round()]
        groups = round(found / self.temporal) if wanted else math.floor(found / self.temporal)
        count = max(min(groups * self.temporal, total), 1)
        steps = (np.arange(count) * (total / count)).astype(np.float32)  # as torch rounds them
        return [int(each) for each in steps]

    def _size(self, facts: VideoFacts, frames: int, bounds: PixelBounds, tokens: int) -> FrameSize:
        width, height = facts.width, facts.height
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter > ASPECT_RATIO_MAX:
            message = limit_message(
                f"a video of {width} x {height} pixels is too thin (longer over shorter side)",
                value=round(longer / shorter, 1),
                limit=ASPECT_RATIO_MAX,
                remedy="crop or pad the video",
            )
            raise RequestRefused(message, code="video_aspect_ratio")
        limits = self._capped(self._bounded(bounds), frames)
        if not self.writes_timestamps:
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
            message = limit_message(
                "min_pixels or max_pixels of a video is out of bounds",
                value=f"{limits.minimum} to {limits.maximum} pixels",
                limit=f"1 to {PIXELS_MAX} pixels, min_pixels at most max_pixels",
                remedy="send both within the limit",
            )
            raise RequestRefused(message, code="pixel_bounds_invalid")
        return limits

    def _capped(self, limits: ResizeLimits, frames: int) -> ResizeLimits:
        """Return the limits with `cap_pixels_per_frame`."""
        if not self.tokens_capped or limits.maximum is None:
            return limits
        area, least = self.factor * self.factor, int(limits.minimum * 1.05)
        if self.writes_timestamps:
            share = min(self.tokens_capped * area, limits.maximum // frames)
            return ResizeLimits(limits.minimum, max(share, least) * frames)
        whole = int(self.tokens_capped * area * 0.9)
        share = min(limits.maximum, whole * self.temporal // frames)
        return ResizeLimits(limits.minimum, max(share, least))


def load_rules(
    family: Family,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    levels: list[list[float]],
) -> VideoRules:
    """Return the rules of a checkpoint."""
    patch = int(family.vision(config, "patch_size"))
    capped = int(settings.get("max_video_tokens", 768 if family.writes_timestamps else 128_000))
    return VideoRules(
        temporal=int(family.vision(config, "temporal_patch_size")),
        factor=patch * int(family.vision(config, "spatial_merge_size")),
        limits=pixel_limits(settings, PROCESSOR_DEFAULT_LIMITS),
        fps=float(settings["fps"]),
        frames_min=int(settings["min_frames"]),
        frames_max=int(settings["max_frames"]),
        tokens_capped=capped if settings["cap_pixels_per_frame"] else 0,
        writes_timestamps=family.writes_timestamps,
        start=int(config.get("vision_start_token_id") or 0),
        end=int(config.get("vision_end_token_id") or 0),
        levels=levels,
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
