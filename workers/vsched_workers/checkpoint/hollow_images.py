"""Processing of hollow images, with a size but no pixels: an image's arrays and tokens follow from its size alone.

A hollow image is an array with strides of zero, thus a shape and one value. The pixel operations of transformers'
Pillow processors (resize, rescale, normalize) only change its size and type; all else is their own code. So the cost is
that of the returned arrays, however large the image is.
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
    """Return a copy of transformers' processor for hollow images; None if its backend is another one."""
    own = processor.image_processor
    if not isinstance(own, PilBackend):
        return None
    hollow: Any = copy.copy(own)
    # The class's own code around resizing is kept: this backend overrides only the original backend.
    hollow.__class__ = type(f"Hollow{type(own).__name__}", (type(own), HollowBackend), {})
    hollow.spared = False
    made = copy.copy(processor)
    made.image_processor = hollow
    return made


class HollowBackend(PilBackend):
    """A Pillow backend for hollow images.

    Attributes:
        spared: Whether `resize` was called, and so saved work.
    """

    spared: bool

    def process_image(self, image: Any, *_: Any, **__: Any) -> npt.NDArray[Any]:
        """Move the channels to the front."""
        return np.moveaxis(image, -1, 0)

    def resize(self, image: npt.NDArray[Any], size: Any, *_: Any, **__: Any) -> npt.NDArray[Any]:
        """Return an image of the size that the backend would resize to."""
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
            raise ValueError("height and width must be > 0")  # Pillow's message
        return np.broadcast_to(image.dtype.type(0), (image.shape[0], *found))

    def rescale(self, image: npt.NDArray[Any], *_: Any, **__: Any) -> npt.NDArray[np.float32]:
        """Return an image with the type of a rescaled or normalized one."""
        return np.broadcast_to(np.float32(0), image.shape)

    normalize = rescale
