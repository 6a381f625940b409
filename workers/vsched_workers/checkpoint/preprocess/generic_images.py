"""What processes images for a model without a path of its own: in the engine and, by its recipe, in picture processes.

It has transformers' processor and the most tokens of an image, and nothing of prompts but what the processor needs of
a tokenizer.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import msgspec
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import ModelInfo
from vsched.worker.capabilities import PixelBounds, no_pixel_bounds
from vsched.worker.contract import Arrays, ImageRecipe
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
"""Sizes of images for which is kept what becomes of them."""
SHAPES_KEPT = 16
BOUNDS_KEPT = 16
"""Bounds of pixels, as requests have them, for which is kept what processes images within them."""
SHRINK = 0.9
SHRINK_STEPS = 80
"""An image of too many tokens is made smaller by this factor until it has no more than allowed, so often at most."""


class GenericImages:
    """Processes images as transformers does, made smaller before where they would have too many tokens.

    Every method may be called from any thread.
    """

    def __init__(self, processor: ImageProcessor, info: ModelInfo) -> None:
        """Take the processor of a checkpoint."""
        self.processor = processor
        self._info = info
        self._bounded = lru_cache(BOUNDS_KEPT)(self._bounded_by)
        self.shape = lru_cache(SHAPES_KEPT)(self._shape_of)
        self.fitting = lru_cache(SIZES_KEPT)(self._fit)

    def recipe(self) -> ImageRecipe:
        """Return how another process makes the same."""
        return ImageRecipe(f"{__name__}:image_processing", msgspec.json.encode(self._info))

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> GenericImages:
        """Return the same for images that are resized within other bounds.

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
        """Return the arrays of an RGB image, but for its metadata.

        Raises:
            RequestRefused: When it is empty, of a shape that the processor does not take, or of too many tokens.
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
            # What the processor says of an image of no pixels but its size.
            raise RequestRefused(
                f"an image of {width} x {height} pixels cannot be processed: {error} "
                "Remedy: crop or pad the image.",
                code="image_aspect_ratio",
            ) from error

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which an image is made smaller, so that it has no more tokens than allowed.

        Nor has it more pixels than a blank image may have, where the processor needs one to tell what becomes of it.
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
    """Load what processes images; `tokenizer` is transformers' tokenizer of the checkpoint.

    Raises:
        CheckpointError: When the processor cannot be loaded.
    """
    directory = checkpoint_directory(info.path)
    processor = load_image_processor(directory, info.family, tokenizer, info.placeholder)
    return GenericImages(processor, info)


def image_processing(settings: bytes) -> GenericImages:
    """Make what processes images, by `GenericImages.recipe`, in a process that forks, without torch wherever it can."""
    # Its threads would be there when the process forks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    info = msgspec.json.decode(settings, type=ModelInfo)
    forgo_torch(checkpoint_directory(info.path))
    tokenizer = load_tokenizer(
        checkpoint_directory(info.path),
        vocab_size=info.vocab_size,
        chat_template=info.chat_template,
    )
    return load_images(info, tokenizer)
