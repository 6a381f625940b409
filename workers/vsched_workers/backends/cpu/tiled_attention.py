"""Attention of many rows on the CPU for bfloat16 with oneDNN's products: tiles of keys, an online softmax, no mask.

torch's fused kernel spends most of its time on the exponential, and reads a mask as large as the scores. Here the
products go to oneDNN, which multiplies bfloat16 at twice the rate of float32, the exponential is a power of two (the
factor goes into the product before it), and a tile of scores stays in the cache until `kernels/softmax.py` has replaced
it by weights. Rows are cut into blocks, and a block of a chunk is multiplied only with those keys of the chunk that one
of its rows sees.

oneDNN compiles a product for every shape that it meets, and for operands that lie otherwise, and keeps what it
compiled: 1 to 1.5 MiB each with AMX. So rows, tiles and batches come in a few sizes, operands lie in one way, and what
images need is compiled on loading, before memory is shared out.

Scores are rounded to bfloat16 between the product and the softmax, as transformers' own eager attention rounds them;
`generate.attention = "exact"` keeps torch's kernel, which does not.

On a processor for which oneDNN has no product of bfloat16, torch's own takes 12 to 20 times as long as one of float32.
There the operands of each product are widened, and nothing else differs.
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
"""Scores of a tile: 1 MiB, which the second level of cache holds."""
TILE_KEYS_MIN, TILE_KEYS_MAX = 512, 2048
TILE_PARTS = 4
"""The last tile is padded to a whole number of such parts of a tile."""
TILE_PART_STEP = 32
BLOCK = 128
"""Rows of a chunk that are computed at once."""
FEW_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, BLOCK)
"""Numbers of rows that a small chunk is padded to; the last block of a larger one comes in `BLOCK_PART`s."""
BLOCK_PART = 64
WINDOW_ROWS = (16, 32, 64)
"""Sequences up to the last of these are computed many at a time."""
WINDOWS = (16, 8, 4, 2, 1)
IMAGE_ROWS = (64, 128, 256)
IMAGE_KEYS, IMAGE_KEYS_PART = 1024, 256
_LOG2_E = 1 / math.log(2)


class _TiledRows:
    """Rows that see the same keys, and the online softmax over the tiles that they have seen.

    Shape: query [batch, rows, head dim]; highest and total float32 [batch * rows]; summed float32 [batch * rows,
    head dim].
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
        """Attend to a tile [batch, keys, head dim]: the first row sees `seen` of it, each further one `step` more."""
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
        """Return what the rows make of all tiles, [batch, rows, head dim]."""
        mean = self._summed.div_(torch.from_numpy(self._softmax.total)[:, None])
        return mean.to(self._query.dtype).view(self._query.shape)


def _scaled_product(query: torch.Tensor, keys: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the products of queries [batch, rows, head dim] and keys [batch, head dim, keys], scaled and rounded."""
    dtype = query.dtype
    if not packs(dtype):
        query, keys = query.float(), keys.float()
    return torch.baddbmm(query.new_empty(1), query, keys, beta=0, alpha=factor).to(dtype)


def _product(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the products of weights [batch, rows, keys] and values [batch, keys, head dim]."""
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
    """Attend for the rows of one chunk to what came before them and, causally, to one another.

    Shape: query [heads, rows, head dim]; key and value of the chunk [kv heads, rows, head dim]; `slots` int64 says
    where the tokens before the chunk lie, if there are any. Returns [heads, rows, head dim].
    """
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    # Padding comes after all other rows, so no row that counts sees it.
    query, key, value = (_padded(one, _chunk_rows(rows)) for one in (query, key, value))
    padded = query.shape[1]
    by_kv_head = query.view(kv_heads, -1, padded, head_dim)
    blocks = []
    for start in range(0, padded, BLOCK):
        stop = min(start + BLOCK, padded)
        # The query heads that share a key head become its rows, so that no key is repeated.
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
    """Return the number of rows that the rows of a chunk are padded to."""
    if rows > BLOCK:
        return -(-rows // BLOCK_PART) * BLOCK_PART
    return FEW_ROWS[bisect.bisect_left(FEW_ROWS, rows)]


def attend_patches(
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


def warm_up_patches(heads: int, head_dim: int) -> None:
    """Compile all that `attend_patches` needs for heads of this number and size."""
    shapes = [(heads, rows, width) for rows in IMAGE_ROWS for width in _image_widths()]
    shapes += [(number * heads, rows, rows) for number in WINDOWS for rows in WINDOW_ROWS]
    for batch, rows, width in shapes:
        block = _TiledRows(_zeros(batch, rows, head_dim), rows, 1.0)
        block.add(_zeros(batch, width, head_dim), _zeros(batch, width, head_dim), width)


def _image_widths() -> range:
    """Return the numbers of keys that a tile of an image may have."""
    return range(IMAGE_KEYS_PART, IMAGE_KEYS + 1, IMAGE_KEYS_PART)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


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
    query, key, value = (_padded(each.flatten(0, 1), size) for each in (query, key, value))
    block = _TiledRows(query, size, scaling)
    block.add(key, value, rows)
    return block.attended().view(heads, number, size, head_dim)[:, :, :rows]


def _attend_image(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Attend within one long sequence [heads, rows, head dim]; yields parts of its rows and what they made."""
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
    """Pad rows [batch, rows, head dim] with zeros."""
    missing = size - rows.shape[1]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
