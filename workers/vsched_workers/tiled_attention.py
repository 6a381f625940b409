"""Prefill attention on the CPU for bfloat16: tiles of keys, an online softmax, no mask but on the diagonal.

torch's fused kernel spends more time on the exponential than on the two products, and reads a mask as large as the
scores. Here the products go to oneDNN, which multiplies bfloat16 at twice the rate of float32, the exponential is a
power of two (the factor goes into the product before it), and a tile of scores stays in the cache. Only the tile of the
chunk with itself needs a mask; all earlier tokens are seen by all rows.

oneDNN compiles a product for every shape that it meets, and keeps what it compiled (see `cpu_modules.py`). So rows and
tiles are filled up to a few sizes.

Scores are rounded to bfloat16 between the product and the softmax, as transformers' own eager attention rounds them;
`generate.attention = "exact"` keeps torch's kernel, which does not.

Prior art: FlashAttention (NeurIPS 2022) for the online softmax.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import torch
from torch.nn import functional

TILE_SCORES = 1 << 19
"""Scores of a tile: 2 MiB in float32, which the second level of cache holds about half of."""
TILE_KEYS_MIN, TILE_KEYS_MAX = 512, 2048
TILE_PARTS = 4
"""The last tile is filled up to a whole number of such parts of a tile."""
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows of a chunk that is computed; larger ones are multiples of the last."""
_LOG2_E = 1 / math.log(2)


@dataclass(slots=True)
class _Softmax:
    """An online softmax over tiles: highest score and sum of each row, and the values summed by weight.

    Shape: highest and total float32 [kv heads, rows, 1]; summed float32 [kv heads, rows, head dim].
    """

    highest: torch.Tensor
    total: torch.Tensor
    summed: torch.Tensor

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Add a tile: scores float32 [kv heads, rows, keys], which are overwritten; values [kv heads, keys, dim]."""
        highest = torch.maximum(self.highest, scores.amax(-1, keepdim=True))
        fading = (self.highest - highest).exp2_()
        weights = scores.sub_(highest).exp2_()
        self.highest = highest
        self.total.mul_(fading).add_(weights.sum(-1, keepdim=True))
        self.summed.mul_(fading).add_(torch.bmm(weights.to(values.dtype), values))


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend for the rows of one chunk to what came before them and, causally, to one another.

    Shape: query [heads, rows, head dim]; key and value of the chunk [kv heads, rows, head dim]; the cache
    [slots, kv heads, head dim]; `slots` int64 says where the tokens before the chunk lie.
    Returns [heads, rows, head dim].
    """
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    padded = _filled(rows)
    if padded > rows:
        more = (0, 0, 0, padded - rows)
        query, key, value = (functional.pad(one, more) for one in (query, key, value))
    # The query heads that share a key head become its rows, so that no key is repeated.
    grouped = query.reshape(kv_heads, -1, head_dim)
    state = _Softmax(
        highest=torch.full((*grouped.shape[:2], 1), -math.inf),
        total=torch.zeros(*grouped.shape[:2], 1),
        summed=torch.zeros(grouped.shape),
    )
    scores = _scores(grouped, key, scaling)
    # What rows and keys were filled up with comes after all others, so no row that counts sees it.
    future = torch.ones(padded, padded, dtype=torch.bool).triu_(1)
    scores.view(kv_heads, -1, padded, padded).masked_fill_(future, -math.inf)
    state.add(scores, value)
    size = min(max(TILE_SCORES // grouped.shape[1], TILE_KEYS_MIN), TILE_KEYS_MAX)
    for tile in slots.split(size):
        missing = -len(tile) % max(size // TILE_PARTS, 1)
        filled = torch.cat([tile, tile[-1:].expand(missing)]) if missing else tile
        keys = cached_keys.index_select(0, filled).transpose(0, 1)
        values = cached_values.index_select(0, filled).transpose(0, 1)
        scores = _scores(grouped, keys, scaling)
        scores[..., len(tile) :] = -math.inf
        state.add(scores, values)
    attended = state.summed.div_(state.total).to(query.dtype).view(heads, padded, head_dim)
    return attended[:, :rows]


def _filled(rows: int) -> int:
    """Return the number of rows that so many are filled up to."""
    if rows > ROWS[-1]:
        return -(-rows // ROWS[-1]) * ROWS[-1]
    return ROWS[bisect.bisect_left(ROWS, rows)]


def _scores(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the scores as powers of two, float32 [kv heads, rows, keys]."""
    products = torch.baddbmm(
        query.new_empty(1), query, key.transpose(1, 2), beta=0, alpha=scaling * _LOG2_E
    )
    return products.float()
