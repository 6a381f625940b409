"""The video processors of transformers that are known here: choice and size of frames, and default settings.

Their classes need torchvision, and so torch, which the engine does without. So a class is described by its rules for
choosing frames, its rule for their size, and its defaults; all else is read from the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

USUAL_FRAMES: Final = 32
"""Number of frames to sample if neither checkpoint nor request states a number or a rate."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The frames wanted of a video.

    Attributes:
        total: Its number of frames, at `rate` a second.
        count: Number to sample, not rounded and at most `most`; `exact` if the request states it.
        fps: Frames to sample per second; 0 if there is no such setting.
        temporal: Frames per group.
        settings: All settings of the video processor.
    """

    total: int
    rate: float
    count: float
    most: int
    exact: bool
    fps: float
    temporal: int
    settings: Mapping[str, Any]

    @property
    def whole(self) -> int:
        """The number, rounded down to at least 1."""
        return max(int(self.count), 1)


def _ends(first: int, last: int, count: int) -> list[int]:
    return [int(each) for each in np.linspace(first, last, count).round()]


def from_end_to_end(wanted: Wanted) -> list[int]:
    """Return frames from the first to the last."""
    return _ends(0, wanted.total - 1, wanted.whole)


def whole_groups(wanted: Wanted) -> list[int]:
    """Return frames in equal steps from the first one on, as many as fill groups."""
    groups = wanted.count / wanted.temporal
    rounded = round(groups) if wanted.exact else math.floor(groups)
    count = max(min(rounded * wanted.temporal, wanted.total), 1)
    # As torch rounds them.
    steps = (np.arange(count) * (wanted.total / count)).astype(np.float32)
    return [int(each) for each in steps]


def beginnings(wanted: Wanted) -> list[int]:
    """Return the first frame of each of `count` equal parts."""
    return [index * wanted.total // wanted.whole for index in range(wanted.whole)]


def middles(wanted: Wanted) -> list[int]:
    """Return the middle frame of each of `count` equal parts."""
    step = wanted.total / wanted.whole
    steps = (step / 2 + np.arange(wanted.whole) * step).astype(np.float32)
    return [int(each) for each in steps]


def without_ends(wanted: Wanted) -> list[int]:
    """Return frames in equal steps, of a long video without its first and last second."""
    first, last = 0, wanted.total - 1
    duration = wanted.total / wanted.rate
    if duration - 2 > wanted.most * wanted.fps:
        first = int(wanted.rate)
        last = min(int(wanted.total - wanted.rate), last)
    if first >= last:
        first, last = 0, wanted.total - 1
    count = max(round(wanted.count), 1)
    return [int(each) for each in np.unique(np.linspace(first, last, count, dtype=int))]


def each_interval(wanted: Wanted) -> list[int]:
    """Return the frame at each multiple of 1 / `fps` seconds, of a long video fewer."""
    total, rate, fps = wanted.total, wanted.rate, wanted.fps
    duration, longest = total / rate, float(wanted.settings["max_duration"])
    if wanted.exact:
        found = _ends(0, total - 1, wanted.whole)
    elif duration <= longest:
        found = [math.ceil(index * rate / fps) for index in range(max(int(duration * fps), 1))]
    elif int(longest * fps) >= total:
        found = list(range(total))
    else:
        seconds = np.linspace(0, duration, max(int(longest * fps), 1))
        found = [math.ceil(each * rate) for each in seconds]
    found = list(dict.fromkeys(min(each, total - 1) for each in found))
    if len(found) > wanted.most:
        found = [found[index] for index in _ends(0, len(found) - 1, wanted.most)]
    return found


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """One class of video processors.

    Attributes:
        choose: The numbers of the frames to sample.
        sizes: The rule for the size of frames: bounds on the pixels of a `frame`, or of all frames of a `video`, or a
            size that is `fixed` by the settings.
        families: The architectures on the generic path whose answers about videos equal those of transformers.
        number: The meaning of the setting `num_frames`: the number of frames, instead of a rate; their maximum; or
            none.
        defaults: Default settings, in addition to those of all classes.
    """

    choose: Callable[[Wanted], list[int]]
    sizes: Literal["frame", "video", "fixed"]
    families: tuple[str, ...]
    number: Literal["number", "maximum", "none"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


DEFAULTS: Final[Mapping[str, Any]] = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "cap_pixels_per_frame": False,
}
"""Default settings of all classes."""

_CLIP: Mapping[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF: Mapping[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PATCHES: Mapping[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_RATE: Mapping[str, Any] = {"fps": 2, "min_frames": 4, "max_frames": 768}
_SQUARE: Mapping[str, Any] = {"size": {"height": 384, "width": 384}}

VIDEO_PROCESSORS: Final[Mapping[str, VideoProcessor]] = {
    "Glm4vVideoProcessor": VideoProcessor(
        each_interval,
        "video",
        ("glm4v", "glm4v_moe"),
        defaults={
            **_CLIP,
            **_PATCHES,
            "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
            "fps": 2,
            "max_duration": 300,
        },
    ),
    "InternVLVideoProcessor": VideoProcessor(
        middles, "fixed", ("internvl",), number="number", defaults={**_CLIP, **_SQUARE}
    ),
    "LlavaNextVideoVideoProcessor": VideoProcessor(
        beginnings,
        "fixed",
        ("llava_next_video",),
        number="number",
        defaults={
            **_CLIP,
            "size": {"shortest_edge": 224},
            "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224},
        },
    ),
    "LlavaOnevisionVideoProcessor": VideoProcessor(
        beginnings, "fixed", ("llava_onevision",), number="number", defaults={**_CLIP, **_SQUARE}
    ),
    "Qwen2VLVideoProcessor": VideoProcessor(
        whole_groups,
        "frame",
        ("qwen2_vl",),
        defaults={
            **_CLIP,
            **_PATCHES,
            **_RATE,
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
            "max_video_tokens": 128_000,
        },
    ),
    "Qwen3VLVideoProcessor": VideoProcessor(
        from_end_to_end,
        "video",
        ("qwen3_5", "qwen3_5_moe"),
        defaults={
            **_HALF,
            **_PATCHES,
            **_RATE,
            "patch_size": 16,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
            "max_video_tokens": 768,
        },
    ),
    "SmolVLMVideoProcessor": VideoProcessor(
        without_ends,
        "fixed",
        ("smolvlm",),
        number="maximum",
        defaults={
            **_HALF,
            "resample": 1,
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "fps": 1,
            "num_frames": 64,
        },
    ),
}
"""The described classes by their names in transformers."""

REFUSED: Final[Mapping[str, str]] = {
    "ernie4_5_vl_moe": "its video processor draws timestamps into frames",
    "kimi_k25": "its vision tower merges frames over time, so frame groups cannot be encoded one by one",
}
"""Architectures on the generic path that take images but no videos, with the reason."""
