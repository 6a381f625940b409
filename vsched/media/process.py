"""The second half of a preparation, in a pool thread: what an item's extent in the arena is filled with."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vsched.errors import RequestFailed
from vsched.faultpoints import fault_point
from vsched.media.decode import PixelLimits, decode
from vsched.media.embeddings import Embedding, write_rows
from vsched.media.measure import Measured
from vsched.worker.contract import Preprocessor


def process(
    image: Measured, extent: npt.NDArray[np.uint8], preprocessor: Preprocessor, limits: PixelLimits
) -> None:
    """Fill an extent with the pixels of an image, or with the rows of its embedding.

    Blocks: for as long as decoding or converting takes; call it off the event loop.

    Raises:
        RequestRefused: When the image is damaged, or a value of the embedding is not finite.
        RequestFailed: When the processor gave something else than it planned.
    """
    if isinstance(image.content, Embedding):
        write_rows(image.content, preprocessor.info.dtype, extent)
        return
    fault_point("media.decode")
    pixels = preprocessor.process_image(decode(image.content, limits))
    expected = (math.prod(image.plan.grid), preprocessor.info.patch_values)
    if pixels.shape != expected:
        # D13: a mismatch fails the request; nothing is trimmed into shape.
        message = f"the image processor gave pixels of shape {pixels.shape}, expected {expected}"
        raise RequestFailed(message, code="image_processing_failed")
    extent.view(np.float32)[:] = pixels.reshape(-1)
