"""Batches of images with the highest memory use of a vision tower.

The memory of a batch depends on its total number of patches, on its largest image (some layers attend over a whole
image), on its number of images and on the shape of windows. So there is a batch for each: the largest image, filled up
to the budget; the largest number of images; and strips. Of two images with the same number of tokens, the one closer to
a square needs slightly more (2 % on a CPU), so strips of about the same size are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import Arrays, ImagePlan, extent_bytes
from vsched_workers.checkpoint.facts import (
    image_factor,
    image_limits,
    processor_settings,
    video_settings,
)
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.checkpoint.images import revealing_sizes
from vsched_workers.families import family_of
from vsched_workers.families.qwen_image import image_plan, largest_units

SAME_SIZE = 0.9
"""Strips with at least this share of the largest image's tokens are not tried separately."""


def worst_batches(
    info: ModelInfo, *, items: int, tokens: int, pixels_max: int
) -> list[list[ImagePlan]]:
    """Return the candidates for the worst batch; see `vsched.worker.contract.WorkerPlugin`."""
    if pixels_max < 1 or (items < 1 and tokens < 1):
        return []
    directory = checkpoint_directory(info.path)
    config = read_json(directory, "config.json")
    family = family_of(config)
    factor = image_factor(family, config)
    limits = image_limits(family, config, processor_settings(directory), info.item_tokens_max)
    units = largest_units(
        limits, factor=factor, tokens_max=info.item_tokens_max, pixels_max=pixels_max
    )
    least = -(-limits.minimum // (factor * factor))
    frames = 0
    if info.takes_videos:
        # A frame group is an image with more bytes, and other limits.
        frames = int(family.vision(config, "temporal_patch_size"))
        settings = video_settings(directory, family.video_processor)
        videos = image_limits(family, config, settings, info.item_tokens_max, frames=True)
        least = min(least, -(-videos.minimum // (factor * factor)))
        groups = largest_units(
            videos, factor=factor, tokens_max=info.item_tokens_max, pixels_max=pixels_max
        )
        units = {few: max(units.get(few, 0), groups.get(few, 0)) for few in {*units, *groups}}
    merge = int(family.vision(config, "spatial_merge_size"))
    patch = int(family.vision(config, "patch_size"))
    channels = int(family.vision(config, "in_channels"))
    return [
        [
            image_plan(
                (1, few * merge, many * merge),
                merge=merge,
                patch=patch,
                channels=channels,
                frames=frames,
            )
            for few, many in batch
        ]
        for batch in compose(units, least=least, items=items, tokens=tokens)
    ]


def worst_images(info: ModelInfo, *, pixels_max: int) -> dict[ImagePlan, Arrays]:
    """Return the images, with their arrays, that need the most memory of a tower on the generic path.

    It encodes one image at a time, so no batch needs more. Its memory depends on the image's arrays, and that of the
    rows on their number.
    """
    from vsched_workers.checkpoint.preprocess import AnyPreprocessor, load_preprocessor

    preprocessor = load_preprocessor(info)
    assert isinstance(preprocessor, AnyPreprocessor), "others have families"
    plans: dict[ImagePlan, tuple[int, int]] = {}
    for size in revealing_sizes(preprocessor.processor, pixels_max):
        with suppress(RequestRefused):
            plans.setdefault(preprocessor.plan_image(*size), size)
    if not plans:
        return {}
    worst = {
        max(plans, key=lambda plan: extent_bytes(plan.arrays)),
        max(plans, key=lambda plan: plan.tokens),
    }
    noise = np.random.default_rng(0)
    samples = {}
    for plan in worst:
        width, height = plans[plan]
        image = Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8))
        samples[plan] = preprocessor.process_image(image)
    return samples


def compose(
    units: Mapping[int, int], *, least: int, items: int, tokens: int
) -> list[list[tuple[int, int]]]:
    """Compose batches of images, given by their sides in tokens, within `units`: the longest long side by short side.

    `least` is the minimum of tokens of an image; `items` and `tokens` are the limits of a batch, 0 for none, but not
    both.
    """
    if not units:
        return []
    largest = max(units.items(), key=lambda sides: (sides[0] * sides[1], sides[0]))
    strip = max(units.items(), key=lambda sides: (sides[1], sides[0]))
    strips = []
    if strip[0] * strip[1] < SAME_SIZE * largest[0] * largest[1]:
        strips = _repeated(strip, items, tokens)
    count = items or max(1, tokens // max(1, least))
    share = _within(units, tokens // count, least) if tokens else None
    batches = [
        _filled(units, [largest], least=least, items=items, tokens=tokens),
        [share] * count if share else [],
        _filled(units, strips, least=least, items=items, tokens=tokens) if strips else [],
    ]
    return [batch for index, batch in enumerate(batches) if batch and batch not in batches[:index]]


def _repeated(sides: tuple[int, int], items: int, tokens: int) -> list[tuple[int, int]]:
    """Return copies of an image up to the limits; an image above the budget is alone."""
    fitting = max(1, tokens // (sides[0] * sides[1])) if tokens else items
    return [sides] * (min(fitting, items) if items else fitting)


def _filled(
    units: Mapping[int, int],
    batch: list[tuple[int, int]],
    *,
    least: int,
    items: int,
    tokens: int,
) -> list[tuple[int, int]]:
    """Add images to a batch, each of the largest size that fits, up to a limit."""
    filled = list(batch)
    left = tokens - sum(few * many for few, many in filled) if tokens else None
    while not items or len(filled) < items:
        room = max(few * many for few, many in units.items()) if left is None else left
        sides = _within(units, room, least)
        if sides is None:
            break
        filled.append(sides)
        if left is not None:
            left -= sides[0] * sides[1]
    return filled


def _within(units: Mapping[int, int], tokens: int, least: int) -> tuple[int, int] | None:
    """Return the sides of the largest image of at most `tokens` tokens; None if there is none."""
    fitting = [
        (few, min(many, tokens // few))
        for few, many in units.items()
        if few <= math.isqrt(max(tokens, 0)) and few * min(many, tokens // few) >= least
    ]
    return max(fitting, key=lambda sides: sides[0] * sides[1], default=None)
