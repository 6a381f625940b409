"""Table cells of paired rounds of two variants."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def pair_cells(pairs: Sequence[tuple[float, float]], *, digits: int) -> str:
    """Return three cells: the medians of both variants, and of the second relative to the first in each round."""
    one, other = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = spread([second / first for first, second in pairs])
    return f"{one:.{digits}f} | {other:.{digits}f} | {ratios}"


def spread(ratios: Sequence[float]) -> str:
    """Return the median of ratios, and their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
