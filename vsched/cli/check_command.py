"""`vsched check`: report on a checkpoint and whether it can be served, without reading weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import typer

from vsched.checkpoint_tools import CheckpointDescription
from vsched.cli import app
from vsched.cli.checkpoint_report import CheckpointReport, StageMemory, as_json, check_checkpoint
from vsched.memory import size_text
from vsched.terminal.options import (
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    SetOption,
    load_served,
    write_json,
)
from vsched.types import ModelInfo, SamplingDefaults

STANDARD_OUTPUT = Path("-")
_LABEL_COLUMNS = 15
_SIZE_WORDS = {
    "num_hidden_layers": "layers",
    "hidden_size": "wide",
    "num_attention_heads": "heads",
    "num_key_value_heads": "KV heads",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "vocab_size": "tokens of vocabulary",
}


@app.command()
def check(
    path: CheckpointArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
    out: JsonOption = None,
) -> None:
    """Report on a checkpoint, whether it can be served here, and the memory it needs; no weights are read.

    The exit status is 1 if it cannot be served. `--json -` writes the report to standard output
    instead of the text.
    """
    loaded = load_served(config, assignments, path)
    report = check_checkpoint(loaded)
    if out == STANDARD_OUTPUT:
        sys.stdout.buffer.write(msgspec.json.encode(as_json(report)) + b"\n")
    else:
        for line in describe(report):
            typer.echo(line)
        if out is not None:
            write_json(out, as_json(report))
            typer.echo(f"JSON: {out}")
    if report.problems:
        raise typer.Exit(1)


def describe(report: CheckpointReport) -> Iterator[str]:
    """Yield a report as lines of text."""
    yield report.checkpoint
    for label, text in _facts(report):
        yield f"  {label:{_LABEL_COLUMNS}}{text}"
    for problem in report.problems:
        yield f"It cannot be served: {problem}"
    if not report.problems:
        yield "It can be served."


def _facts(report: CheckpointReport) -> Iterator[tuple[str, str]]:
    description, info = report.description, report.info
    family = description.model_type or "not told"
    yield (
        "family",
        f"{family} ({description.architecture})" if description.architecture else family,
    )
    yield "path", report.path
    yield "parameters", _parameters(description)
    yield "language model", _sizes(description)
    if any(description.windows):
        window, layers = description.windows
        yield (
            "windows",
            f"{window:,} tokens in {layers} layers, which keep KV for the whole context, too",
        )
    yield "tokenizer", description.tokenizer or "none that can be read"
    yield "chat templates", ", ".join(description.chat_templates) or "none"
    if info is not None:
        yield from _served_facts(info)
    for size, tokens in report.image_tokens.items():
        reported = f"{tokens:,} tokens" if isinstance(tokens, int) else tokens
        yield "image", f"{size}: {reported}"
    if (video := report.video) is not None:
        yield (
            "video",
            (
                f"{video.frames} frames of {video.size}: {video.tokens:,} tokens, "
                f"{size_text(video.pixel_bytes)} of pixels; arena.pixel_bytes holds {video.at_once} at once"
            ),
        )
    if report.devices:
        yield "devices", report.devices
    if report.placement:
        yield "stages", report.placement
    yield "cores", report.cores
    for stage, count in report.threads.items():
        yield "threads", f"{stage} rank: {_threads(count, report.threads_fixed_by[stage])}"
    if report.processes:
        yield "HTTP", f"in {report.processes} processes beside the engine's"
    for stage, need in report.memory.items():
        yield f"{stage} rank", _memory(need, info)
    for thing in report.unsupported:
        yield "not supported", thing


def _threads(count: int, fixed_by: str) -> str:
    if count == 1:
        return "1 thread"
    why = f"fixed by {fixed_by}" if fixed_by else "adapts to other programs' load"
    return f"{count} threads ({why})"


def _parameters(description: CheckpointDescription) -> str:
    total = sum(description.parameters.values())
    if not total:
        return "none found"
    parts = ", ".join(
        f"{part} {_count(values)}" for part, values in sorted(description.parameters.items())
    )
    types = ", ".join(sorted(description.dtypes))
    files = f"{description.files} file" + "s" * (description.files != 1)
    return f"{_count(total)} ({parts}) in {types}; {files}, {size_text(description.file_bytes)}"


def _count(values: int) -> str:
    return f"{values / 1e9:.2f} B" if values >= 1e9 else f"{values / 1e6:.1f} M"


def _sizes(description: CheckpointDescription) -> str:
    words = [
        f"{description.sizes[key]:,} {word}"
        for key, word in _SIZE_WORDS.items()
        if key in description.sizes
    ]
    return ", ".join(words) or "not told"


def _served_facts(info: ModelInfo) -> Iterator[tuple[str, str]]:
    yield "served in", info.dtype
    yield "context", f"{info.context_tokens:,} tokens"
    yield "end tokens", ", ".join(map(str, info.stop_token_ids)) or "none"
    own = msgspec.structs.asdict(info.sampling)
    usual = msgspec.structs.asdict(SamplingDefaults())
    stated = [f"{name} {value:g}" for name, value in own.items() if value != usual[name]]
    yield "sampling", ", ".join(stated) or "temperature 1, nothing cut off"


def _memory(need: StageMemory, info: ModelInfo | None) -> str:
    said = f"weights {size_text(need.weights_bytes)}"
    if need.kv_bytes_per_token and info is not None:
        whole = size_text(need.kv_bytes_per_token * info.context_tokens)
        said += f"; KV {size_text(need.kv_bytes_per_token)} a token, {whole} a full context"
    if need.state_bytes:
        said += f"; states of all slots and snapshots {size_text(need.state_bytes)}"
    if need.limit_bytes:
        said += f"; limit {size_text(need.limit_bytes)}"
    if need.kv_tokens_max is not None:
        said += f": KV for fewer than {need.kv_tokens_max:,} tokens"
    return said
