"""Packing of weights: transpose words of outputs into panels.

A word is a value, or the values of neighbouring inputs that a product reads together (`products.py` has diagrams).
torch takes twice as long, on one thread: 8 MiB of bfloat16 in 7 to 11 ms, this kernel 4.8 ms (Zen 3).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from vsched_workers.backends.cpu.kernels.compilation import LONG, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import spread

_LOW_NIBBLES = np.uint32(0x0F0F0F0F)
_TOGETHER = 8
"""Outputs whose words are read together: more would compete for the same lines of the cache."""


@compiled()
def _pack_panel(panel: int, rows: Any, panels: Any) -> None:
    width = panels.shape[2]
    of_panel = rows[panel * width : (panel + 1) * width]
    whole = len(of_panel) // _TOGETHER * _TOGETHER
    for start in range(0, whole, _TOGETHER):
        a, b, c, d = of_panel[start], of_panel[start + 1], of_panel[start + 2], of_panel[start + 3]
        e, f, g, h = (
            of_panel[start + 4],
            of_panel[start + 5],
            of_panel[start + 6],
            of_panel[start + 7],
        )
        to = panels[panel, :, start : start + _TOGETHER]
        for word in range(len(to)):
            to[word, 0], to[word, 1] = a[word], b[word]
            to[word, 2], to[word, 3] = c[word], d[word]
            to[word, 4], to[word, 5] = e[word], f[word]
            to[word, 6], to[word, 7] = g[word], h[word]
    for row in range(whole, len(of_panel)):
        panels[panel, :, row] = of_panel[row]


@kernel(LONG, None, None)
def pack(pool: int, rows: Any, panels: Any) -> None:
    """Pack outputs into panels; the rest of the last panel stays as it is.

    Shape: rows [outputs, words], panels [outputs / width, words, width], both of the same integer type.
    """
    spread(pool, len(panels), 1, _pack_panel, (rows, panels))


@compiled()
def _reorder_row(row: int, pairs: Any, words: Any) -> None:
    for place in range(pairs.shape[1]):
        pair = np.uint32(pairs[row, place])
        low, high = pair & _LOW_NIBBLES, (pair >> np.uint32(4)) & _LOW_NIBBLES
        # Bytes of inputs 0, 2, 4, 6 and 1, 3, 5, 7: the last two of each become the high nibbles of the first two.
        even, odd = low | (low >> np.uint32(12)), high | (high >> np.uint32(12))
        first = (even & np.uint32(0xFF)) | (odd & np.uint32(0xFF)) << np.uint32(8)
        last = (even & np.uint32(0xFF00)) >> np.uint32(8) | (odd & np.uint32(0xFF00))
        words[row, place] = np.int32(first | last << np.uint32(16))


@kernel(LONG, None, None)
def reorder_nibbles(pool: int, pairs: Any, words: Any) -> None:
    """Reorder words of eight int4 inputs.

      pairs:  byte j of 4    high: input 2 j + 1    low: input 2 j
      words:  byte j of 4    high: input j + 4      low: input j

    The four low nibbles of a word are its first four inputs. Shape: pairs and words [outputs, words] of int32.
    """
    spread(pool, len(pairs), 1, _reorder_row, (pairs, words))
