"""Image processing on the generic path: in the engine and, built from its recipe, in isolated image processes.

It consists of transformers' processor and the token limit of an image, with only as much of the tokenizer as the
processor needs.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import msgspec
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import Arrays, ImageRecipe, PixelBounds, no_pixel_bounds
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.images.library import forgo_torch
from vsched_workers.checkpoint.images.processor import (
    ImageProcessor,
    ImageShape,
    load_image_processor,
)
from vsched_workers.checkpoint.preprocess.text import check_sides, too_many_tokens
from vsched_workers.checkpoint.tokenizer_files import load_tokenizer
from vsched_workers.families.qwen_image import bounded_limits

SIZES_KEPT = 256
"""The number of image sizes whose results are cached."""
SHAPES_KEPT = 16
BOUNDS_KEPT = 16
"""The number of cached processors for pixel bounds of requests."""
SHRINK = 0.9
SHRINK_STEPS = 80
"""An image with too many tokens is shrunk by this factor until it fits, in at most this many steps."""


class GenericImages:
    """Processes images as transformers does, after shrinking images with too many tokens.

    All methods are thread-safe.
    """

    def __init__(self, processor: ImageProcessor, info: ModelInfo) -> None:
        """Take the processor of a checkpoint."""
        self.processor = processor
        self._info = info
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
        return self if found == limits else GenericImages(self.processor.within(found), self._info)

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
    return GenericImages(processor, info)


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
