"""Places of patches in their image, and the order of tokens by the windows that vision attention of Qwen2.5-VL uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
