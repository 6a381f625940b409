"""What commands that measure share: the options that say where figures go, and the writing and drawing of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the figures.", show_default=False)
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw a PNG (needs matplotlib).", show_default=False)
]


def write_json(path: Path, report: Any) -> None:
    """Write what was measured, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches.

    Raises:
        typer.BadParameter: When matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise typer.BadParameter("--plot needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")
