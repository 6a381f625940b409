"""Output of `vsched demo`: pictures as coloured half blocks, and tables of turns, time and memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vsched.cli.demo.exam import is_answer

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

TABLE_COLUMNS = 72
PICTURE_COLUMNS = 56
PICTURES_COLUMNS = 120
"""Maximum total width of pictures side by side."""
GAP_COLUMNS = 2


class AskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation turn and its answer; `expected` is the right answer."""

    question: str
    answer: str
    expected: str
    images: int
    encoded: int

    @property
    def verdict(self) -> str:
        """Whether the answer is right, in words."""
        return verdict(self.answer, self.expected)


def verdict(answer: str, expected: str) -> str:
    """Return whether an answer is right, in words."""
    return "right" if is_answer(answer, expected) else f"wrong: {expected}"


def show_pictures(pictures: Sequence[bytes], console: Console) -> None:
    """Show PNG files side by side if the console has colours."""
    from PIL import Image
    from rich.table import Table

    if not console.color_system or console.no_color:
        return
    share = (min(console.width, PICTURES_COLUMNS) - GAP_COLUMNS) // len(pictures) - GAP_COLUMNS
    columns = min(share, PICTURE_COLUMNS)
    row = Table.grid(padding=(0, GAP_COLUMNS, 0, 0))
    thumbnails = []
    for png in pictures:
        with Image.open(io.BytesIO(png)) as picture:
            thumbnails.append(thumbnail(picture.convert("RGB"), columns))
    row.add_row(*thumbnails)
    console.print(row)


def thumbnail(picture: Image.Image, columns: int) -> Text:
    """Return a picture as coloured half blocks, two pixels per character; small ones are not enlarged."""
    from PIL import Image
    from rich.text import Text

    # Limit the height to the width, so that a tall picture does not fill the screen.
    scale = min(columns / picture.width, columns / picture.height, 1.0)
    columns = max(round(picture.width * scale), 1)
    rows = max(round(picture.height * scale / 2), 1) * 2
    small = picture.resize((columns, rows), Image.Resampling.LANCZOS)
    text = Text()
    for row in range(0, rows, 2):
        for column in range(columns):
            above = small.getpixel((column, row))
            below = small.getpixel((column, row + 1))
            assert isinstance(above, tuple)
            assert isinstance(below, tuple)
            style = "#{:02x}{:02x}{:02x} on #{:02x}{:02x}{:02x}".format(*above, *below)
            text.append("▀", style=style)
        text.append("\n")
    text.no_wrap = True
    return text


def turns_table(turns: Sequence[AskedTurn]) -> Table:
    """Return the turns of a conversation as a table."""
    from rich.table import Table

    table = Table(
        title="A conversation: the next picture with each turn",
        title_justify="left",
        min_width=TABLE_COLUMNS,
    )
    table.add_column("turn", justify="right")
    table.add_column("question")
    for name in ("images", "encoded"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    table.add_column("")
    for number, turn in enumerate(turns, 1):
        table.add_row(
            str(number),
            turn.question,
            str(turn.images),
            str(turn.encoded),
            turn.answer,
            turn.verdict,
        )
    table.caption = "images: in the prompt; encoded: new ones, the others were cached"
    table.caption_justify = "left"
    return table


def timeline_table(timeline: dict[str, Any]) -> Table:
    """Return a table of the time spent on one request, by stage."""
    from rich.table import Table

    table = Table(title="Where the time went (ms)", title_justify="left", min_width=TABLE_COLUMNS)
    stages = ("preprocess", "encode", "queue", "prefill", "decode")
    for stage in (*stages, "total"):
        table.add_column(stage, justify="right")
    spent = [timeline[f"{stage}_ms"] for stage in stages]
    table.add_row(*(f"{value:.1f}" for value in (*spent, sum(spent))))
    table.caption = (
        f"{timeline['prompt_tokens']} prompt tokens ({timeline['cached_tokens']} cached), "
        f"{timeline['encoded_items']} image encoded, {timeline['output_tokens']} tokens out"
    )
    return table


def memory_table(statistics: dict[str, Any]) -> Table:
    """Return a table of the memory in use, by process."""
    from rich.table import Table

    table = Table(title="Where the memory is (MiB)", title_justify="left", min_width=TABLE_COLUMNS)
    for name in ("process", "resident", "peak", "weights", "KV cache"):
        table.add_column(name, justify="left" if name == "process" else "right")

    def mib(fields: dict[str, int], name: str) -> str:
        return f"{fields[name] / 2**20:.1f}" if name in fields else ""

    memory = statistics["memory"]
    table.add_row("engine", mib(memory, "engine_resident"), "", "", "")
    for group, ranks in statistics["ranks"].items():
        for rank, fields in ranks.items():
            cells = (mib(fields, name) for name in ("resident", "peak", "weights", "kv"))
            table.add_row(f"{group} rank {rank}", *cells)
    pixels, embeddings = mib(memory, "arena_pixels"), mib(memory, "arena_embeddings")
    table.caption = f"shared arena (reserved): pixels {pixels}, embeddings {embeddings}"
    return table
