"""`python -m tests.bench.parts cache`: caching embeddings per image, compared with one entry per request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.terminal.options import JsonOption, PlotOption, SetOption, new_figure, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from tests.bench.parts.cache.measure import Conversation


def cache(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    sizes: Annotated[
        str, typer.Option(help="Image sides in pixels, separated by commas.")
    ] = "448,672,896",
    turns: Annotated[int, typer.Option(min=2, help="Turns per conversation.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Conversations per case.")] = 3,
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare `combined` with `chunk-aware`: encode time per turn, images until refusal, decode stalls."""
    from rich.console import Console

    console = Console()
    settings = [*(assignments or ()), f"model.path={path}"]
    pixels = [int(size) for size in sizes.split(",")]
    report = asyncio.run(_measure(settings, pixels, turns, repeats, console))
    _show(report, console)
    if out is not None:
        write_json(out, report)
    if plot is not None:
        _plot(report["conversations"], plot)
        console.print(f"Plot: {plot}")


async def _measure(
    settings: list[str], pixels: list[int], turns: int, repeats: int, console: Console
) -> dict[str, Any]:
    from rich.progress import Progress

    from tests.bench.parts.cache import measure as bench

    conversations: list[Conversation] = []
    with Progress(console=console, transient=True) as progress:
        steps = len(pixels) * turns * repeats * len(bench.ENCODINGS)
        task = progress.add_task("conversations", total=steps)
        for size in pixels:
            conversations += await bench.measure_conversations(
                settings,
                image_pixels=size,
                turns=turns,
                repeats=repeats,
                advanced=lambda: progress.advance(task),
            )
        progress.update(task, description="image limit")
        probes = [
            await bench.measure_probe(
                settings, encoding=name, image_pixels=pixels[0], images_max=24, room=6
            )
            for name in bench.ENCODINGS
        ]
        progress.update(task, description="same image, 32 clients")
        encoded = await bench.measure_same_image(settings, clients=32, image_pixels=pixels[0])
        progress.update(task, description="31 decoders and 16 large images")
        mixed = await bench.measure_mixed(
            # Enough for all images at once: a request does not wait for its own images.
            [
                *settings,
                "generate.step_target_ms=40",
                "generate.step_target_ratio=2",
                "arena.pixel_bytes=1073741824",
            ],
            decoders=31,
            images=16,
            image_pixels=max(pixels),
            tokens=600,
        )
    return {
        "load": os.getloadavg()[0],
        "repeats": repeats,
        "conversations": conversations,
        "probes": probes,
        "same_image_encodes": encoded,
        "mixed": mixed,
    }


def _show(report: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    conversations: list[Conversation] = report["conversations"]
    table = Table(title="Encode ms and TTFT ms by turn (turn k holds k images)")
    table.add_column("image")
    table.add_column("policy")
    turns = len(conversations[0].turns)
    shown = sorted({1, 2, turns // 2, turns})
    for turn in shown:
        table.add_column(f"turn {turn}", justify="right")
    for one in conversations:
        cells = [one.turns[turn - 1] for turn in shown]
        table.add_row(
            f"{one.image_pixels} px, {one.image_tokens} tokens",
            one.encoding,
            *(f"{cell.encode_ms:.0f} / {cell.ttft_ms:.0f}" for cell in cells),
        )
    console.print(table)
    for combined, aware in zip(conversations[::2], conversations[1::2], strict=True):
        last, second = aware.turns[-1], aware.turns[1]
        before = combined.turns[-1]
        console.print(
            f"{aware.image_pixels} px, turn {turns}: encode {before.encode_ms / last.encode_ms:.1f}x "
            f"cheaper, TTFT {100 * (1 - last.ttft_ms / before.ttft_ms):.0f} % lower, "
            f"turn {turns} / turn 2 = {last.encode_ms / second.encode_ms:.2f}, answers "
            f"{'identical' if combined.answers == aware.answers else 'DIFFERENT'}"
        )
    for probe in report["probes"]:
        end = f"refused: {probe.refusal}" if probe.refusal else "the most that was tried"
        console.print(f"Image limit, {probe.encoding}: {probe.images} images ({end})")
    console.print(f"Same image from 32 clients: encoded {report['same_image_encodes']} time(s)")
    mixed = report["mixed"]
    console.print(
        f"{mixed.decoders} decoders beside {mixed.images} images of {mixed.image_tokens} tokens: "
        f"gap p50 {mixed.gap_p50_ms} ms, p99 {mixed.gap_p99_ms}, worst {mixed.gap_worst_ms} "
        f"({mixed.gap_worst_ms / mixed.gap_p50_ms:.1f}x); decoders alone {mixed.alone_p50_ms}"
    )


def _plot(conversations: list[Conversation], path: Path) -> None:
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2)
    for one in conversations:
        style = "--" if one.encoding == "combined" else "-"
        label = f"{one.encoding}, {one.image_pixels} px"
        turns = [turn.turn for turn in one.turns]
        axes[0].plot(turns, [turn.encode_ms for turn in one.turns], style, label=label)
        axes[1].plot(turns, [turn.ttft_ms for turn in one.turns], style, label=label)
    for axis, title in zip(axes, ("encode", "time to first token"), strict=True):
        axis.set_xlabel("turn (= images in the request)")
        axis.set_ylabel("ms")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110)
