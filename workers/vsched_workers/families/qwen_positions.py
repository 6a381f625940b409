"""Mrope positions by the model's own code, without an instance of the model.

Generated tokens continue after the last prompt token, as in transformers' `generate`. The delta that the model returns
is that of the largest position instead, which may be one of a video: prompt text after a video continues after its
longer spatial side, although its temporal positions may be larger.

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
from vsched_workers.families.qwen_image import grid_of, time_of

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
    grids: list[tuple[int, int, int]] = []
    videos: list[tuple[int, int, int]] = []
    seconds: list[float] = []
    for place in items:
        frames, rows, columns = grid_of(place.metadata)
        time = time_of(place.metadata)
        kinds[0, place.offset : place.offset + place.tokens] = 1 if time is None else 2
        if time is None:
            grids.append((frames, rows, columns))
        elif time[0]:
            videos[-1] = (videos[-1][0] + frames, rows, columns)
        else:
            videos.append((frames, rows, columns))
            seconds.append(time[1])
    options: dict[str, Any] = {}
    if grids:
        options["image_grid_thw"] = torch.tensor(grids, dtype=torch.int64)
    if videos:
        options["video_grid_thw"] = torch.tensor(videos, dtype=torch.int64)
        options["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float32)
    found, _ = model_class.get_rope_index(
        stand_in,
        torch.from_numpy(token_ids[None].astype(np.int64)),
        torch.from_numpy(kinds),
        **options,
    )
    positions = np.ascontiguousarray(found[:, 0].numpy())
    return positions, int(positions[:, -1].max()) + 1 - length
