"""Processing of an encoded image into the arrays of its extent, in a thread or a picture process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vsched.errors import RequestFailed
from vsched.faultpoints import fault_point
from vsched.media.allocator import free_image
from vsched.media.decode import DecodeLimits, decode
from vsched.media.embeddings import Embedding, write_rows
from vsched.media.measure import Measured, within
from vsched.types import ArraySpec
from vsched.worker.contract import ImageProcessing, Preprocessor, view_arrays


def process(
    image: Measured, extent: npt.NDArray[np.uint8], preprocessor: Preprocessor, limits: DecodeLimits
) -> None:
    """Fill an extent with the arrays of an image, or with the rows of its embedding.

    Blocks: until the image is decoded or converted; call it in a thread of the pool.

    Raises:
        RequestRefused: If the image is damaged, or a value of the embedding is not finite.
        RequestFailed: If the processor's output differs from its plan.
    """
    if isinstance(image.content, Embedding):
        write_rows(image.content, preprocessor.info.dtype, extent)
        return
    fault_point("media.decode")
    bounded = within(preprocessor, image.bounds, limits.image)
    process_encoded(image.content, image.plan.arrays, extent, bounded, limits)


def process_encoded(
    encoded: bytes,
    specs: Sequence[ArraySpec],
    extent: npt.NDArray[np.uint8],
    preprocessor: ImageProcessing,
    limits: DecodeLimits,
) -> None:
    """Fill an extent with the planned arrays of an encoded image; see `process`."""
    decoded = decode(encoded, limits)
    try:
        arrays = preprocessor.process_image(decoded)
    finally:
        free_image(decoded)
    made = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    planned = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    if made != planned:
        # A mismatch fails the request; arrays are never reshaped to fit.
        message = f"the image processor gave {_described(made)}, but planned {_described(planned)}"
        raise RequestFailed(message, code="image_processing_failed")
    for name, view in view_arrays(specs, extent).items():
        view[...] = arrays[name]


def _described(arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in arrays.items())
