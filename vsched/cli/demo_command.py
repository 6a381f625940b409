"""`vsched demo`: everything in one command: a checkpoint, a server, pictures, streamed answers."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.checkpoint_tools import ExamTurn
from vsched.cli import app
from vsched.errors import CheckpointError, ConfigError
from vsched.terminal.options import new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vsched.engine import Engine

TASKS = ("number", "colour", "count")
"""Tasks of the first question and of each turn of the conversation."""
TABLE_COLUMNS = 72
Ask = Callable[..., Awaitable[str]]


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Folder for pictures.")] = Path(".demo"),
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 40,
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pictures.")] = 0,
) -> None:
    """Serve a small checkpoint, ask it about pictures, and show where time and memory went."""
    import uvloop
    from rich.console import Console

    from vsched.checkpoint_tools import load_tools

    console = Console(highlight=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--folder {folder}: cannot be created: {error.strerror}. Remedy: name another folder"
        ) from error
    plugin = load_tools("transformers", "exam_tasks")
    trained = plugin.trained_checkpoint()
    if not trained:
        raise CheckpointError(
            "the trained checkpoint is in the repository, but not in wheels. Remedy: run the demo in a checkout, "
            "or serve another checkpoint: vsched serve ORG/NAME"
        )
    if find_spec("openai") is None:
        raise ConfigError("openai is not installed. Remedy: pip install 'vsched[demo]'")
    size = sum(path.stat().st_size for path in Path(trained).iterdir() if path.is_file())
    console.print(f"The trained checkpoint of the repository, {size / 1e6:.1f} MB.")

    def turn(task: str, place: int) -> ExamTurn:
        """Return the turn of a task; another place gives another picture."""
        return plugin.exam(task, 1, seed=2 * seed + place)[0][0]

    uvloop.run(_examine(trained, turn, folder, max_tokens, console))


def is_answer(text: str, expected: str) -> bool:
    """Return whether a text is the right answer, ignoring surrounding white space."""
    return text.strip() == expected


def data_url(png: bytes) -> str:
    """Return a PNG file as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def user_message(turn: ExamTurn) -> dict[str, Any]:
    """Return a turn as an OpenAI chat message: its images, then its question."""
    images = [{"type": "image_url", "image_url": {"url": data_url(png)}} for png in turn.images]
    return {"role": "user", "content": [*images, {"type": "text", "text": turn.question}]}


@contextlib.asynccontextmanager
async def _serving(
    checkpoint: str, max_tokens: int, console: Console
) -> AsyncIterator[tuple[Engine, Ask]]:
    """Serve a checkpoint, with progress bars while it loads; yield the engine, and a client's function to ask it."""
    from openai import AsyncOpenAI

    from vsched.api.server import running_server
    from vsched.config import load_config
    from vsched.terminal.progress import loading_progress

    settings = [f"model.path={checkpoint}", "server.port=0"]
    config = load_config(None, sets=settings, environ={}).config
    async with contextlib.AsyncExitStack() as stack:
        with loading_progress(console) as report:
            server = await stack.enter_async_context(running_server(config, on_progress=report))
        console.print(f"Serving at {server.url}/v1")
        # The client is closed before the server: an open keep-alive connection would delay its stop.
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        )

        async def ask(messages: Sequence[Any], *, show: bool) -> str:
            """Send messages, print the answer as it is streamed, and return it."""
            stream: Any = await client.chat.completions.create(
                model=config.model.served_name,
                messages=list(messages),
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
            )
            pieces: list[str] = []
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    pieces.append(chunk.choices[0].delta.content)
                    if show:
                        console.print(pieces[-1], end="", markup=False)
            return "".join(pieces)

        yield server.engine, ask
    console.print("Stopped: no process and no shared memory is left.")


async def _examine(
    checkpoint: str,
    turn: Callable[[str, int], ExamTurn],
    folder: Path,
    max_tokens: int,
    console: Console,
) -> None:
    """Ask about a picture, then hold a conversation; report whether the answers are right."""
    first = turn(TASKS[0], 0)
    async with _serving(checkpoint, max_tokens, console) as (engine, ask):
        _show(first.images, folder, "picture", console)
        console.print(f"[bold]user[/]       {first.question}")
        console.print("[bold]assistant[/]  ", end="")
        answer = await ask([user_message(first)], show=True)
        console.print(f"   [dim]({_verdict(answer, first)})[/]\n")
        first_timeline = engine.statistics()["recent"][-1]
        turns = [turn(task, 1) for task in TASKS]
        _show([png for one in turns for png in one.images], folder, "turn", console)
        console.print(await _converse(engine, ask, turns))
        console.print()
        console.print(timeline_table(first_timeline))
        console.print()
        console.print(memory_table(engine.statistics()))


async def _converse(engine: Engine, ask: Ask, turns: Sequence[ExamTurn]) -> Table:
    """Hold a conversation of these turns, each with its own picture; return it as a table."""
    title = "A conversation: the next picture with each turn"
    table = _table(title, "turn", "question", "images", "encoded", "answer", "")
    table.caption = "images: in the prompt; encoded: new ones, the others were cached"
    table.caption_justify = "left"
    messages: list[dict[str, Any]] = []
    images = 0
    for number, turn in enumerate(turns, 1):
        messages.append(user_message(turn))
        images += len(turn.images)
        answer = await ask(messages, show=False)
        messages.append({"role": "assistant", "content": answer})
        encoded = engine.statistics()["recent"][-1]["encoded_items"]
        counts = str(images), str(encoded)
        table.add_row(str(number), turn.question, *counts, answer, _verdict(answer, turn))
    return table


def _show(pictures: Sequence[bytes], folder: Path, name: str, console: Console) -> None:
    """Write pictures as PNG files."""
    several = len(pictures) > 1
    paths = [
        folder / (f"{name}-{number}.png" if several else f"{name}.png")
        for number in range(1, len(pictures) + 1)
    ]
    for path, png in zip(paths, pictures, strict=True):
        path.write_bytes(png)
    console.print(
        f"The picture{'s' * several}, which the model has never seen "
        f"([dim]{', '.join(map(str, paths))}[/]):"
    )
    console.print()


def _verdict(answer: str, turn: ExamTurn) -> str:
    return "right" if is_answer(answer, turn.answer) else f"wrong: {turn.answer}"


def _table(title: str, *columns: str) -> Table:
    texts = ("question", "answer", "", "process")
    return new_table(title, *columns, texts=texts, min_width=TABLE_COLUMNS)


def timeline_table(timeline: dict[str, Any]) -> Table:
    """Return a table of the time spent on one request, by stage."""
    stages = ("preprocess", "encode", "queue", "prefill", "decode")
    table = _table("Where the time went (ms)", *stages, "total")
    spent = [timeline[f"{stage}_ms"] for stage in stages]
    table.add_row(*(f"{value:.1f}" for value in (*spent, sum(spent))))
    table.caption = (
        f"{timeline['prompt_tokens']} prompt tokens ({timeline['cached_tokens']} cached), "
        f"{timeline['encoded_items']} image encoded, {timeline['output_tokens']} tokens out"
    )
    return table


def memory_table(statistics: dict[str, Any]) -> Table:
    """Return a table of the memory in use, by process."""
    columns = ("process", "resident", "peak", "weights", "KV cache")
    table = _table("Where the memory is (MiB)", *columns)

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
