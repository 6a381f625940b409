"""`vsched demo`: the whole path in one command: a checkpoint, a server, an image, a streamed answer."""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.cli import app

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionUserMessageParam
    from PIL import Image
    from rich.console import Console
    from rich.table import Table

QUESTION = "What is in this picture?"
SIZE = "tiny25"


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where to keep the checkpoint and the picture.")] = (
        Path(".demo")
    ),
    max_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 40,
) -> None:
    """Make a small checkpoint, serve it, ask it about a picture, and show where time and memory went."""
    import uvloop
    from rich.console import Console

    console = Console(highlight=False)
    checkpoint = folder / SIZE
    if not (checkpoint / "config.json").exists():
        _make_checkpoint(checkpoint, console)
    picture = draw_picture()
    picture.save(folder / "picture.png")
    console.print(f"The picture, drawn just now ([dim]{folder / 'picture.png'}[/]):")
    if console.color_system:
        console.print(_thumbnail(picture))
    uvloop.run(_ask(checkpoint, picture, max_tokens, console))


def _make_checkpoint(checkpoint: Path, console: Console) -> None:
    from vsched.plugins import load_worker
    from vsched.worker.abilities import CheckpointMaker

    plugin = load_worker("transformers")
    assert isinstance(plugin, CheckpointMaker)
    with console.status(f"Making a Qwen2.5-VL checkpoint with random weights ({SIZE}) …"):
        parameters = plugin.make_checkpoint(str(checkpoint), SIZE)
    console.print(f"Made {checkpoint}: {parameters / 1e6:.1f} M random parameters.")


def draw_picture() -> Image.Image:
    """Return a picture of a red circle, a blue square and a green triangle."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (448, 336), "#f4f1ea")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((40, 100, 160, 220), fill="#d1495b")
    draw.rectangle((180, 110, 290, 220), fill="#2e6f95")
    draw.polygon([(310, 220), (420, 220), (365, 105)], fill="#5b8e55")
    return picture


def _thumbnail(picture: Image.Image) -> Any:
    """Return the picture as coloured half blocks, two pixels a character."""
    from rich.text import Text

    small = picture.resize((56, 42))
    text = Text()
    for row in range(0, small.height, 2):
        for column in range(small.width):
            above = small.getpixel((column, row))
            below = small.getpixel((column, row + 1))
            assert isinstance(above, tuple)
            assert isinstance(below, tuple)
            style = "#{:02x}{:02x}{:02x} on #{:02x}{:02x}{:02x}".format(*above, *below)
            text.append("▀", style=style)
        text.append("\n")
    return text


async def _ask(checkpoint: Path, picture: Image.Image, max_tokens: int, console: Console) -> None:
    import httpx
    from openai import AsyncOpenAI

    from vsched.api.server import running_server
    from vsched.cli.progress import loading_bars
    from vsched.config import load_config

    settings = [f"model.path={checkpoint}", "server.port=0"]
    config = load_config(None, sets=settings, environ={}).config
    async with contextlib.AsyncExitStack() as stack:
        with loading_bars(console) as report:
            server = await stack.enter_async_context(running_server(config, on_progress=report))
        console.print(f"Serving at {server.url}/v1")
        console.print(f"\n[bold]user[/]       {QUESTION}")
        console.print("[bold]assistant[/]  ", end="")
        # The client lives within the server's time: a kept-alive connection would hold up its stop.
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=config.model.served_name,
                messages=[_message(picture)],
                max_tokens=max_tokens,
                temperature=1.0,
                seed=7,
                stream=True,
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    console.print(chunk.choices[0].delta.content, end="", markup=False)
        console.print(
            "\n\nThe weights are random, so the answer is noise; the path that it took is real:\n"
            "HTTP, preprocessing, an encode process, shared memory, a generate process.\n",
            style="dim",
        )
        async with httpx.AsyncClient() as client_http:
            reply = await client_http.get(f"{server.url}/admin/statistics")
        statistics = reply.json()
        console.print(_timeline_table(statistics["recent"][-1]))
        console.print(_memory_table(statistics))
    console.print("Stopped: no process and no shared memory is left.")


def _message(picture: Image.Image) -> ChatCompletionUserMessageParam:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": QUESTION},
        ],
    }


def _timeline_table(timeline: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="Where the time went (ms)", title_justify="left", min_width=72)
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


def _memory_table(statistics: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="Where the memory is (MiB)", title_justify="left", min_width=72)
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
