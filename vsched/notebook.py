"""HTML tables for `_repr_html_`, with which notebooks show an object: static, without scripts or styles of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

LIST_MAX = 8
"""Elements of a list that are shown."""


def html_table(title: str, values: Mapping[str, object]) -> str:
    """Return names and values as a table; an inner mapping is a table that opens on a click."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{_cell(value)}</td></tr>'
        for name, value in values.items()
    )
    caption = f'<caption style="text-align:left">{escape(title)}</caption>' if title else ""
    return f"<table>{caption}<tbody>{rows}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        inner = html_table("", {str(name): one for name, one in value.items()})
        return f"<details><summary>{len(value):,}</summary>{inner}</details>" if value else ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ", ".join(_cell(one) for one in value[:LIST_MAX])
        return f"{shown}, … ({len(value):,})" if len(value) > LIST_MAX else shown
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escape(str(value))


class Statistics(dict[str, Any]):
    """A dictionary with a table of its values in notebooks."""

    def _repr_html_(self) -> str:
        return html_table("", self)
