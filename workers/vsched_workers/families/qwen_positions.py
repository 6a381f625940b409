"""Positions of prompts with images, and places of patches in their image.

Pruned tokens keep no place in the prompt, but leave a gap in the positions: those of other tokens are as if nothing was
pruned. Only a frame group without any token, whose timestamp is left out as well, leaves no gap in text positions.

Generated tokens continue after the last prompt token, as in transformers' `generate`. That need not be the largest
position, which may be one of a video: prompt text after a video continues after its longer spatial side, although its
temporal positions may be larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vsched.types import ItemPlace
from vsched_workers.families.qwen_image import grid_of, time_of

Items = Sequence[ItemPlace]


def mrope_positions(
    length: int, items: Items, *, merge: int, per_second: float
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the positions of a prompt, int64 [3, length], and the delta to add to a later token's index.

    Text advances all axes by one per token. An image starts at the position after the text before it: the axes of its
    tokens are frame, row and column, and what follows starts after the longest of its sides. The frame groups of a
    video start at the same position, `per_second` times their time later on the first axis, and what follows starts
    after the longest of the spatial sides; groups with timestamps between them are images. Generated tokens follow the
    last token. The items, not the token ids, determine the places: a model may sample a placeholder token.
    """
    positions = np.empty((3, length), dtype=np.int64)
    following = at = 0
    for place in items:
        text = place.offset - at
        positions[:, at : place.offset] = following + np.arange(text)
        following += text
        frames, rows, columns = grid_of(place.metadata)
        sides = (frames, rows // merge, columns // merge)
        at = place.runs[-1][1]
        longest = max(sides[1:])
        time = time_of(place.metadata)
        if time is not None and time[0]:
            following -= longest
        axes = np.indices(sides).reshape(3, -1)
        positions[:, place.offset : at] = following + axes[:, _kept_rows(place)]
        if time is not None:
            # In float32 like the model's own code.
            interval = np.float32(per_second) * np.float32(time[1])
            positions[0, place.offset : at] += int(np.float32(time[0]) * interval)
        following += longest
    positions[:, at:] = following + np.arange(length - at)
    return positions, int(positions[:, -1].max()) + 1 - length


def _kept_rows(place: ItemPlace) -> npt.NDArray[np.int64]:
    """Return the numbers of an item's rows that have placeholders."""
    if not place.kept:
        return np.arange(place.tokens)
    return np.concatenate([np.arange(start, stop) for start, stop in place.kept])


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
