"""Figures of a GPU, and their page."""

from __future__ import annotations

import msgspec

from tests.bench.gpu.costs import DEVICES, Cost

FIGURES = "figures.json"
"""File of the figures of several runs, by name."""


class Row(msgspec.Struct, frozen=True):
    """One case; milliseconds. `floor_ms` is the minimum at the measured rates of the device."""

    model: str
    case: str
    found_ms: float
    floor_ms: float | None
    more: dict[str, float]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything measured on one device.

    Attributes:
        bandwidth: Bytes per second, read and written, of a large copy.
        rate: Operations per second of a large product.
    """

    device: str
    torch: str
    bandwidth: float
    rate: float
    rows: list[Row]


def tables(figures: Figures) -> str:
    copy, product = f"{figures.bandwidth / 1e12:.2f} TB/s", f"{figures.rate / 1e12:.0f} TFLOP/s"
    head = (
        f"{figures.device}, torch {figures.torch}: a copy moves {copy}, a product makes {product}."
    )
    parts = [head + "\n"]
    for model in dict.fromkeys(row.model for row in figures.rows):
        rows = [row for row in figures.rows if row.model == model]
        both = filter(None, (_floors(rows), _conversations(rows)))
        parts += [f"\n### {model}\n\n", "\n".join(both)]
    return "".join(parts)


def _floors(rows: list[Row]) -> str:
    least = " | ".join(f"least on {device.name} ms" for device in DEVICES)
    head = f"| case | ms | floor ms | part of the limit reached | eager ms | {least} |"
    lines = [head, "|---" * (5 + len(DEVICES)) + "|"]
    rows = [row for row in rows if row.floor_ms is not None]
    if not rows:
        return ""
    for row in rows:
        assert row.floor_ms is not None
        eager = f"{row.more['eager_ms']:.2f}" if "eager_ms" in row.more else ""
        cost = Cost(row.more["moved"], row.more["operations"])
        least = " | ".join(f"{cost.least_ms(device):.2f}" for device in DEVICES)
        reached = row.floor_ms / row.found_ms
        lines.append(
            f"| {row.case} | {row.found_ms:.2f} | {row.floor_ms:.2f} | {reached:.2f} | {eager} | {least} |"
        )
    return "\n".join(lines) + "\n"


def _conversations(rows: list[Row]) -> str:
    encode = "| conversation | encode all ms | encode new ms | ratio "
    first = "| first token: nothing cached ms | embeddings cached ms | prefix cached too ms |"
    lines = [encode + first, "|---|---|---|---|---|---|---|"]
    rows = [row for row in rows if row.floor_ms is None]
    if not rows:
        return ""
    for row in rows:
        more = row.more
        lines.append(
            f"| {row.case.removeprefix('conversation ')} | {more['encode_all_ms']:.1f} | {row.found_ms:.1f} "
            f"| {more['encode_all_ms'] / row.found_ms:.1f} | {more['first_token_all_ms']:.1f} "
            f"| {more['first_token_embeddings_ms']:.1f} | {more['first_token_prefix_ms']:.1f} |"
        )
    return "\n".join(lines) + "\n"
