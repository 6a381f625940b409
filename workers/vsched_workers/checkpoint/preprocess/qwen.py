"""Preprocessing of the Qwen families: bit-exact to their image processor, without its overhead.

Processing an image is a resize by Pillow and a transposition, without torch. The results for each of the 256 values of
each channel are computed once, bit-identical to those of transformers, which is not imported. This table is sent along
with the bytes, and is applied by the encoding rank.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import CheckpointError, RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Arrays,
    Companion,
    FrameSize,
    ImagePlan,
    PixelBounds,
    VideoFacts,
    VideoPlan,
)
from vsched_workers.checkpoint.facts import image_limits, processor_settings, video_settings
from vsched_workers.checkpoint.files import read_json
from vsched_workers.checkpoint.preprocess.base import (
    ImagePreprocessor,
    bare_images,
    check_sides,
    too_many_tokens,
)
from vsched_workers.checkpoint.preprocess.text import digest_of
from vsched_workers.checkpoint.preprocess.video_rules import (
    TIMESTAMPS,
    VideoLayout,
    VideoRules,
    embedded_frames_refused,
    video_rules,
)
from vsched_workers.families import family_of
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    QwenImages,
    ResizeLimits,
    bounded_limits,
    image_plan,
    resized,
    with_time,
)

DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""Settings of `Qwen2VLImageProcessorPil` in transformers, the class of all these families, whatever name older
checkpoints use."""


SECONDS_PER_GROUP = "second_per_grid_ts"
_TIMES = {
    TIMESTAMPS: "the seconds of each frame group",
    SECONDS_PER_GROUP: "the seconds per frame group",
}


class QwenPreprocessor(ImagePreprocessor):
    """Tokenizer, chat template and image processor of one checkpoint."""

    companion = Companion("grid_thw", ("time", "height", "width in patches"))
    prunes_videos = True

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Any,
        settings: Mapping[str, Any],
        limits: ResizeLimits,
        levels: npt.NDArray[np.float32],
        videos: VideoRules | None = None,
        around_groups: tuple[int, int] | None = None,
    ) -> None:
        """Take the parts; `around_groups` are the tokens around a frame group if timestamps stand between groups."""
        super().__init__(info, tokenizer)
        backend = tokenizer.backend_tokenizer
        self._marker = info.placeholder
        marks = (info.placeholder, info.video_token_id)
        self._placeholders = [backend.id_to_token(each) for each in marks if each is not None]
        self._videos = videos
        self._around = around_groups
        if videos is not None:
            self.video_times = SECONDS_PER_GROUP if around_groups is None else TIMESTAMPS
        self._images = QwenImages(
            patch=int(settings["patch_size"]),
            merge=int(settings["merge_size"]),
            resample=int(settings["resample"]),
            limits=limits,
            levels=levels.tolist(),
            video_levels=videos.levels if videos is not None else [],
        )
        self._settings = settings
        self.settings_digest = _digest(info, settings, limits)

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> Self:
        """Return the preprocessor with other bounds for resized images.

        Raises:
            RequestRefused: When they exceed the bounds that encoder memory was measured with.
        """
        limits = bounded_limits(
            self._images.limits,
            bounds,
            tokens=self.info.item_tokens_max,
            factor=self._images.factor,
            pixels_max=pixels_max,
        )
        made = copy.copy(self)
        made._images = self._images.bounded(bounds, pixels_max=pixels_max)  # noqa: SLF001 - its own
        made.settings_digest = _digest(self.info, self._settings, limits)
        return made

    def _plan_layout(self, videos: VideoRules, facts: VideoFacts, layout: VideoLayout) -> VideoPlan:
        width, height = layout.size.width, layout.size.height
        patch, factor = self._images.patch, self._images.factor
        group = self._plan((1, height // patch, width // patch), frames=videos.temporal)
        if group.tokens > self.info.item_tokens_max:
            raise too_many_tokens(
                facts.width, facts.height, group.tokens, self.info.item_tokens_max
            )
        groups = self._groups(group, layout.times, layout.interval)
        # The resized frames and their patches, the result, and an intermediate image of the old height.
        made = sum(spec.nbytes for spec in group.arrays)
        work = 4 * made + 4 * width * (facts.height + height)
        grid = (height // factor, width // factor)
        return VideoPlan(layout.frames, layout.size, groups, work, grid)

    def plan_embedded_video(
        self, companion: Sequence[int], seconds: Sequence[float], *, frames_max: int
    ) -> VideoPlan:
        """Return the plan of a grid: frame groups, and patches of a group in height and width.

        `seconds` are the time of each group, or the seconds per group.

        Raises:
            RequestRefused: When the grid is out of bounds, or the number of seconds is another.
        """
        if self._videos is None:
            return super().plan_embedded_video(companion, seconds, frames_max=frames_max)
        count, height, width = companion
        if count * self._videos.temporal > frames_max:
            value = f"{count} groups of {self._videos.temporal} frames"
            raise embedded_frames_refused(value, frames_max)
        self._check_grid(companion)
        group = self._plan((1, height, width), frames=self._videos.temporal)
        if group.tokens > self.info.item_tokens_max:
            raise RequestRefused.of_limit(
                "a frame group of the embedded video has too many tokens",
                value=f"{group.tokens} tokens",
                limit=f"{self.info.item_tokens_max} tokens",
                remedy="encode smaller frames, or raise the encode stage's token budget",
                code="image_tokens_exceeded",
            )
        expected = 1 if self._around is None else count
        if len(seconds) != expected:
            raise RequestRefused.of_limit(
                f"the embeddings' {self.video_times} has the wrong number of values",
                value=len(seconds),
                limit=f"{expected}, {_TIMES[self.video_times]}",
                remedy=f"send the {self.video_times} that the checkpoint's processor computes",
                code=f"{self.video_times}_shape",
            )
        times = [0.0] * count if self._around is None else seconds
        return VideoPlan((), FrameSize(0, 0), self._groups(group, times, seconds[0]))

    def _groups(
        self, group: ImagePlan, times: Sequence[float], interval: float
    ) -> tuple[ImagePlan, ...]:
        """Return the plan of each group of a video."""
        video = self.info.video_token_id
        assert video is not None, "a model without videos has no rules for them"
        groups: list[ImagePlan] = []
        for index, seconds in enumerate(times):
            if self._around is not None:
                start, end = self._around
                time = self._special.ids_of_text(f"<{seconds:.1f} seconds>")
                places = (start, *[video] * group.tokens, end)
                groups.append(replace(group, expansion=(*time, *places)))
            else:
                metadata = with_time(group.metadata, index, interval)
                groups.append(replace(group, metadata=metadata))
        return tuple(groups)

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each image by a bare marker."""
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        return {**message, "content": bare_images(content)}

    def _videos_in(self, rendered: str) -> int:
        """Return the number of videos in a rendered template."""
        return rendered.count(self._placeholders[-1]) if self.info.takes_videos else 0

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return the plan of an image of this size; its metadata is its grid.

        Raises:
            RequestRefused: When the image is empty, too thin, or would have more tokens than allowed.
        """
        rows, columns = self._resized(width, height)
        # Resizing creates an intermediate image of the old height and the new width, then two copies of the result.
        patch, channels = self._images.patch, len(self._images.levels)
        plan = self._plan(
            (1, rows // patch, columns // patch),
            work_bytes=columns * max(4 * (height + rows), (4 + 2 * channels) * rows),
        )
        if plan.tokens > self.info.item_tokens_max:
            raise too_many_tokens(width, height, plan.tokens, self.info.item_tokens_max)
        return plan

    def _plan(
        self, grid: tuple[int, int, int], *, work_bytes: int = 0, frames: int = 0
    ) -> ImagePlan:
        return image_plan(
            grid,
            merge=self._images.merge,
            patch=self._images.patch,
            channels=len(self._images.levels),
            work_bytes=work_bytes,
            frames=frames,
        )

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        check_sides(width, height)
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter > ASPECT_RATIO_MAX:
            raise RequestRefused.of_limit(
                f"an image of {width} x {height} pixels is too thin (longer over shorter side)",
                value=round(longer / shorter, 1),
                limit=ASPECT_RATIO_MAX,
                remedy="crop or pad the image",
                code="image_aspect_ratio",
            )
        return resized(height, width, factor=self._images.factor, limits=self._images.limits)

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of a grid: patches in time, height and width.

        Raises:
            RequestRefused: When a side is empty or not a multiple of the merge size.
        """
        self._check_grid(companion)
        time, height, width = companion
        return self._plan((time, height, width))

    def _check_grid(self, grid: Sequence[int]) -> None:
        _, height, width = grid
        merge = self._images.merge
        if min(grid) < 1 or height % merge or width % merge:
            raise RequestRefused.of_limit(
                "no image or video has such a grid",
                value=list(grid),
                limit=f"at least [1, {merge}, {merge}], height and width multiples of {merge}",
                remedy="send the image_grid_thw or video_grid_thw that the checkpoint's processor computes",
                code="grid_thw_invalid",
            )

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the pixels of an RGB image, with the grid of `plan_image`, and the table of their values.

        Raises:
            RequestRefused: As `plan_image`.
        """
        self.plan_image(image.width, image.height)
        return super().process_image(image)


def load_qwen(info: ModelInfo, directory: Path, tokenizer: Any) -> QwenPreprocessor:
    """Load the image processor of a checkpoint of these families, clamped to `info.item_tokens_max`.

    Raises:
        CheckpointError: When its settings do not match the checkpoint.
    """
    config = read_json(directory, "config.json")
    family = family_of(config)
    stated = processor_settings(directory)
    settings = DEFAULTS | {key: value for key, value in stated.items() if value is not None}
    limits = image_limits(family, config, stated, info.item_tokens_max)
    patch = int(family.vision(config, "patch_size"))
    merge = int(family.vision(config, "spatial_merge_size"))
    for key, expected in (("patch_size", patch), ("merge_size", merge), ("do_resize", True)):
        if settings.get(key) != expected:
            raise CheckpointError(
                f"the image processor's {key} is {settings.get(key)!r}, config.json asks for {expected!r}. "
                "Remedy: use the processor settings that belong to this checkpoint."
            )
    try:
        levels = _level_table(settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the image processor cannot be loaded ({type(error).__name__}). "
            "Remedy: give the directory of a complete checkpoint."
        ) from error
    videos, around = None, None
    if info.takes_videos:
        stated_for_videos = video_settings(directory, family.video_processor)
        temporal = int(family.vision(config, "temporal_patch_size"))
        own = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal}
        videos = video_rules(family.video_processor, stated_for_videos | own)
        if family.writes_timestamps:
            start, end = (config.get(f"vision_{each}_token_id") for each in ("start", "end"))
            around = int(start or 0), int(end or 0)
    return QwenPreprocessor(info, tokenizer, settings, limits, levels, videos, around)


def _digest(info: ModelInfo, settings: Mapping[str, Any], limits: ResizeLimits) -> bytes:
    return digest_of(
        b"vsched.pixels.1",
        info.family.encode(),
        json.dumps(settings, sort_keys=True, default=str).encode(),
        f"{limits.minimum} {limits.maximum}".encode(),
    )


def _level_table(settings: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return transformers' result for each value of each channel: float32 [channels, 256]."""
    mean = np.array(settings["image_mean"], np.float32)[:, None]
    levels = np.broadcast_to(np.arange(256, dtype=np.float64), (len(mean), 256))
    if settings["do_rescale"]:
        levels = levels * settings["rescale_factor"]  # in float64, then rounded once
    table = levels.astype(np.float32)
    if settings["do_normalize"]:
        table = (table - mean) / np.array(settings["image_std"], np.float32)[:, None]
    return np.ascontiguousarray(table)
