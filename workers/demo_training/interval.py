"""Confidence intervals of shares: every accuracy is printed with one."""

from __future__ import annotations

import math

import msgspec

Z_95 = 1.959964
"""Half width of the central 95 % of a normal distribution, in standard deviations."""


def wilson_interval(right: int, total: int, *, z: float = Z_95) -> tuple[float, float]:
    """Return Wilson's score interval of a share, 95 % by default; (0, 1) if nothing was tried.

    Unlike the normal approximation it stays within 0 and 1, and has no zero width if all or none
    were right.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    1927.
    """
    if not 0 <= right <= total:
        raise ValueError(f"{right} of {total} is not a share")
    if total == 0:
        return 0.0, 1.0
    share, square = right / total, z * z
    centre = share + square / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    scale = 1 + square / total
    # At the ends the bound is the end itself, which rounding would miss slightly.
    low = 0.0 if right == 0 else (centre - spread) / scale
    high = 1.0 if right == total else (centre + spread) / scale
    return low, high


class Share(msgspec.Struct, frozen=True):
    """A number of right answers out of a total."""

    right: int
    total: int

    @property
    def value(self) -> float:
        """The share, 0 to 1; 0 if nothing was tried."""
        return self.right / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval."""
        return wilson_interval(self.right, self.total)

    def text(self) -> str:
        """Return the share in per cent with its interval: `97.0 (91.5-99.0)`."""
        low, high = self.interval
        return f"{100 * self.value:.1f} ({100 * low:.1f}-{100 * high:.1f})"
