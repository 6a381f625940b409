"""Positions of prompts with images, and places of patches in their image.

Mrope positions are computed by the model's own code, without an instance of the model: `get_rope_index` uses only the
configuration and one other method of its instance. The generate worker has no whole model (it lacks the vision tower),
so the method is called on a stand-in with just these two.

Pruned tokens keep no place in the prompt, but leave a gap in the positions: those of other tokens are as if nothing was
pruned. Only a frame group without any token, whose timestamp is left out as well, leaves no gap in text positions.

Generated tokens continue after the last prompt token, as in transformers' `generate`. The delta that the model returns
is that of the largest position instead, which may be one of a video: prompt text after a video continues after its
longer spatial side, although its temporal positions may be larger.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
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
    whole = _unpruned(length, items)
    options: dict[str, Any] = {}
    if whole.images:
        options["image_grid_thw"] = torch.tensor(whole.images, dtype=torch.int64)
    if whole.videos:
        options["video_grid_thw"] = torch.tensor(whole.videos, dtype=torch.int64)
        options["second_per_grid_ts"] = torch.tensor(whole.seconds, dtype=torch.float32)
    kinds = torch.from_numpy(whole.kinds[None])
    found, _ = model_class.get_rope_index(stand_in, torch.zeros_like(kinds), kinds, **options)
    positions = np.ascontiguousarray(found[:, 0].numpy()[:, whole.columns])
    return positions, int(positions[:, -1].max()) + 1 - length


def kept_rows(place: ItemPlace) -> npt.NDArray[np.int64]:
    """Return the numbers of an item's rows that have placeholders."""
    if not place.kept:
        return np.arange(place.tokens)
    return np.concatenate([np.arange(start, stop) for start, stop in place.kept])


@dataclass(slots=True)
class _Unpruned:
    """The tokens of a prompt as they were before pruning, and of groups that were left out before kept ones.

    Attributes:
        kinds: The kind of each: 0 for text, 1 for images, 2 for videos.
        columns: The index of each token of the pruned prompt.
        images: The grid of each image.
        videos: The grid of each video; `seconds` are those per group.
    """

    kinds: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    images: list[tuple[int, int, int]]
    videos: list[tuple[int, int, int]]
    seconds: list[float]


def _unpruned(length: int, items: Items) -> _Unpruned:
    kinds: list[npt.NDArray[np.int64]] = []
    columns: list[npt.NDArray[np.int64]] = []
    images: list[tuple[int, int, int]] = []
    videos: list[tuple[int, int, int]] = []
    seconds: list[float] = []
    at = whole = 0
    for place in items:
        text = place.offset - at
        kinds.append(np.zeros(text, np.int64))
        columns.append(whole + np.arange(text))
        whole += text
        frames, rows, sides = grid_of(place.metadata)
        time = time_of(place.metadata)
        if time is None:
            images.append((frames, rows, sides))
            groups = 1
        else:
            index, interval = time
            if not index:
                videos.append((0, rows, sides))
                seconds.append(interval)
            groups = index + 1 - videos[-1][0]
            videos[-1] = (index + 1, rows, sides)
        kinds.append(np.full(groups * place.tokens, 1 if time is None else 2, np.int64))
        whole += groups * place.tokens
        columns.append(whole - place.tokens + kept_rows(place))
        at = place.runs[-1][1]
    kinds.append(np.zeros(length - at, np.int64))
    columns.append(whole + np.arange(length - at))
    return _Unpruned(np.concatenate(kinds), np.concatenate(columns), images, videos, seconds)


Grid = tuple[int, int, int]
"""Frames, and rows and columns of patches."""


def patch_places(sizes: Sequence[Grid], merge: int) -> npt.NDArray[np.int64]:
    """Return the row and column of each patch of all images, [patches, 2], patches of a token together."""
    places = []
    for frames, rows, columns in sizes:
        grid = np.moveaxis(np.indices((rows, columns)), 0, -1)
        cut = grid.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
        places.append(np.tile(cut.reshape(-1, 2), (frames, 1)))
    return np.concatenate(places)


def frame_lengths(sizes: Sequence[Grid]) -> list[int]:
    """Return the number of patches of each frame of all images."""
    return [rows * columns for frames, rows, columns in sizes for _ in range(frames)]


def window_order(
    sizes: Sequence[Grid], merge: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens of all images, window by window, and the number of tokens of each window.

    A window has `side` tokens in each direction, or fewer at the right and lower edges of an image.
    """
    orders, counts, first = [], [], 0
    for frames, rows, columns in sizes:
        high, wide = rows // merge, columns // merge
        down, across = -(-high // side), -(-wide // side)
        one = (np.arange(high) // side * across)[:, None] + np.arange(wide) // side
        window = ((np.arange(frames) * down * across)[:, None, None] + one).reshape(-1)
        orders.append(first + np.argsort(window, kind="stable"))
        counts.append(np.bincount(window))
        first += len(window)
    return np.concatenate(orders), np.concatenate(counts)
