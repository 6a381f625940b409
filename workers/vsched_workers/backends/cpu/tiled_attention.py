"""bfloat16 attention of many rows on a CPU with oneDNN's products: tiles of keys, online softmax, no mask.

torch's fused kernel spends most of its time on the exponential, and reads a mask as large as the scores. Here oneDNN
computes the products, with bfloat16 at twice the rate of float32, the exponential is a power of two (its factor is
part of the product before it), and a tile of scores stays in the cache until `kernels/softmax.py` has replaced it by
weights. Rows are split into blocks, and a block of a chunk is multiplied only by keys of the chunk that are visible
to one of its rows.

oneDNN compiles a product for every shape and memory layout, and caches the code: 1 to 1.5 MiB each with AMX. So rows,
tiles and batches are padded to a few sizes, operands have one layout, and the products for images are compiled at
load, before memory is distributed.

Scores are rounded to bfloat16 between product and softmax, as in transformers' eager attention; `generate.attention =
"exact"` keeps torch's kernel, which does not round them.

On a processor without bfloat16 support in oneDNN, torch's own bfloat16 product takes 12 to 20 times as long as
float32. There the operands of each product are widened; everything else is the same.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from vsched_workers.backends.cpu.kernels.softmax import (
    SCORE_MIN,
    OnlineSoftmax,
    softmax_tile,
)
from vsched_workers.backends.cpu.threads import process_pool
from vsched_workers.backends.reference.packed_weights import packs
from vsched_workers.batching.kv_cache import LayerKv
from vsched_workers.memory.sparse_runs import pieces

if TYPE_CHECKING:
    from vsched_workers.batching.paged_attention import PagedStep, Segment

TILE_SCORES = 1 << 19
"""Scores of a tile: 1 MiB, which fits into the L2 cache."""
TILE_KEYS_MIN, TILE_KEYS_MAX = 512, 2048
TILE_PARTS = 4
"""The last tile is padded to a multiple of this fraction of a tile."""
TILE_PART_STEP = 32
BLOCK = 128
"""Rows of a chunk that are computed at once."""
FEW_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, BLOCK)
"""Padded row numbers of small chunks; the last block of a larger one is padded to a multiple of `BLOCK_PART`."""
BLOCK_PART = 64
WINDOW_ROWS = (16, 32, 64)
"""Sequences up to the last of these sizes are batched."""
WINDOWS = (16, 8, 4, 2, 1)
IMAGE_ROWS = (64, 128, 256)
IMAGE_KEYS, IMAGE_KEYS_PART = 1024, 256
_LOG2_E = 1 / math.log(2)


class _TiledRows:
    """Rows that see the same keys, and their online softmax over the tiles so far.

    Shape: query [batch, rows, head_dim]; highest and total float32 [batch * rows]; summed float32
    [batch * rows, head_dim].
    """

    def __init__(self, query: torch.Tensor, period: int, scaling: float) -> None:
        self._query = query.contiguous()
        self._period = period
        self._factor = scaling * _LOG2_E
        batch, rows, head_dim = query.shape
        self._summed = torch.zeros(batch * rows, head_dim)
        self._softmax = OnlineSoftmax(
            highest=np.full(batch * rows, SCORE_MIN, dtype=np.float32),
            total=np.zeros(batch * rows, dtype=np.float32),
            summed=self._summed.numpy(),
        )

    def add(self, keys: torch.Tensor, values: torch.Tensor, seen: int, *, step: int = 0) -> None:
        """Attend to a tile [batch, keys, head_dim]: the first row sees `seen` keys, each further row `step` more."""
        scores = _scaled_product(self._query, keys.contiguous().transpose(1, 2), self._factor)
        softmax_tile(
            process_pool().state_at,
            scores.data_ptr(),
            scores.shape[2],
            seen,
            step,
            self._period,
            self._softmax,
        )
        self._summed += _product(scores, values.contiguous()).view(self._summed.shape)

    def attended(self) -> torch.Tensor:
        """Return the attention output over all tiles, [batch, rows, head_dim]."""
        mean = self._summed.div_(torch.from_numpy(self._softmax.total)[:, None])
        return mean.to(self._query.dtype).view(self._query.shape)


def _scaled_product(query: torch.Tensor, keys: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply queries [batch, rows, head_dim] by keys [batch, head_dim, keys], scale and round."""
    dtype = query.dtype
    if not packs(dtype):
        query, keys = query.float(), keys.float()
    return torch.baddbmm(query.new_empty(1), query, keys, beta=0, alpha=factor).to(dtype)


def _product(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply weights [batch, rows, keys] by values [batch, keys, head_dim]."""
    if not packs(weights.dtype):
        return torch.bmm(weights.float(), values.float())
    return torch.bmm(weights, values)


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend block by block of the chunk, and tile by tile of the context before it."""
    earlier = segment.slots()[: segment.first] if segment.first else None
    return attend_chunk(query, key, value, step.cache.layers[layer], earlier, scaling)


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: LayerKv,
    slots: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attend for the rows of one chunk to the context before it and, causally, to the chunk.

    Shape: query [heads, rows, head_dim]; key and value of the chunk [kv heads, rows, head_dim]; `slots` int64, the
    slots of the tokens before the chunk, if any. Returns [heads, rows, head_dim].
    """
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    # Padding follows all other rows, so under the causal mask no real row sees it.
    query, key, value = (_padded(one, _chunk_rows(rows)) for one in (query, key, value))
    padded = query.shape[1]
    by_kv_head = query.view(kv_heads, -1, padded, head_dim)
    blocks = []
    for start in range(0, padded, BLOCK):
        stop = min(start + BLOCK, padded)
        # The query heads that share a KV head become its rows, so no key is repeated.
        block = _TiledRows(by_kv_head[:, :, start:stop].flatten(1, 2), stop - start, scaling)
        block.add(key[:, :stop], value[:, :stop], start + 1, step=1)
        blocks.append(block)
    size = TILE_SCORES // (heads * min(padded, BLOCK))
    size = min(max(size, TILE_KEYS_MIN), TILE_KEYS_MAX)
    size -= size % (TILE_PARTS * TILE_PART_STEP)  # a whole tile is not padded
    for tile in () if slots is None else pieces(slots.split(size)):
        missing = -len(tile) % max(size // TILE_PARTS, 1)
        whole = torch.cat([tile, tile[-1:].expand(missing)]) if missing else tile
        keys, values = (each.transpose(0, 1) for each in kept.read(whole, query.dtype))
        for block in blocks:
            block.add(keys, values, len(tile))
    parts = [one.attended().view(heads, -1, head_dim) for one in blocks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :rows]


def _chunk_rows(rows: int) -> int:
    """Number of rows to which the rows of a chunk are padded."""
    if rows > BLOCK:
        return -(-rows // BLOCK_PART) * BLOCK_PART
    return FEW_ROWS[bisect.bisect_left(FEW_ROWS, rows)]


def attend_patches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, out: torch.Tensor
) -> None:
    """Attend within each of several sequences of one length, without a mask.

    Shape: query, key, value [heads, sequences, rows, head_dim]; writes `out` [sequences, rows, heads, head_dim].
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


def warm_up_patches(heads: int, head_dim: int) -> None:
    """Compile everything that `attend_patches` needs for this number of heads and head dimension."""
    shapes = [(heads, rows, width) for rows in IMAGE_ROWS for width in _image_widths()]
    shapes += [(number * heads, rows, rows) for number in WINDOWS for rows in WINDOW_ROWS]
    for batch, rows, width in shapes:
        block = _TiledRows(_zeros(batch, rows, head_dim), rows, 1.0)
        block.add(_zeros(batch, width, head_dim), _zeros(batch, width, head_dim), width)


def _image_widths() -> range:
    """Possible numbers of keys in a tile of an image."""
    return range(IMAGE_KEYS_PART, IMAGE_KEYS + 1, IMAGE_KEYS_PART)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _cut(count: int, sizes: tuple[int, ...]) -> Iterator[slice]:
    """Split a range into pieces of the given sizes, the largest first; the smallest is one."""
    start = 0
    while start < count:
        size = next(size for size in sizes if size <= count - start)
        yield slice(start, start + size)
        start += size


def _attend_windows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attend within short sequences, all at once: [heads, sequences, rows, head_dim]."""
    heads, number, rows, head_dim = query.shape
    size = WINDOW_ROWS[bisect.bisect_left(WINDOW_ROWS, rows)]
    query, key, value = (_padded(each.flatten(0, 1), size) for each in (query, key, value))
    block = _TiledRows(query, size, scaling)
    block.add(key, value, rows)
    return block.attended().view(heads, number, size, head_dim)[:, :, :rows]


def _attend_image(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Attend within one long sequence [heads, rows, head_dim]; yields slices of its rows and their outputs."""
    rows = query.shape[1]
    tiles = [
        (_padded(keys, width).contiguous(), _padded(values, width).contiguous(), keys.shape[1])
        for keys, values in zip(key.split(IMAGE_KEYS, 1), value.split(IMAGE_KEYS, 1), strict=True)
        for width in (-(-keys.shape[1] // IMAGE_KEYS_PART) * IMAGE_KEYS_PART,)
    ]
    for start in pieces(range(0, rows, IMAGE_ROWS[-1])):
        part = slice(start, min(start + IMAGE_ROWS[-1], rows))
        count = part.stop - start
        size = IMAGE_ROWS[bisect.bisect_left(IMAGE_ROWS, count)]
        block = _TiledRows(_padded(query[:, part], size), size, scaling)
        for keys, values, seen in pieces(tiles):
            block.add(keys, values, seen)
        yield part, block.attended()[:, :count]


def _padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Pad rows [batch, rows, head_dim] with zeros."""
    missing = size - rows.shape[1]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
