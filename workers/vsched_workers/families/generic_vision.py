"""Any other vision-language model in transformers: its properties, read from its configuration without torch.

Image features are computed by the model's `get_image_features`, and passed back to it as `mm_encoder_outputs`. So the
tower runs alone in the encode ranks, and the language model without it. Two conventions hold between them:

- The arrays of an image have the names of the keyword arguments of `get_image_features`. Small integer arrays among
  them (`image_grid_thw`, `image_sizes`) are an item's metadata, and not in the arena: positions and merging need them.
- The arrays of a frame group of a video are its pixels as bytes and the table of their values (`qwen_levels`). Features
  are those of `get_video_features` for a video of this group alone, or of `get_image_features` if there is no such
  method; only the first rows count, as a model may add rows after a video.
- A row of an embedding is `embedding_levels` times the hidden size of the language model: the token's embedding, then
  the features that are added in deeper layers (deepstack).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError, RequestRefused, limit_message
from vsched.worker.contract import Companion
from vsched_workers.families.generic import check_text, read_config, refusal

UNEQUAL: Mapping[str, str] = {
    "ovis2": "features of its tower for tokens of the text around an image",
}
"""Architectures whose output differs from transformers' `generate` in a comparison, with the reason."""

EMBEDDED_SIZE = Companion("image_size", ("height", "width in pixels"))
"""The companion of an embedding in requests: the size of its image, from which all else follows."""

EMBEDDED_PIXELS_MAX = 1 << 24
"""Maximum pixels of such an image: a blank one of its size may have to be processed."""

FIRST_POSITIONS: Mapping[str, int] = {"paligemma": 1}
"""Architectures whose positions do not start at 0."""

SEE_IN_IMAGES = frozenset({"gemma3", "gemma4"})
"""Architectures with bidirectional attention within an image, unless their text configuration disables it."""

SEE_IN_PROMPTS = frozenset({"paligemma"})
"""Architectures with bidirectional attention within a prompt."""

VIDEO_GRID = "video_grid_thw"
"""The name of a frame group's grid of patches: [1, 3], of time, height and width."""

METADATA_VALUES = 32
"""Maximum size of an integer array that is metadata of an image; larger ones are masks and indices."""


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """Properties of a vision-language model.

    Attributes:
        config: transformers' configuration object of the whole model; `text` is its language model's.
        image_token_id: The placeholder token of an image's rows.
        embedding_levels: Rows that the encoder computes per token: 1, plus one for each deepstack level.
        item_atomic: Whether attention is bidirectional within an image; `prompt_atomic`: within a whole prompt.
    """

    config: Any
    text: Any
    image_token_id: int
    embedding_levels: int
    item_atomic: bool = False
    prompt_atomic: bool = False


def takes_images(family: str) -> bool:
    """Return whether transformers has an architecture as an image-text-to-text model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def vision_facts(directory: Path, family: str) -> VisionFacts:
    """Return the properties of a vision-language model on the generic path from its configuration.

    Raises:
        CheckpointError: When it is not supported, with the reason.
    """
    config = read_config(directory, family)
    text = config.get_text_config()
    if family in UNEQUAL:
        raise refusal(family, UNEQUAL[family])
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise refusal(family, "an encoder for text, to which a decoder attends")
    if getattr(text, "cross_attention_layers", None):
        raise refusal(family, "layers that attend to images apart from the text (cross-attention)")
    check_text(text, family)
    stated = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((each for each in stated if isinstance(each, int)), None)
    if token is None:
        raise CheckpointError(
            "config.json: image_token_id is missing. Remedy: download the checkpoint again."
        )
    vision = getattr(config, "vision_config", None)
    if getattr(vision, "model_type", "") == "timm_wrapper":
        raise refusal(family, "a vision tower of the package timm")
    deepstack = getattr(vision, "deepstack_visual_indexes", None) or ()
    sees = getattr(text, "use_bidirectional_attention", "vision")
    return VisionFacts(
        config,
        text,
        token,
        1 + len(deepstack),
        item_atomic=family in SEE_IN_IMAGES and sees in ("vision", False),
        prompt_atomic=family in SEE_IN_PROMPTS,
    )


def first_position(family: str) -> int:
    """Return the position of a prompt's first token."""
    return FIRST_POSITIONS.get(family, 0)


def is_metadata(array: npt.NDArray[Any]) -> bool:
    """Return whether an array of an image is metadata: a small array of integers."""
    return array.dtype.kind in "iu" and array.size <= METADATA_VALUES


def embedded_size(companion: Sequence[int]) -> tuple[int, int]:
    """Return width and height of an image from the companion of its embedding.

    Raises:
        RequestRefused: When it has too many pixels.
    """
    height, width = companion
    if min(height, width) > 0 and height * width > EMBEDDED_PIXELS_MAX:
        message = limit_message(
            "the image of the embeddings has too many pixels",
            value=f"{width}x{height}",
            limit=f"{EMBEDDED_PIXELS_MAX} pixels",
            remedy="make the image smaller before it is encoded, or send the image itself",
        )
        raise RequestRefused(message, code="image_size_exceeded")
    return width, height


def pack_metadata(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return the small integer arrays of an image as metadata."""
    small = {
        name: (array.dtype.str, array.shape, array.tobytes())
        for name, array in sorted(arrays.items())
        if is_metadata(array)
    }
    return msgspec.msgpack.encode(small)


def unpack_metadata(metadata: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `pack_metadata` packed, read-only.

    Raises:
        msgspec.DecodeError: When it is no metadata.
    """
    packed = msgspec.msgpack.decode(metadata, type=dict[str, tuple[str, tuple[int, ...], bytes]])
    return {
        name: np.frombuffer(values, dtype=np.dtype(dtype)).reshape(shape)
        for name, (dtype, shape, values) in packed.items()
    }
