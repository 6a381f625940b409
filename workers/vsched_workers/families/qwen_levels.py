"""What the image processor makes of pixels: looked up by the rank that reads them, the same to the bit.

Rescaling and normalising are functions of a value and its channel, so the front end asks the processor of transformers
once for all 256 values of each channel, and sends the answers beside the pixels. A look-up is the processor's number by
definition, whatever its float operations and their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vsched.worker.contract import Arrays
from vsched_workers.families.qwen_image import LEVELS, PIXELS

PIECE_PATCHES = 512
"""Patches that are looked up at a time: a place of 4 bytes for each value is all that it takes beside its result."""


def pixel_values(
    pixels: torch.Tensor, images: Sequence[Arrays], dtype: torch.dtype, *, temporal: int
) -> torch.Tensor:
    """Return what the processor makes of images, whose pixels are on the device one after the other.

    Each number is rounded to the type as it would be alone, and repeated in `temporal` slices of time.

    Shape: uint8 [patches, channels x patch x patch] in, [patches, channels x temporal x patch x patch] out.
    """
    tables = torch.from_numpy(np.stack([arrays[LEVELS] for arrays in images]))
    tables = tables.to(pixels.device, dtype)
    channels = tables.shape[1]
    first = 256 * torch.arange(channels, dtype=torch.int32, device=pixels.device)[:, None]
    cut = pixels.view(len(pixels), channels, -1)
    made = tables.new_empty(len(cut), channels, temporal, cut.shape[2])
    start = 0
    for arrays, table in zip(images, tables, strict=True):
        stop = start + len(arrays[PIXELS])
        for begin in range(start, stop, PIECE_PATCHES):
            end = min(begin + PIECE_PATCHES, stop)
            places = cut[begin:end] + first
            values = table.view(-1).index_select(0, places.view(-1))
            made[begin:end] = values.view(places.shape)[:, :, None]
        start = stop
    return made.view(len(pixels), -1)
