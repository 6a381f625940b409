"""Image sizes in the Qwen-VL processors, the clamp that bounds them to a token budget, and the largest possible images.

The processor resizes an image to multiples of one *factor* (patch x merge): one factor squared is one token. It rounds
both sides; if the area is then above the maximum, it floors both, if below the minimum, it raises both to the ceiling.
Neither bound holds for thin images, and that is the reason for this file:

- Above the maximum each side is floored to at least one factor, so a 1 x r strip of N allowed tokens gets floor(sqrt(N
  * r)) tokens: more than N while r > N, and r may be 200.
- Below the minimum of M tokens the two ceilings give up to (sqrt(M / r) + 1) * (sqrt(M * r) + 1) tokens, so a minimum
  that is just clamped to the maximum is not enough.

The clamp therefore lowers the maximum to the budget, and the minimum until no legal aspect ratio exceeds the budget
through it; `Preprocessor.plan_image` refuses the thin images that still exceed it.

Sides are rounded by up to half a factor, up or down, and thin images profit the most: within 3,686,400 pixels and with
a factor of 28, a square has 4,761 tokens and a strip of 154 x 23937 pixels has 5,130. No formula for one shape finds
the largest images. So `largest_units` has a bound for every number of tokens along the short side.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import ConfigError, RequestRefused
from vsched.types import ArraySpec
from vsched.worker.contract import Arrays, FrameSize, ImagePlan, ImageRecipe, PixelBounds

ASPECT_RATIO_MAX = 200
"""Maximum of longer side over shorter side that the processors accept."""

PIXELS = "pixel_values"
"""The encoder's input for an image: uint8 [patches, patch values], merge units together.

The processor converts each value to float32, and repeats a still image in every temporal slice. Both follow from the
bytes and `LEVELS`, so ranks do it (`vsched_workers.families.qwen_levels`), and an eighth of the bytes is transferred.
For a frame group of a video: [frames, patches, patch values].
"""

LEVELS = "levels"
"""The processor's result for each of the 256 values of each channel: float32 [channels, 256]."""

_GRID = struct.Struct("<3q")
_TIME = struct.Struct("<qd")
_RATIO_TERM = math.sqrt(ASPECT_RATIO_MAX) + 1 / math.sqrt(ASPECT_RATIO_MAX)


@dataclass(frozen=True, slots=True)
class ResizeLimits:
    """The area limits of a resized image; `maximum` is None without a maximum."""

    minimum: int
    maximum: int | None


def image_plan(
    grid: tuple[int, int, int],
    *,
    merge: int,
    patch: int,
    channels: int,
    work_bytes: int = 0,
    frames: int = 0,
) -> ImagePlan:
    """Return the plan of an image with this grid, patches in time, height and width; it is the plan's metadata.

    `patch` is the side of a patch in pixels; a token consists of `merge` x `merge` patches. With `frames`, it is a
    frame group of that many frames.
    """
    patches = math.prod(grid)
    group = (frames,) if frames else ()
    return ImagePlan(
        arrays=(
            ArraySpec(PIXELS, "uint8", (*group, patches, channels * patch * patch)),
            ArraySpec(LEVELS, "float32", (channels, 256)),
        ),
        tokens=patches // (merge * merge),
        metadata=_GRID.pack(*grid),
        work_bytes=work_bytes,
    )


def grid_of(metadata: bytes) -> tuple[int, int, int]:
    """Return the grid of a plan from its metadata."""
    time, height, width = _GRID.unpack_from(metadata)
    return time, height, width


def flat_patches(arrays: Arrays) -> npt.NDArray[np.uint8]:
    """Return the patches of an image, or of all frames of a frame group: uint8 [patches, patch values]."""
    pixels = arrays[PIXELS]
    return pixels.reshape(-1, pixels.shape[-1])


def with_time(metadata: bytes, index: int, seconds: float) -> bytes:
    """Return the metadata of a frame group with its index in the video and the seconds per group."""
    return metadata[: _GRID.size] + _TIME.pack(index, seconds)


def time_of(metadata: bytes) -> tuple[int, float] | None:
    """Return index and seconds of a frame group whose positions have a temporal axis; None for an image."""
    if len(metadata) == _GRID.size:
        return None
    index, seconds = _TIME.unpack_from(metadata, _GRID.size)
    return index, seconds


def resized(height: int, width: int, *, factor: int, limits: ResizeLimits) -> tuple[int, int]:
    """Return the height and width that the processor resizes an image to.

    The arithmetic follows the processor's to the last rounding, since the two must agree on every size.
    """
    rows = round(height / factor) * factor
    columns = round(width / factor) * factor
    if limits.maximum is not None and rows * columns > limits.maximum:
        shrink = math.sqrt((height * width) / limits.maximum)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < limits.minimum:
        grow = math.sqrt(limits.minimum / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def pixel_limits(settings: Mapping[str, Any], default: ResizeLimits) -> ResizeLimits:
    """Read the limits from processor settings: `min_pixels` and `max_pixels` take precedence over `size`."""
    size = settings.get("size")
    minimum: int | None = default.minimum
    maximum = default.maximum
    if isinstance(size, Mapping):
        minimum = size.get("shortest_edge")
        maximum = size.get("longest_edge")
    if settings.get("min_pixels") is not None:
        minimum = settings["min_pixels"]
    if settings.get("max_pixels") is not None:
        maximum = settings["max_pixels"]
    return ResizeLimits(
        minimum=int(minimum) if minimum else 1, maximum=int(maximum) if maximum else None
    )


def minimum_tokens_for(tokens: int) -> int:
    """Return the largest minimum, in tokens, whose ceilings stay within `tokens` at every legal aspect ratio."""
    # (sqrt(M / r) + 1) * (sqrt(M * r) + 1) <= N, solved for M at the extreme ratio.
    root = (math.sqrt(_RATIO_TERM**2 + 4 * (tokens - 1)) - _RATIO_TERM) / 2
    return max(1, math.floor(root * root))


def clamp_limits(limits: ResizeLimits, *, tokens: int, factor: int) -> ResizeLimits:
    """Bound the limits to a budget of tokens per image; 0 is no budget.

    Raises:
        ConfigError: When the budget is negative.
    """
    if tokens == 0:
        return limits
    if tokens < 0:
        raise ConfigError.of_limit(
            "the token budget of one image is below 1",
            value=tokens,
            limit=1,
            remedy="set a budget of at least 1, or 0 for none",
        )
    area = factor * factor
    allowed = tokens * area
    maximum = allowed if limits.maximum is None else min(limits.maximum, allowed)
    minimum = min(limits.minimum, minimum_tokens_for(tokens) * area)
    return ResizeLimits(minimum=minimum, maximum=maximum)


def worst_tokens(limits: ResizeLimits, *, factor: int) -> int | None:
    """Return an upper bound of the tokens of any image within these limits; None without a maximum."""
    if limits.maximum is None:
        return None
    area = factor * factor
    most = max(1, limits.maximum // area)
    strip = math.floor(math.sqrt(limits.maximum / area * ASPECT_RATIO_MAX))
    least = limits.minimum / area
    raised = math.floor(least + _RATIO_TERM * math.sqrt(least) + 1)
    return max(most, strip if most < ASPECT_RATIO_MAX else 0, raised)


def bounded_limits(
    limits: ResizeLimits, bounds: PixelBounds, *, tokens: int, factor: int, pixels_max: int
) -> ResizeLimits:
    """Return the limits for an image with bounds in its request, within those that encoder memory was measured with.

    These were images of at most `tokens` tokens, of at least the minimum area; and at most the area of the largest
    accepted image, of `pixels_max` pixels.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    area = factor * factor
    least = limits.minimum
    raised = max(least, min(tokens * area, minimum_tokens_for(max(1, pixels_max // area)) * area))
    for name, value, most in (
        ("min_pixels", bounds.min_pixels, raised),
        ("max_pixels", bounds.max_pixels, tokens * area),
    ):
        if value is not None and not least <= value <= most:
            raise RequestRefused.of_limit(
                f"{name} of an image is out of bounds",
                value=f"{value} pixels",
                limit=f"{least} to {most} pixels",
                remedy="send one within the limit, which follows from encode.admission.max_tokens, "
                "media.image_pixels_max and the checkpoint's image processor",
                code="pixel_bounds_invalid",
            )
    found = replaced(limits, bounds)
    if found.maximum is not None and found.minimum > found.maximum:
        raise RequestRefused.of_limit(
            "min_pixels of an image is out of bounds",
            value=f"{found.minimum} pixels",
            limit=f"{found.maximum} pixels, which is max_pixels",
            remedy="send a smaller min_pixels or a larger max_pixels",
            code="pixel_bounds_invalid",
        )
    return found


def replaced(limits: ResizeLimits, bounds: PixelBounds) -> ResizeLimits:
    """Return the limits with a request's bounds in place of their own."""
    return ResizeLimits(
        limits.minimum if bounds.min_pixels is None else bounds.min_pixels,
        limits.maximum if bounds.max_pixels is None else bounds.max_pixels,
    )


class QwenImages(msgspec.Struct, frozen=True):
    """Image processing, in the engine and, built from its recipe, in isolated image processes.

    Attributes:
        resample: Pillow's number of the filter.
        levels: The processor's result for each of the 256 values of each channel.
        video_levels: The same of the video processor.
    """

    patch: int
    merge: int
    resample: int
    limits: ResizeLimits
    levels: list[list[float]]
    video_levels: list[list[float]] = []

    @property
    def factor(self) -> int:
        """The side of a token in pixels."""
        return self.patch * self.merge

    def recipe(self) -> ImageRecipe:
        """Return the recipe for building it in another process."""
        return ImageRecipe(f"{__name__}:image_processing", msgspec.json.encode(self))

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> QwenImages:
        """Return the image processing with bounds that passed `bounded_limits`."""
        del pixels_max
        return msgspec.structs.replace(self, limits=replaced(self.limits, bounds))

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the pixels of an RGB image, with the planned grid, and the table of their values."""
        height, width = resized(image.height, image.width, factor=self.factor, limits=self.limits)
        if image.mode != "RGB":
            image = image.convert("RGB")
        resample = Image.Resampling(self.resample)
        pixels = np.asarray(image.resize((width, height), resample=resample))
        return {
            PIXELS: self._patches(pixels, height // self.patch, width // self.patch),
            LEVELS: np.array(self.levels, np.float32),
        }

    def process_frames(self, frames: Sequence[Image.Image], size: FrameSize) -> Arrays:
        """Return the pixels of a frame group, and the table of their values."""
        rows, columns = size.height // self.patch, size.width // self.patch
        resample = Image.Resampling(self.resample)
        made: list[npt.NDArray[np.uint8]] = []
        for index, frame in enumerate(frames):
            if index and frame is frames[index - 1]:
                made.append(made[-1])
                continue
            rgb = frame if frame.mode == "RGB" else frame.convert("RGB")
            pixels = np.asarray(rgb.resize((size.width, size.height), resample=resample))
            made.append(self._patches(pixels, rows, columns))
        return {PIXELS: np.stack(made), LEVELS: np.array(self.video_levels, np.float32)}

    def token_changes(self, before: Arrays, group: Arrays) -> npt.NDArray[np.float32]:
        """Return the mean difference of each token's bytes from those of the frame group before, 0 to 1."""
        old, new = before[PIXELS], group[PIXELS]
        differences = np.maximum(old, new)
        differences -= np.minimum(old, new)
        frames, patches, _ = new.shape
        each = differences.reshape(frames, patches // self.merge**2, -1)
        sums = each.sum(axis=(0, 2), dtype=np.uint64)
        found: npt.NDArray[np.float32] = (sums / (255 * frames * each.shape[2])).astype(np.float32)
        return found

    def _patches(
        self, pixels: npt.NDArray[np.uint8], rows: int, columns: int
    ) -> npt.NDArray[np.uint8]:
        """Split [height, width, channels] into patches, merge units together, channels first within a patch."""
        patch, merge = self.patch, self.merge
        channels = pixels.shape[2]
        cut = pixels.reshape(
            rows // merge, merge, patch, columns // merge, merge, patch, channels
        ).transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(cut).reshape(rows * columns, channels * patch * patch)


def image_processing(settings: bytes) -> QwenImages:
    """Build the image processing of `QwenImages.recipe`."""
    return msgspec.json.decode(settings, type=QwenImages)


def largest_units(
    limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
) -> dict[int, int]:
    """Return the most tokens along the long side for each number of tokens along the short side.

    A close upper bound, for each of the three ways to round: no image has more, and for one of the largest the bound is
    its own grid. `limits` bound the resized image, `tokens_max` its tokens (0: no bound), `pixels_max` the original
    image.
    """
    # All areas and sides below are in tokens.
    accepted, least, most = (
        math.inf if pixels is None else pixels / factor**2
        for pixels in (pixels_max, limits.minimum, limits.maximum)
    )
    ratio = min(ASPECT_RATIO_MAX, pixels_max)
    shorts = range(1, math.isqrt(pixels_max) // factor + 2)
    rounded = {}
    for few in shorts:
        # Of the short sides that are rounded to it, the one that allows the longest long side.
        short = min(max(math.sqrt(accepted / ratio), few - 0.5), few + 0.5)
        rounded[few] = _floor(min(ratio * short, accepted / short) + 0.5)
    found = {few: _floor(min(many, most / few)) for few, many in rounded.items()}
    shrinking = [few for few, many in rounded.items() if few * many > most]
    if shrinking:
        # They shrink to the maximum area, and both sides are floored, but to no less than one token.
        longest = math.sqrt(most * min(ratio, accepted / (shrinking[0] - 0.5) ** 2))
        for few in range(1, math.isqrt(_floor(most)) + 1):
            found[few] = max(found.get(few, 0), _floor(min(most / few, longest)))
        found[1] = max(found[1], _floor(longest))
    # Tiny images grow to the minimum area, and both sides are raised to the ceiling.
    for few in range(1, math.ceil(math.sqrt(least)) + 1):
        many = least / (few - 1) if few > 1 else math.inf
        many = math.ceil(min(many, math.sqrt(least * ratio)))
        found[few] = max(found.get(few, 0), many)
    if tokens_max:
        found = {few: min(many, tokens_max // few) for few, many in found.items()}
    return {few: many for few, many in sorted(found.items()) if many >= few}


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)
