"""`python -m tests.bench.parts video`: stalls next to videos, and the cost of further questions about one."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.terminal.options import JsonOption, SetOption, write_json

if TYPE_CHECKING:
    from tests.bench.parts.video.measure import Gaps
    from tests.bench.servers.server import Server

READY_S = 600.0


def video(
    path: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    frames: Annotated[int, typer.Option(min=2, help="Frames of the video.")] = 256,
    pixels: Annotated[int, typer.Option(min=28, help="Side of a frame.")] = 224,
    decoders: Annotated[int, typer.Option(min=1, help="Requests next to the video.")] = 31,
    turns: Annotated[int, typer.Option(min=0, help="Questions about one video.")] = 6,
    clients: Annotated[int, typer.Option(min=1, help="Clients that send damaged files.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Servers, one after another.")] = 3,
    out: JsonOption = None,
) -> None:
    """Serve a checkpoint, and measure decoding next to a long video, a conversation, and damaged files."""
    from rich.console import Console

    from tests.bench.servers.server import serving
    from tests.bench.servers.sides import spec_of

    console = Console()
    spec = spec_of(path.resolve(), assignments or ())
    rows = []
    for _ in range(repeats):
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(spec, Path(folder) / "server.log") as server,
        ):
            server.wait_ready(READY_S)
            measured = _measure(
                server,
                decoders=decoders,
                turns=turns,
                clients=clients,
                frames=frames,
                pixels=pixels,
            )
            rows.append(asyncio.run(measured))
        _show(rows[-1], console)
    if out is not None:
        write_json(out, rows)


async def _measure(
    server: Server, *, decoders: int, turns: int, clients: int, frames: int, pixels: int
) -> dict[str, Any]:
    from tests.bench.parts.video import measure
    from tests.unit.media.video_files import hostile_files

    size = {"frames": frames, "pixels": pixels}
    return {
        "beside_video": await measure.measure_beside_video(server, decoders=decoders, **size),
        "turns": await measure.measure_turns(server, turns=turns, **size),
        "beside_files": await measure.measure_beside_files(
            server, list(hostile_files()), clients=clients
        ),
    }


def _show(row: dict[str, Any], console: Any) -> None:
    one = row["beside_video"]
    console.print(
        f"{one.decoders} decoders beside a video of {one.frames} frames, {one.prompt_tokens} tokens, "
        f"first token after {one.ttft_s} s: {_gaps(one.beside)}; alone {_gaps(one.alone)}"
    )
    for number, turn in enumerate(row["turns"], 1):
        console.print(
            f"turn {number}: {turn.prompt_tokens} prompt tokens, {turn.encoded} frame groups encoded, "
            f"first token after {turn.ttft_ms:.0f} ms"
        )
    one = row["beside_files"]
    statuses = ", ".join(f"{count} x {status}" for status, count in one.statuses.items())
    console.print(
        f"{one.files} damaged files from {one.clients} clients in {one.seconds} s ({statuses}): stall of a decoder "
        f"p99 {one.beside.stall_p99_ms:.1f} ms ({_gaps(one.beside)}); alone {_gaps(one.alone)}; "
        f"memory {one.memory_before_mib:.0f} MiB, at most {one.memory_peak_mib:.0f}"
    )


def _gaps(gaps: Gaps) -> str:
    return f"gap p50 {gaps.p50_ms} ms, p99 {gaps.p99_ms}, worst {gaps.worst_ms} ({gaps.worst_ratio:.1f}x)"
