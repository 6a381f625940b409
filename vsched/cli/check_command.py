"""`vsched check`: report on a checkpoint and whether it can be served, without reading weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import typer

from vsched.assembly import (
    as_served,
    cached_bytes_per_token,
    context_tokens,
    inspect_checkpoint,
    load_front_end,
    rank_specs,
    state_bytes,
    verifies_drafts,
)
from vsched.checkpoint_tools import CheckpointDescription, CheckpointTools, load_tools
from vsched.cli import app
from vsched.config import Config, ConfiguredPolicies, LoadedConfig
from vsched.config.devices import placement_here
from vsched.config.sections import StageConfig
from vsched.errors import CheckpointError, RequestRefused, VschedError, limit_message
from vsched.media.pixels import aligned
from vsched.memory import size_text
from vsched.terminal.options import (
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    SetOption,
    check_writable,
    load_served,
    write_json,
)
from vsched.types import ModelInfo, SamplingDefaults
from vsched.worker.contract import (
    Preprocessor,
    VideoFacts,
    VideoSampling,
    extent_bytes,
    supports,
)
from vsched.worker.memory import host_available
from vsched.worker.registry import load_worker
from vsched.worker.spec import cores_text

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
IMAGE_SIZES = ((448, 448), (1024, 768), (1920, 1080))
"""Width and height of images whose token counts are reported."""
VIDEO_SIZE, VIDEO_FRAMES = (640, 360), 256
"""Size and frames of a video whose needs are reported."""
NO_CHAT_TEMPLATE = "chat requests, because there is no chat template (model.chat_template)"


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory needed by a rank of one stage.

    Attributes:
        weights_bytes: Its share of the weights, in the served type.
        limit_bytes: Its memory limit; 0 if only the device limits it.
        kv_bytes_per_token: Its share of the KV cache of a token; 0 for an encoder.
        state_bytes: Recurrent states of all slots, and snapshots; 0 for a model without.
        kv_tokens_max: KV cache left by weights and states, if steps needed no memory; None without
            a limit.
    """

    weights_bytes: int
    limit_bytes: int
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    kv_tokens_max: int | None = None


class VideoNeed(msgspec.Struct, frozen=True):
    """Tokens and pixels of a video, and the number of such videos whose pixels fit into the arena."""

    frames: int
    size: str
    tokens: int
    pixel_bytes: int
    at_once: int


class CheckpointReport(msgspec.Struct, kw_only=True):
    """Report on a checkpoint.

    Attributes:
        path: Execution path: `fused`, `modules`, `generic`, or `refused`.
        problems: Reasons why it cannot be served; empty if it can.
        devices: The devices of the stages, and the reason.
        placement: Where the stages run, and why; empty if no stage encodes images.
        cores: The usable cores of this host, and the source of the number.
        threads: Initial number of threads of a rank of each stage on this host.
        threads_fixed_by: The setting that fixes the number, by stage; empty if ranks adapt it.
        processes: Number of HTTP processes in addition to the engine.
        image_tokens: Tokens of an image by its size, or the reason it is refused.
        video: A long video's needs; None if the model takes no videos.
    """

    checkpoint: str
    path: str
    problems: list[str] = []
    unsupported: list[str]
    description: CheckpointDescription
    info: ModelInfo | None = None
    devices: str
    placement: str = ""
    cores: str
    threads: dict[str, int] = {}
    threads_fixed_by: dict[str, str] = {}
    processes: int
    image_tokens: dict[str, int | str] = {}
    video: VideoNeed | None = None
    memory: dict[str, StageMemory] = {}


def check_checkpoint(loaded: LoadedConfig) -> CheckpointReport:
    """Report on a checkpoint, whether it can be served with this configuration, and its memory needs.

    Raises:
        CheckpointError: When there is no checkpoint.
        ConfigError: When the plug-in cannot describe checkpoints.
    """
    config = loaded.config
    tools = load_tools(config.generate.plugin, "describe", path="generate.plugin")
    description = tools.describe(config.model.path)
    report = CheckpointReport(
        checkpoint=config.model.served_name,
        path=description.path,
        unsupported=list(description.unsupported),
        description=description,
        devices="" if loaded.devices is None else loaded.devices.text,
        cores=cores_text(),
        processes=config.server.processes if config.server.processes > 1 else 0,
    )
    if not description.chat_templates and not config.model.chat_template:
        report.unsupported.append(NO_CHAT_TEMPLATE)
    try:
        report.info = info = inspect_checkpoint(config, loaded.policies)
        if info.takes_images and config.encode.replicas:
            report.placement = str(placement_here(config))
        config, _ = as_served(config, info)
        plugin = load_worker(config.generate.plugin, path="generate.plugin")
        verifies_drafts(config, info, loaded.policies)
        front_end = load_front_end(plugin, info, ranks=config.generate.tensor_parallel)
        _report_media(report, config, info, front_end[0])
        # Ranks on other hosts may have other devices.
        for spec in () if config.cluster.elsewhere else rank_specs(config, info, loaded.policies):
            for stage, role in spec.roles.items():
                settings = replace(role.settings, ranks=spec.ranks)
                tools.check_settings(info, settings, stage=stage)
        tools.check_built(info)
    except VschedError as error:
        report.problems.append(str(error))
    for stage in ("encode", "generate"):
        if stage == "generate" or config.encode.replicas:
            report.threads[stage] = config.threads(stage)
            report.threads_fixed_by[stage] = config.threads_fixed_by(stage)
    if report.info is not None:
        draft = report.info.draft
        drafting = None if draft is None else tools.describe(draft.path)
        report.memory = _memory_needs(config, loaded.policies, report.info, description, drafting)
        report.problems += [
            limit_message(
                f"{stage}.memory_limit: no room next to the weights",
                value=f"{need.limit_bytes} bytes",
                limit=f"over {need.weights_bytes} bytes",
                remedy=f"raise it, quantize the model ({stage}.weights), share it among ranks, or take a smaller one",
            )
            for stage, need in report.memory.items()
            if 0 < need.limit_bytes <= need.weights_bytes or need.kv_tokens_max == 0
        ]
        report.problems += _too_long(report.memory, context_tokens(config, report.info))
    if report.problems:
        report.path = "refused"
    return report


def _too_long(memory: Mapping[str, StageMemory], tokens: int) -> Iterator[str]:
    """Yield the error of a stage whose limit cannot hold the KV cache of one request of the longest context."""
    for stage, need in memory.items():
        if need.kv_tokens_max and need.kv_tokens_max < tokens:
            yield limit_message(
                f"{stage}.memory_limit: the KV cache of one request of the longest context does not fit",
                value=f"{tokens} tokens ({size_text(tokens * need.kv_bytes_per_token)})",
                limit=f"fewer than {need.kv_tokens_max} tokens",
                remedy=f'lower {stage}.context_tokens, raise {stage}.memory_limit, or set {stage}.kv_dtype = "int8"',
            )


def check_served(loaded: LoadedConfig) -> None:
    """Raise a `CheckpointError` or a `ConfigError` if a checkpoint cannot be served with this configuration."""
    plugin = load_worker(loaded.config.generate.plugin, path="generate.plugin")
    if not isinstance(plugin, CheckpointTools) or not supports(plugin, "describe"):
        inspect_checkpoint(loaded.config, loaded.policies)
    elif problems := check_checkpoint(loaded).problems:
        raise CheckpointError("\n".join(problems))


def _report_media(
    report: CheckpointReport, config: Config, info: ModelInfo, preprocessor: Preprocessor
) -> None:
    """Report the needs of images of three sizes and of a long video, and failures of the chat template."""
    if info.takes_images and config.media.images_max:
        for width, height in IMAGE_SIZES:
            try:
                found: int | str = preprocessor.plan_image(width, height).tokens
            except RequestRefused as error:
                found = str(error)
            report.image_tokens[f"{width}x{height}"] = found
    contents: dict[str, Any] = {"chat requests": "vsched"}
    if info.takes_videos:
        parts = [{"type": "video"}, {"type": "text", "text": "vsched"}]
        contents["videos in chat requests"] = parts
    for what, content in contents.items() if preprocessor.chat_template else ():
        try:
            preprocessor.render([{"role": "user", "content": content}])
        except RequestRefused as error:
            report.unsupported.append(f"{what}: {error.message}")
    if info.takes_videos and config.media.videos_max:
        frames = min(VIDEO_FRAMES, config.media.video_frames_max)
        facts = VideoFacts(*VIDEO_SIZE, frames, rate=0)
        with contextlib.suppress(RequestRefused):
            plan = preprocessor.plan_video(facts, VideoSampling(), frames_max=frames, sample=False)
            pixels = sum(aligned(extent_bytes(group.arrays)) for group in plan.groups)
            tokens, size = (
                sum(group.tokens for group in plan.groups),
                "x".join(map(str, VIDEO_SIZE)),
            )
            at_once = config.arena.pixel_bytes // pixels
            report.video = VideoNeed(frames, size, tokens, pixels, at_once)


def _memory_needs(
    config: Config,
    policies: ConfiguredPolicies,
    info: ModelInfo,
    description: CheckpointDescription,
    draft: CheckpointDescription | None,
) -> dict[str, StageMemory]:
    """Return the memory needs of a rank of each stage; `draft` is the draft model, if any."""
    kv_bytes = cached_bytes_per_token(config, info)
    found: dict[str, StageMemory] = {}
    for spec in rank_specs(config, info, policies):
        limit = spec.memory_limit_bytes
        if not limit and config.generate.on_cpu:
            limit = host_available()
        weights = {}
        if "encode" in spec.roles:
            size = _weights_bytes(description, "vision", config.encode, info)
            weights["encode"] = size // spec.ranks
        for model, facts in ((description, info), (draft, info.draft)) if spec.generate else ():
            if model is not None and facts is not None:
                size = _weights_bytes(model, "language", config.generate, info)
                own = facts.rank_bytes(
                    size, spec.ranks, quantized=config.generate.weights != "auto"
                )
                weights["generate"] = weights.get("generate", 0) + own
        states = state_bytes(config, info) if spec.generate else 0
        room = max(limit - sum(weights.values()) - states, 0)
        for stage, size in weights.items():
            has_kv = stage == "generate" and kv_bytes > 0
            found[stage] = StageMemory(
                weights_bytes=size,
                limit_bytes=limit,
                kv_bytes_per_token=kv_bytes if has_kv else 0,
                state_bytes=states if has_kv else 0,
                kv_tokens_max=room // kv_bytes if has_kv and limit else None,
            )
    return found


def _weights_bytes(
    description: CheckpointDescription, part: str, section: StageConfig, info: ModelInfo
) -> int:
    """Return the size of a part's weights as served."""
    plain = description.parameters.get(part, 0) * info.itemsize
    found = description.weights_bytes.get(part, {})
    grouped = f"{section.weights}/{section.weights_group}"
    return found.get(grouped, found.get(section.weights, plain))


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
    check_writable({"--json": None if out == STANDARD_OUTPUT else out})
    loaded = load_served(config, assignments, path)
    report = check_checkpoint(loaded)
    if out == STANDARD_OUTPUT:
        sys.stdout.buffer.write(msgspec.json.encode(_as_json(report)) + b"\n")
    else:
        for line in describe(report):
            typer.echo(line)
        if out is not None:
            write_json(out, _as_json(report))
            typer.echo(f"JSON: {out}")
    if report.problems:
        raise typer.Exit(1)


def _as_json(report: CheckpointReport) -> Any:
    return msgspec.to_builtins(report) | {"served": not report.problems}


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
    family = description.model_type or "unknown"
    architecture = description.architecture
    yield "family", f"{family} ({architecture})" if architecture else family
    yield "path", report.path
    yield "parameters", _parameters(description)
    sizes = description.sizes
    words = [f"{sizes[key]:,} {word}" for key, word in _SIZE_WORDS.items() if key in sizes]
    yield "language model", ", ".join(words) or "unknown"
    if any(description.windows):
        window, layers = description.windows
        kept = "which keep KV for the whole context, too"
        yield "windows", f"{window:,} tokens in {layers} layers, {kept}"
    yield "tokenizer", description.tokenizer or "none that can be read"
    yield "chat templates", ", ".join(description.chat_templates) or "none"
    if info is not None:
        yield from _served_facts(info)
    for size, tokens in report.image_tokens.items():
        reported = f"{tokens:,} tokens" if isinstance(tokens, int) else tokens
        yield "image", f"{size}: {reported}"
    if (video := report.video) is not None:
        size = f"{video.frames} frames of {video.size}: {video.tokens:,} tokens"
        pixels = f"{size_text(video.pixel_bytes)} of pixels"
        yield "video", f"{size}, {pixels}; arena.pixel_bytes holds {video.at_once} at once"
    if report.devices:
        yield "devices", report.devices
    if report.placement:
        yield "stages", report.placement
    yield "cores", report.cores
    for stage, count in report.threads.items():
        fixed_by = report.threads_fixed_by[stage]
        why = f"fixed by {fixed_by}" if fixed_by else "adapts to other programs' load"
        threads = "1 thread" if count == 1 else f"{count} threads ({why})"
        yield "threads", f"{stage} rank: {threads}"
    if report.processes:
        yield "HTTP", f"in {report.processes} processes next to the engine's"
    for stage, need in report.memory.items():
        yield f"{stage} rank", _memory(need, info)
    for thing in report.unsupported:
        yield "not supported", thing


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
