"""Attention of many rows on the CPU for bfloat16: tiles of keys, an online softmax, no mask.

torch's fused kernel spends most of its time on the exponential, and reads a mask as large as the scores. Here the
products go to oneDNN, which multiplies bfloat16 at twice the rate of float32, the exponential is a power of two (the
factor goes into the product before it), and a tile of scores stays in the cache until `kernels/softmax.py` has made
weights of it. Rows are cut into blocks, and a block of a chunk is multiplied with those keys of the chunk only that one
of its rows sees.

oneDNN compiles a product for every shape that it meets, and keeps what it compiled (see `modules.py`). So rows,
tiles and batches come in a few sizes.

Scores are rounded to bfloat16 between the product and the softmax, as transformers' own eager attention rounds them;
`generate.attention = "exact"` keeps torch's kernel, which does not.

Prior art: FlashAttention (NeurIPS 2022) for the online softmax.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from vsched_workers.backends.cpu.kernels import softmax as softmax_kernels
from vsched_workers.backends.cpu.kernels.softmax import LOWEST

if TYPE_CHECKING:
    from vsched_workers.batching.paged_attention import PagedStep, Segment

TILE_SCORES = 1 << 19
"""Scores of a tile: 1 MiB, which the second level of cache holds."""
TILE_KEYS_MIN, TILE_KEYS_MAX = 512, 2048
TILE_PARTS = 4
"""The last tile is filled up to a whole number of such parts of a tile."""
TILE_PART_STEP = 32
BLOCK = 128
"""Rows of a chunk that are computed at once."""
FEW_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, BLOCK)
"""Numbers of rows that a small chunk is filled up to; the last block of a larger one comes in `BLOCK_PART`s."""
BLOCK_PART = 32
WINDOW_ROWS = (16, 32, 64)
"""Sequences up to the last of these are computed many at a time."""
WINDOWS = (16, 8, 4, 2, 1)
IMAGE_ROWS = (64, 128, 256)
IMAGE_KEYS, IMAGE_KEYS_PART = 1024, 256
PARALLEL_SCORES_MIN = 1 << 14
"""Waking threads takes as long as so many scores."""
_LOG2_E = 1 / math.log(2)


class _Block:
    """Rows that see the same keys, and the online softmax over the tiles that they have seen.

    Shape: query [batch, rows, head dim]; highest and total float32 [batch * rows]; summed float32 [batch * rows,
    head dim].
    """

    def __init__(self, query: torch.Tensor, period: int, scaling: float) -> None:
        self._query = query
        self._period = period
        self._factor = scaling * _LOG2_E
        batch, rows, head_dim = query.shape
        self._highest = np.full(batch * rows, LOWEST, dtype=np.float32)
        self._total = np.zeros(batch * rows, dtype=np.float32)
        self._summed = torch.zeros(batch * rows, head_dim)

    def add(self, keys: torch.Tensor, values: torch.Tensor, seen: int, *, more: int = 0) -> None:
        """Attend to a tile [batch, keys, head dim]: the first row sees `seen` of it, and each one after it `more`."""
        scores = torch.baddbmm(
            self._query.new_empty(1), self._query, keys.transpose(1, 2), beta=0, alpha=self._factor
        )
        many = torch.get_num_threads() > 1 and scores.numel() >= PARALLEL_SCORES_MIN
        (softmax_kernels.soften_parallel if many else softmax_kernels.soften)(
            scores.data_ptr(),
            scores.shape[2],
            seen,
            more,
            self._period,
            self._highest,
            self._total,
            self._summed.numpy(),
        )
        self._summed += torch.bmm(scores, values).view(self._summed.shape)

    def attended(self) -> torch.Tensor:
        """Return what the rows make of all tiles, [batch, rows, head dim]."""
        mean = self._summed.div_(torch.from_numpy(self._total)[:, None])
        return mean.to(self._query.dtype).view(self._query.shape)


def prefill_by_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend block by block of the chunk, and tile by tile of the context before it."""
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    earlier = segment.slots()[: segment.first] if segment.first else None
    return attend_chunk(query, key, value, keys, values, earlier, scaling)


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    slots: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attend for the rows of one chunk to what came before them and, causally, to one another.

    Shape: query [heads, rows, head dim]; key and value of the chunk [kv heads, rows, head dim]; the cache
    [slots, kv heads, head dim]; `slots` int64 says where the tokens before the chunk lie, if there are any.
    Returns [heads, rows, head dim].
    """
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    # What rows are filled up with comes after all others, so no row that counts sees it.
    query, key, value = (_filled(one, _chunk_rows(rows)) for one in (query, key, value))
    padded = query.shape[1]
    by_kv_head = query.view(kv_heads, -1, padded, head_dim)
    blocks = []
    for start in range(0, padded, BLOCK):
        stop = min(start + BLOCK, padded)
        # The query heads that share a key head become its rows, so that no key is repeated.
        block = _Block(by_kv_head[:, :, start:stop].flatten(1, 2), stop - start, scaling)
        block.add(key[:, :stop], value[:, :stop], start + 1, more=1)
        blocks.append(block)
    size = TILE_SCORES // (heads * min(padded, BLOCK))
    size = min(max(size, TILE_KEYS_MIN), TILE_KEYS_MAX)
    size -= size % (TILE_PARTS * TILE_PART_STEP)  # a whole tile is not filled up
    for tile in () if slots is None else slots.split(size):
        missing = -len(tile) % max(size // TILE_PARTS, 1)
        filled = torch.cat([tile, tile[-1:].expand(missing)]) if missing else tile
        keys = cached_keys.index_select(0, filled).transpose(0, 1)
        values = cached_values.index_select(0, filled).transpose(0, 1)
        for block in blocks:
            block.add(keys, values, len(tile))
    parts = [one.attended().view(heads, -1, head_dim) for one in blocks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :rows]


def _chunk_rows(rows: int) -> int:
    """Return the number of rows that so many of a chunk are filled up to."""
    if rows > BLOCK:
        return -(-rows // BLOCK_PART) * BLOCK_PART
    return FEW_ROWS[bisect.bisect_left(FEW_ROWS, rows)]


def attend_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, out: torch.Tensor
) -> None:
    """Attend within each of some sequences of one length, every row to all rows of its own.

    Shape: query, key, value [heads, sequences, rows, head dim]; `out`, which is written, is
    [sequences, rows, heads, head dim].
    """
    rows = query.shape[2]
    if rows <= WINDOW_ROWS[-1]:
        for part in _cut(query.shape[1], WINDOWS):
            attended = _attend_windows(query[:, part], key[:, part], value[:, part], scaling)
            out[part] = attended.permute(1, 2, 0, 3)
        return
    for index in range(query.shape[1]):
        for part, attended in _attend_image(
            query[:, index], key[:, index], value[:, index], scaling
        ):
            out[index, part] = attended.transpose(0, 1)


def _cut(count: int, sizes: tuple[int, ...]) -> Iterator[slice]:
    """Cut a range into pieces of the given sizes, the largest first; the smallest is one."""
    start = 0
    while start < count:
        size = next(size for size in sizes if size <= count - start)
        yield slice(start, start + size)
        start += size


def _attend_windows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attend within short sequences, all at once: [heads, sequences, rows, head dim]."""
    heads, number, rows, head_dim = query.shape
    size = WINDOW_ROWS[bisect.bisect_left(WINDOW_ROWS, rows)]
    query, key, value = (_filled(each.flatten(0, 1), size) for each in (query, key, value))
    block = _Block(query, size, scaling)
    block.add(key, value, rows)
    return block.attended().view(heads, number, size, head_dim)[:, :, :rows]


def _attend_image(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Attend within one long sequence [heads, rows, head dim]; yields parts of its rows and what they made."""
    rows = query.shape[1]
    tiles = [
        (_filled(keys, width), _filled(values, width), keys.shape[1])
        for keys, values in zip(key.split(IMAGE_KEYS, 1), value.split(IMAGE_KEYS, 1), strict=True)
        for width in (-(-keys.shape[1] // IMAGE_KEYS_PART) * IMAGE_KEYS_PART,)
    ]
    for start in range(0, rows, IMAGE_ROWS[-1]):
        part = slice(start, min(start + IMAGE_ROWS[-1], rows))
        count = part.stop - start
        size = IMAGE_ROWS[bisect.bisect_left(IMAGE_ROWS, count)]
        block = _Block(_filled(query[:, part], size), size, scaling)
        for keys, values, seen in tiles:
            block.add(keys, values, seen)
        yield part, block.attended()[:, :count]


def _filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Fill up the rows [batch, rows, head dim] with zeros."""
    missing = size - rows.shape[1]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
