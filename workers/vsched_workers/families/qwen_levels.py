"""Conversion of pixels to the image processor's values on the encoding rank, bit-exact by table lookup.

Rescaling and normalization depend on a value and its channel only, so the preprocessor calls transformers' processor
once for all 256 values of each channel, and sends this table with the pixels. The lookup yields the processor's number
by definition, regardless of its float operations and their order.

Pixels are bytes in the arena and between hosts, an eighth of float32 patches for both slices of time. Rejected:
normalization by the formula, float16 patches, and scale and mean folded into the first layer, since the bits would
differ; compressed images, since limits, budgets and isolated processes of media belong to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vsched.worker.contract import Arrays
from vsched_workers.device_copies import sent
from vsched_workers.families.qwen_image import LEVELS, PIXELS

PIECE_PATCHES = {"cpu": 512, "cuda": 8192}
"""Patches per lookup: temporary memory is 4 bytes for each of their values, which on a CPU should stay in a cache."""


def pixel_values(
    pixels: torch.Tensor, images: Sequence[Arrays], dtype: torch.dtype, *, temporal: int
) -> torch.Tensor:
    """Return the processor's values of images, whose pixels are concatenated on the device.

    Each value is rounded to the type. A still image is repeated in `temporal` temporal slices, a frame group of a video
    has one frame for each, one after the other in `pixels`.

    Shape: uint8 [patches, channels x patch x patch] in, [patches, channels x temporal x patch x patch] out.
    """
    tables = sent(np.stack([arrays[LEVELS] for arrays in images]), pixels.device).to(dtype)
    piece = PIECE_PATCHES[pixels.device.type]
    channels = tables.shape[1]
    first = 256 * torch.arange(channels, dtype=torch.int32, device=pixels.device)[:, None]
    cut = pixels.view(len(pixels), channels, -1)
    total = sum(arrays[PIXELS].shape[-2] for arrays in images)
    made = tables.new_empty(total, channels, temporal, cut.shape[2])
    read = written = 0
    for arrays, table in zip(images, tables, strict=True):
        *frames, patches, _ = arrays[PIXELS].shape
        # The slices that each copy of the patches is written to.
        slices = (
            [slice(index, index + 1) for index in range(frames[0])] if frames else [slice(None)]
        )
        for each in slices:
            for begin in range(0, patches, piece):
                size = min(piece, patches - begin)
                places = cut[read + begin : read + begin + size] + first
                values = table.view(-1).index_select(0, places.view(-1))
                at = written + begin
                made[at : at + size, :, each] = values.view(places.shape)[:, :, None]
            read += patches
        written += patches
    return made.view(total, -1)
