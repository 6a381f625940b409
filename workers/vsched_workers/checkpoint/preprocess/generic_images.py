"""Image processing on the generic path: in the engine and, built from its recipe, in isolated image processes.

It consists of transformers' processor and the token limit of an image, with only as much of the tokenizer as the
processor needs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import ArraySpec, ModelInfo
from vsched.worker.contract import (
    Arrays,
    FrameSize,
    ImagePlan,
    ImageRecipe,
    PixelBounds,
    no_pixel_bounds,
)
from vsched_workers.checkpoint.facts import video_processor_of, video_settings
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.images.library import forgo_torch
from vsched_workers.checkpoint.images.processor import (
    ImageProcessor,
    ImageShape,
    load_image_processor,
)
from vsched_workers.checkpoint.preprocess.text import check_sides, too_many_tokens
from vsched_workers.checkpoint.preprocess.video_rules import VideoRules, video_rules
from vsched_workers.checkpoint.tokenizer_files import load_tokenizer
from vsched_workers.families.generic_vision import VIDEO_GRID, pack_metadata
from vsched_workers.families.qwen_image import (
    LEVELS,
    PIXELS,
    QwenImages,
    bounded_limits,
    image_plan,
)
from vsched_workers.families.video_processors import VideoProcessor

SIZES_KEPT = 256
"""The number of image sizes whose results are cached."""
SHAPES_KEPT = 16
BOUNDS_KEPT = 16
"""The number of cached processors for pixel bounds of requests."""
SHAPED = (224, 224)
"""The size of an image whose arrays show the number of their dimensions."""
SHRINK = 0.9
SHRINK_STEPS = 80
"""An image with too many tokens is shrunk by this factor until it fits, in at most this many steps."""


class GenericImages:
    """Processes images as transformers does, after shrinking images with too many tokens.

    All methods are thread-safe.
    """

    def __init__(
        self, processor: ImageProcessor, info: ModelInfo, videos: VideoRules | None = None
    ) -> None:
        """Take the processor of a checkpoint, and its rules for videos if it takes them."""
        self.processor = processor
        self.videos = videos
        self._info = info
        if videos is not None and videos.factor:
            self._patches = QwenImages(
                patch=int(videos.settings["patch_size"]),
                merge=int(videos.settings["merge_size"]),
                resample=int(videos.settings["resample"]),
                limits=videos.limits,
                levels=[],
                video_levels=videos.levels,
            )
        self._bounded = lru_cache(BOUNDS_KEPT)(self._bounded_by)
        self.shape = lru_cache(SHAPES_KEPT)(self._shape_of)
        self.fitting = lru_cache(SIZES_KEPT)(self._fit)

    def recipe(self) -> ImageRecipe:
        """Return the recipe for building it in another process."""
        return ImageRecipe(f"{__name__}:image_processing", msgspec.json.encode(self._info))

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> GenericImages:
        """Return the image processing with other bounds for resized images.

        Raises:
            RequestRefused: When the processor has no such bounds, or these are beyond its own.
        """
        return self._bounded(bounds, pixels_max)

    def _bounded_by(self, bounds: PixelBounds, pixels_max: int) -> GenericImages:
        area = self.processor.area
        if area is None:
            raise no_pixel_bounds()
        limits, side = area
        assert limits.maximum is not None
        tokens = limits.maximum // (side * side)
        found = bounded_limits(limits, bounds, tokens=tokens, factor=side, pixels_max=pixels_max)
        if found == limits:
            return self
        return GenericImages(self.processor.within(found), self._info, self.videos)

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, without its metadata.

        Raises:
            RequestRefused: When the image is empty, has an unsupported shape, or too many tokens.
        """
        check_sides(image.width, image.height)
        size = self.fitting(image.width, image.height)
        if image.mode != "RGB":
            image = image.convert("RGB")
        if image.size != size:
            image = image.resize(size, resample=Image.Resampling.BICUBIC)
        return self.processor.process(image)

    def plan_group(self, size: FrameSize) -> ImagePlan:
        """Return the plan of a frame group without its tokens, for frames that are resized to a size.

        Its metadata is its grid of patches, if it has one.
        """
        videos = self.videos
        assert videos is not None, "the model takes videos"
        channels = len(videos.levels)
        if videos.factor:
            patch, merge = self._patches.patch, self._patches.merge
            grid = (1, size.height // patch, size.width // patch)
            found = image_plan(
                grid, merge=merge, patch=patch, channels=channels, frames=videos.temporal
            )
            metadata = pack_metadata({VIDEO_GRID: np.array([grid], np.int64)})
            return dataclasses.replace(found, metadata=metadata)
        # As many dimensions as images of this model have.
        images = self.shape(*SHAPED).arrays.get(PIXELS, ("", (1, 1, 1, 1)))
        lead = (1,) * (len(images[1]) - 3)
        arrays = (
            ArraySpec(PIXELS, "uint8", (*lead, channels, size.height, size.width)),
            ArraySpec(LEVELS, "float32", (channels, 256)),
        )
        return ImagePlan(arrays, 0, metadata=pack_metadata({}))

    def process_frames(self, frames: Sequence[Image.Image], size: FrameSize) -> Arrays:
        """Return the pixels of a frame group, and the table of their values."""
        videos = self.videos
        assert videos is not None, "the model takes videos"
        if videos.factor:
            return self._patches.process_frames(frames, size)
        (frame,) = frames
        pixels = videos.resize_frame(frame).transpose(2, 0, 1)
        shape = self.plan_group(size).arrays[0].shape
        return {PIXELS: pixels.reshape(shape), LEVELS: np.array(videos.levels, np.float32)}

    def _shape_of(self, width: int, height: int) -> ImageShape:
        try:
            return self.processor.shape(width, height)
        except (ValueError, ArithmeticError) as error:
            # The processor's message about an image without pixels concerns its size only.
            raise RequestRefused(
                f"an image of {width} x {height} pixels cannot be processed: {error} "
                "Remedy: crop or pad the image.",
                code="image_aspect_ratio",
            ) from error

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that an image is shrunk to, so that it has no more tokens than allowed.

        If the processor needs a blank image to determine its result, the size also respects the limit of its pixels.
        """
        limit, pixels_max = self._info.item_tokens_max, self.processor.pixels_max
        fewest = 0
        for step in range(SHRINK_STEPS):
            size = [max(1, round(side * SHRINK**step)) for side in (width, height)]
            if pixels_max is not None and size[0] * size[1] > pixels_max:
                continue
            tokens = self.shape(*size).text.count(self.processor.placeholder)
            if tokens <= limit:
                return size[0], size[1]
            fewest = min(tokens, fewest or tokens)
            if max(size) == 1:
                break
        raise too_many_tokens(width, height, fewest, limit)


def load_images(info: ModelInfo, tokenizer: Any) -> GenericImages:
    """Load the image processing; `tokenizer` is transformers' tokenizer of the checkpoint.

    Raises:
        CheckpointError: When the processor cannot be loaded.
    """
    directory = checkpoint_directory(info.path)
    processor = load_image_processor(directory, info.family, tokenizer, info.placeholder)
    videos = None
    described = video_processor_of(directory, info.family)
    if info.takes_videos and isinstance(described, VideoProcessor):
        videos = video_rules(described, video_settings(directory, described))
    return GenericImages(processor, info, videos)


def image_processing(settings: bytes) -> GenericImages:
    """Build the image processing of `GenericImages.recipe` in a process that forks, if possible without torch."""
    # The tokenizer's threads would exist when the process forks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    info = msgspec.json.decode(settings, type=ModelInfo)
    forgo_torch(checkpoint_directory(info.path))
    tokenizer = load_tokenizer(
        checkpoint_directory(info.path),
        vocab_size=info.vocab_size,
        chat_template=info.chat_template,
    )
    return load_images(info, tokenizer)
