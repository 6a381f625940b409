"""Processing of images that have a size and no pixels: what becomes of an image follows from its size alone.

An array whose strides are zero has a size and one value. What transformers' processors for Pillow do to each pixel,
which is to resize, to rescale and to normalise, only changes the size and the type here; all else is their own code.
So the cost is that of the arrays that they return, however large the image is.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import (
    get_resize_output_image_size,
    get_size_with_aspect_ratio,
)
from transformers.image_utils import get_image_size_for_max_height_width


def hollow_processor(processor: Any) -> Any:
    """Return transformers' processor for images without pixels; None where its images are processed otherwise."""
    own = processor.image_processor
    if not isinstance(own, PilBackend):
        return None
    hollow: Any = copy.copy(own)
    # What a class does before and after it resizes stays as it is: ours comes after it, and before the backend.
    hollow.__class__ = type(f"Hollow{type(own).__name__}", (type(own), HollowBackend), {})
    hollow.spared = False
    made = copy.copy(processor)
    made.image_processor = hollow
    return made


class HollowBackend(PilBackend):
    """What a backend does to pixels, to images that have none.

    Attributes:
        spared: Whether it was asked to resize an image, and did not have to.
    """

    spared: bool

    def process_image(self, image: Any, *_: Any, **__: Any) -> npt.NDArray[Any]:
        """Bring the channels to the front."""
        return np.moveaxis(image, -1, 0)

    def resize(self, image: npt.NDArray[Any], size: Any, *_: Any, **__: Any) -> npt.NDArray[Any]:
        """Return an image of the size that the backend would give it."""
        self.spared = True
        height, width = image.shape[-2:]
        if size.shortest_edge and size.longest_edge:
            found = get_size_with_aspect_ratio(
                (height, width), size.shortest_edge, size.longest_edge
            )
        elif size.shortest_edge:
            found = get_resize_output_image_size(
                image,
                size=size.shortest_edge,
                default_to_square=False,
                input_data_format="channels_first",
            )
        elif size.max_height and size.max_width:
            found = get_image_size_for_max_height_width(
                (height, width), size.max_height, size.max_width
            )
        else:
            found = (size.height, size.width)
        if min(found) < 1:
            raise ValueError("height and width must be > 0")  # as Pillow says it
        return np.broadcast_to(image.dtype.type(0), (image.shape[0], *found))

    def rescale(self, image: npt.NDArray[Any], *_: Any, **__: Any) -> npt.NDArray[np.float32]:
        """Return an image of the type that a rescaled one has."""
        return np.broadcast_to(np.float32(0), image.shape)

    def normalize(self, image: npt.NDArray[Any], *_: Any, **__: Any) -> npt.NDArray[np.float32]:
        """Return an image of the type that a normalised one has."""
        return np.broadcast_to(np.float32(0), image.shape)
