"""Charts as SVG, drawn by ourselves: a report needs no plotting library and nothing from a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
WIDTH, HEIGHT = 460, 266
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 46, 42
LETTER = 5.6
"""About the width of a letter in a legend."""
POINTS_MAX = 320
Points = Sequence[tuple[float, float]]


def colour(index: int) -> str:
    """Return the colour of a line."""
    return COLOURS[index % len(COLOURS)]


def number(value: float) -> str:
    """Return a number as a tick shows it."""
    if abs(value) >= 100_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values from low to high, about so many."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from low to high, or the powers only where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) <= 4 else (1,)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if low <= value <= high]


class Chart:
    """A chart with axes; what is drawn lies within the ranges given."""

    def __init__(
        self,
        title: str,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        y_label: str,
        log_x: bool = False,
        ticks_x: bool = True,
    ) -> None:
        self._x = (max(x[0], 1e-3), max(x[1], x[0] * 1.01, 1e-2)) if log_x else x
        self._y = (y[0], y[1] if y[1] > y[0] else y[0] + 1)
        self._log_x = log_x
        self._parts: list[str] = []
        self._legend: list[tuple[str, str]] = []
        self._text(WIDTH / 2, 16, title, size=13, weight="600")
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label)
        middle = (TOP + HEIGHT - BOTTOM) / 2
        self._text(13, middle, y_label, extra=f' transform="rotate(-90 13 {middle})"')
        self._axes(ticks_x=ticks_x)

    def line(self, points: Points, stroke: str, name: str = "") -> None:
        """Draw a line; of many points every so many."""
        every = max(-(-len(points) // POINTS_MAX), 1)
        drawn = [*points[::every], *points[-1:]]
        path = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in drawn)
        label = f"<title>{escape(name)}</title>" if name else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.6">{label}</polyline>'
        )
        self.key(stroke, name)

    def area(self, points: Points, below: Points, fill: str, name: str) -> None:
        """Fill between two lines over the same abscissas."""
        every = max(-(-len(points) // POINTS_MAX), 1)
        upper = [f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in points[::every]]
        lower = [f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in below[::every]]
        path = " ".join(upper + lower[::-1])
        self._parts.append(
            f'<polygon points="{path}" fill="{fill}" fill-opacity="0.75">'
            f"<title>{escape(name)}</title></polygon>"
        )
        self.key(fill, name)

    def key(self, fill: str, name: str) -> None:
        """Add a colour to the legend."""
        if name and (fill, name) not in self._legend:
            self._legend.append((fill, name))

    def bar(self, x: float, width: float, height: float, fill: str, name: str) -> None:
        """Draw a bar from 0, and its height above it."""
        left, top = self._px(x), self._py(height)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{self._px(x + width) - left:.1f}" '
            f'height="{self._py(self._y[0]) - top:.1f}" fill="{fill}"><title>{escape(name)}</title></rect>'
        )
        self._text(self._px(x + width / 2), top - 3, number(height), size=9)

    def label(self, x: float, text: str) -> None:
        """Write below the axis."""
        self._text(self._px(x), HEIGHT - BOTTOM + 14, text)

    def mark(self, x: float, text: str) -> None:
        """Draw a dashed line across, such as a target."""
        if self._x[0] <= x <= self._x[1]:
            at = self._px(x)
            self._parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                f'stroke="#64748b" stroke-dasharray="4 3"><title>{escape(text)}</title></line>'
            )
            self._text(at + 3, TOP + 10, text, size=9, anchor="start")

    def render(self) -> str:
        """Return the SVG element."""
        left = float(LEFT)
        for fill, name in self._legend:
            self._parts.append(f'<rect x="{left:.1f}" y="26" width="9" height="9" fill="{fill}"/>')
            self._text(left + 13, 34, name, size=10, anchor="start")
            left += 26 + LETTER * len(name)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
            f"{''.join(self._parts)}</svg>"
        )

    def _px(self, x: float) -> float:
        low, high = self._x
        if self._log_x:
            low, high, x = math.log(low), math.log(high), math.log(max(x, low))
        share = (min(max(x, low), high) - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _py(self, y: float) -> float:
        low, high = self._y
        share = (min(max(y, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def _axes(self, *, ticks_x: bool) -> None:
        bottom = HEIGHT - BOTTOM
        for value in ticks(*self._y):
            at = self._py(value)
            self._parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e2e8f0"/>'
            )
            self._text(LEFT - 6, at + 3.5, number(value), anchor="end", size=10)
        across = log_ticks(*self._x) if self._log_x else ticks(*self._x)
        for value in across if ticks_x else ():
            at = self._px(value)
            self._parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#94a3b8"/>'
            )
            self._text(at, bottom + 15, number(value), size=10)
        self._parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#94a3b8"/>'
        )

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 11,
        anchor: str = "middle",
        weight: str = "400",
        extra: str = "",
    ) -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}"{extra}>{escape(text)}</text>'
        )
