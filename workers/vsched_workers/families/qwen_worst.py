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

from vsched_workers.families.qwen_image import ASPECT_RATIO_MAX, ResizeLimits, resized

SHORT_SIDES_MAX = 1 << 15
"""Maximum number of short sides to try: an image of 2**30 pixels has no more."""


def largest_units(
    limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
) -> dict[int, int]:
    """Return the most tokens along the long side for each number of tokens along the short side.

    `limits` bound the resized image, `tokens_max` its tokens (0: no bound), `pixels_max` the original image.
    """
    found: dict[int, int] = {}
    bound = min(math.isqrt(pixels_max), SHORT_SIDES_MAX)
    for short in range(1, bound + 1):
        for long in _long_sides(
            short, limits, factor=factor, tokens_max=tokens_max, pixels_max=pixels_max
        ):
            rows, columns = resized(short, long, factor=factor, limits=limits)
            few, many = sorted((rows // factor, columns // factor))
            if tokens_max and few * many > tokens_max:
                continue
            if many > found.get(few, 0):
                found[few] = many
    return found


def _long_sides(
    short: int, limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
) -> Iterator[int]:
    """Yield the long sides for a short one at which the number of tokens may have a peak."""
    longest = min(ASPECT_RATIO_MAX * short, pixels_max // short)
    for long in _peaks(short, longest, limits, factor, tokens_max, pixels_max):
        # Also the neighbors: halves are rounded to even, and the processor computes thresholds in another order.
        for near in (long - 1, long, long + 1):
            if short <= near <= longest:
                yield near


def _peaks(
    short: int,
    longest: int,
    limits: ResizeLimits,
    factor: int,
    tokens_max: int,
    pixels_max: int,
) -> Iterator[int]:
    yield longest
    area = factor * factor
    few, many = round(short / factor), round(longest / factor)
    bounds = [tokens_max] if tokens_max else []
    if limits.maximum is not None:
        bounds.append(limits.maximum // area)
    for bound in bounds:
        # The last long side before the image has to shrink, or is refused.
        yield math.floor((bound // max(few, 1) + 0.5) * factor)
    if limits.maximum is not None and few * many * area > limits.maximum:
        # It shrinks: sides follow from their ratio. Yield the last ratio at which the short side keeps its tokens; if
        # images of the maximum area are accepted, such an image is as large.
        scale = limits.maximum / area
        for kept in range(1, few + 1 if pixels_max < limits.maximum else 1):
            yield math.floor(scale * short / kept**2)
        # A strip that is one token wide is not bounded by the maximum, only by the token limit.
        yield math.ceil((tokens_max + 1) ** 2 * short / scale)
    if few * round(short / factor) * area < limits.minimum:
        # It grows: yield the last long side at which it does, the last ratio before the short side loses a token, and
        # the last one before it is refused.
        scale = limits.minimum / area
        yield math.floor((scale / max(few, 1) + 0.5) * factor)
        for kept in range(1, math.ceil(math.sqrt(scale)) + 1):
            yield math.floor(scale * short / kept**2)
            yield math.floor((tokens_max // kept) ** 2 * short / scale)
