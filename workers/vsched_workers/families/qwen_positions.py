"""Mrope positions by the model's own code, without an instance of the model.

`get_rope_index` uses only the configuration and one other method of its instance. The generate worker has no whole
model (it lacks the vision tower), so the method is called on a stand-in with just these two.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vsched.types import ItemPlace
from vsched_workers.families.qwen_image import grid_of

Items = Sequence[ItemPlace]


def rope_positions(
    model_class: Any, config: Any, token_ids: npt.NDArray[np.int32], items: Items
) -> tuple[npt.NDArray[np.int64], int]:
    """Return positions, int64 [3, tokens], and the delta to add to a later token's index.

    The items, not the token ids, determine the places of images: a model may sample a placeholder token.
    """
    length = len(token_ids)
    if not items:
        return np.broadcast_to(np.arange(length, dtype=np.int64), (3, length)), 0

    import torch  # Here and below in this package: inspection stays torch-free.

    stand_in = types.SimpleNamespace(config=config)
    stand_in.get_vision_position_ids = functools.partial(
        model_class.get_vision_position_ids, stand_in
    )
    kinds = np.zeros((1, length), dtype=np.int64)
    for place in items:
        kinds[0, place.offset : place.offset + place.tokens] = 1
    positions, delta = model_class.get_rope_index(
        stand_in,
        torch.from_numpy(token_ids[None].astype(np.int64)),
        torch.from_numpy(kinds),
        image_grid_thw=torch.tensor(
            [grid_of(place.metadata) for place in items], dtype=torch.int64
        ),
    )
    return np.ascontiguousarray(positions[:, 0].numpy()), int(delta.item())
