"""Search for the largest images that the Qwen-VL processors can produce.

The tokens of an image follow from its sides by roundings (`qwen_image.resized`) of up to half a factor per side, up or
down, and thin images profit the most: within 3,686,400 pixels and with a factor of 28, a square has 4,761 tokens and a
strip of 154 x 23937 pixels has 5,130. No formula for one shape finds that. So every possible short side is tried, with
the long sides just before a rounding step.

The results are grids of actual images, never a number of patches that no legal image has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vsched_workers.families.qwen_image import ASPECT_RATIO_MAX, ResizeLimits

SHORT_SIDES_MAX = 1 << 15
"""Maximum number of short sides to try: an image of 2**30 pixels has no more."""

Sides = npt.NDArray[np.int64]


def largest_units(
    limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
) -> dict[int, int]:
    """Return the most tokens along the long side for each number of tokens along the short side.

    `limits` bound the resized image, `tokens_max` its tokens (0: no bound), `pixels_max` the original image.
    """
    short = np.arange(1, min(math.isqrt(pixels_max), SHORT_SIDES_MAX) + 1)
    longest = np.minimum(ASPECT_RATIO_MAX * short, pixels_max // short)
    most = np.zeros(1, np.int64)
    for some, long in _peaks(short, longest, limits, factor, tokens_max, pixels_max):
        # Also the neighbors: halves are rounded to even, and the processor computes thresholds in another order.
        for near in (long - 1, long, long + 1):
            legal = (short[some] <= near) & (near <= longest[some])
            sides = np.stack(resized_all(short[some][legal], near[legal], factor, limits))
            few, many = np.sort(sides // factor, axis=0)
            if tokens_max:
                accepted = few * many <= tokens_max
                few, many = few[accepted], many[accepted]
            if len(few):
                most = np.pad(most, (0, max(int(few.max()) + 1 - len(most), 0)))
                np.maximum.at(most, few, many)
    return {int(few): int(most[few]) for few in np.flatnonzero(most)}


def resized_all(
    height: Sides, width: Sides, factor: int, limits: ResizeLimits
) -> tuple[Sides, Sides]:
    """Return the sides after resizing, for many images: as `qwen_image.resized`, to the last rounding."""
    rows, columns = _rounded(height, factor) * factor, _rounded(width, factor) * factor
    area, resized_area = (height * width).astype(np.float64), rows * columns
    if limits.maximum is not None:
        shrinks = resized_area > limits.maximum
        shrink = np.sqrt(area / limits.maximum)
        for sides, native in ((rows, height), (columns, width)):
            smaller = np.floor(native / shrink / factor).astype(np.int64) * factor
            np.copyto(sides, np.maximum(factor, smaller), where=shrinks)
    grows = (
        resized_area < limits.minimum
    )  # never one that shrinks: the minimum is below the maximum
    if limits.maximum is not None:
        grows &= ~shrinks
    grow = np.sqrt(limits.minimum / area)
    for sides, native in ((rows, height), (columns, width)):
        larger = np.ceil(native * grow / factor).astype(np.int64) * factor
        np.copyto(sides, larger, where=grows)
    return rows, columns


def _rounded(sides: Sides, factor: int) -> Sides:
    return np.rint(sides / factor).astype(np.int64)


def _peaks(
    short: Sides,
    longest: Sides,
    limits: ResizeLimits,
    factor: int,
    tokens_max: int,
    pixels_max: int,
) -> Iterator[tuple[npt.NDArray[np.bool_], Sides]]:
    """Yield long sides at which the number of tokens may have a peak, with a mask of their short sides."""
    area = factor * factor
    few, many = _rounded(short, factor), _rounded(longest, factor)
    least = np.maximum(few, 1)
    every = np.ones(len(short), dtype=bool)
    yield every, longest
    bounds = [tokens_max] if tokens_max else []
    if limits.maximum is not None:
        bounds.append(limits.maximum // area)
    for bound in bounds:
        # The last long side before the image has to shrink, or is refused.
        yield every, _floor((bound // least + 0.5) * factor)
    if limits.maximum is not None:
        # It shrinks: sides follow from their ratio. Yield the last ratio at which the short side keeps its tokens; if
        # images of the maximum area are accepted, such an image is as large.
        shrinks = few * many * area > limits.maximum
        scale = limits.maximum / area
        kept_max = int(few.max(initial=0)) if pixels_max < limits.maximum else 0
        for kept in range(1, kept_max + 1):
            some = shrinks & (few >= kept)
            yield some, _floor(scale * short[some] / kept**2)
        # A strip that is one token wide is not bounded by the maximum, only by the token limit.
        yield shrinks, np.ceil((tokens_max + 1) ** 2 * short[shrinks] / scale).astype(np.int64)
    # It grows: yield the last long side at which it does, the last ratio before the short side loses a token, and the
    # last one before it is refused.
    grows = few * few * area < limits.minimum
    scale = limits.minimum / area
    yield grows, _floor((scale / least[grows] + 0.5) * factor)
    for kept in range(1, math.ceil(math.sqrt(scale)) + 1):
        yield grows, _floor(scale * short[grows] / kept**2)
        yield grows, _floor((tokens_max // kept) ** 2 * short[grows] / scale)


def _floor(values: npt.NDArray[np.float64]) -> Sides:
    return np.floor(values).astype(np.int64)
