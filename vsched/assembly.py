"""Derive the parts of an engine from its configuration: sizes, layouts, settings, rank specifications."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from vsched.aio.adapters import AdapterTable
from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Launcher
from vsched.aio.worker_groups import ServedGroups, WorkerGroup, WorkerGroupEvents, rank_device
from vsched.config import Config, ConfiguredPolicies
from vsched.config.devices import PARTS, placed
from vsched.config.policies import check_needs
from vsched.config.sections import RAY_HOST, size_bytes
from vsched.errors import ConfigError
from vsched.kernel import SchedulerLimits
from vsched.media.pipeline import MediaStatistics
from vsched.memory import LedgerLine
from vsched.policy import DRAFT_TOKENS_MAX, Draft, DraftingView, MemoryView
from vsched.policy_host.seats import PolicySeats
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, ModelInfo, SamplingDefaults, group_names, replica_of, stage_of
from vsched.worker.contract import Preprocessor, WorkerPlugin, WorkerSettings, supports
from vsched.worker.memory import host_available, status_bytes
from vsched.worker.registry import load_worker
from vsched.worker.spec import (
    EncodeRole,
    GenerateRole,
    HostShare,
    RankSpec,
    StepLimits,
    default_limit,
)

logger = logging.getLogger(__name__)
SAMPLES = 1000
"""Number of tokens compared between two vocabularies, evenly spread."""


def verifies_drafts(config: Config, info: ModelInfo, policies: ConfiguredPolicies) -> bool:
    """Return True if ranks can verify draft tokens; otherwise `generate.drafting` is never called.

    Raises:
        ConfigError: When ranks cannot, and the policy drafts for a request without a grammar; or when the policy uses a
            draft model, and none is configured.
    """
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    device = config.generate.device
    verifies = plugin.verifies_drafts(info, device=device)
    view = DraftingView(
        now_ns=0,
        held=False,
        outputs=1,
        outputs_max=256,
        running=1,
        rows_free=DRAFT_TOKENS_MAX,
        model=info.draft is not None,
    )
    seat = PolicySeats(policies.for_kernel()).add_seat("generate.drafting")
    draft: Draft = seat.decide(msgspec.structs.replace(view, state=seat.state))
    if draft.tokens and not verifies:
        raise ConfigError.of_limit(
            f"generate.drafting: the ranks of a model of type {info.family!r} cannot verify drafts on {device}",
            value=f"{draft.tokens} tokens a step",
            limit="none: drafts are for CPUs, and for models whose layers keep no state",
            remedy='set generate.drafting to {use = "none"}, or leave it out',
        )
    if draft.tokens and draft.model and info.draft is None:
        raise ConfigError(
            "generate.drafting: the policy drafts with a model, and there is none. Remedy: set generate.draft_model to "
            "the folder of a smaller checkpoint of the same vocabulary, or choose another policy."
        )
    if info.draft is not None and not draft.model:
        logger.warning(
            "generate.draft_model is loaded, and generate.drafting does not ask it for a request that runs alone; "
            'the policy that does is {use = "draft-model"}'
        )
    return verifies


def inspect_draft(config: Config, plugin: WorkerPlugin, info: ModelInfo) -> ModelInfo | None:
    """Return the text part of the configured draft model; None if there is none.

    Raises:
        CheckpointError: When the checkpoint does not exist, or does not support the number of ranks.
        ConfigError: When it cannot be used as a draft model.
    """
    path, generate = config.generate.draft_model, config.generate
    if not path:
        return None
    draft = plugin.inspect(path, dtype=config.model.dtype, item_tokens_max=0).text_alone
    # It reads prompts in chunks, even with bidirectional attention in the prompt: guesses may be slightly worse.
    draft = msgspec.structs.replace(draft, prompt_atomic=False, item_atomic=False)
    if generate.tensor_parallel > 1:
        plugin.check_parallel(draft, stage="generate", ranks=generate.tensor_parallel)
    for model, key in ((info, "model.path"), (draft, "generate.draft_model")):
        if not plugin.verifies_drafts(model, device=generate.device):
            raise ConfigError.of_limit(
                f"generate.draft_model: ranks cannot run drafts with the model of {key} on {generate.device}",
                value=f"model_type {model.family!r}",
                limit="drafts are for CPUs, and for models whose layers keep no state",
                remedy="leave generate.draft_model out",
            )
    return draft


def check_vocabulary(info: ModelInfo, own: Preprocessor, other: Preprocessor) -> None:
    """Check that a draft model has the target model's vocabulary; sizes may differ by padding.

    Raises:
        ConfigError: When a token differs.
    """
    size = min(own.info.vocab_size, other.info.vocab_size)
    for token in range(0, size, max(size // SAMPLES, 1)):
        one, drafted = own.token_bytes(token), other.token_bytes(token)
        if one != drafted:
            raise ConfigError.of_limit(
                "generate.draft_model: it has another vocabulary",
                value=f"token {token} is {drafted!r} there",
                limit=f"{one!r}, as in {info.path}",
                remedy="choose a smaller model of the same family, or leave it out",
            )


FrontEnd = tuple[Preprocessor, bool]
"""The preprocessor of requests, and whether ranks can report the log-probabilities of prompt tokens."""


def load_front_end(plugin: WorkerPlugin, info: ModelInfo, *, ranks: int) -> FrontEnd:
    """Load the preprocessor, and ask the plug-in whether `ranks` ranks can report prompt log-probabilities."""
    computes = plugin.computes_prompt_logprobs(info, ranks=ranks)
    preprocessor = plugin.load_preprocessor(info)
    if info.draft is not None:
        check_vocabulary(info, preprocessor, plugin.load_preprocessor(info.draft))
    return preprocessor, computes


STATE_SNAPSHOTS_MAX = 64
"""Maximum number of recurrent state snapshots by default: with tens of MB each, more would displace the KV cache."""
PAGE_ROWS = 64
"""Embedding rows per arena page: small enough to waste little, large enough for short page lists."""


def inspect_checkpoint(config: Config, policies: ConfiguredPolicies) -> ModelInfo:
    """Return the facts of the configured checkpoint, without loading weights, and check the configuration against it.

    Context length, chat template and sampling defaults are the configured ones, so every user of the facts sees the
    same.

    Raises:
        CheckpointError: If there is no checkpoint, or it cannot be served with this configuration.
        ConfigError: If the configuration does not fit the checkpoint.
    """
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    info = plugin.inspect(
        config.model.path,
        dtype=config.model.dtype,
        item_tokens_max=policies.item_tokens_max or 0,
    )
    config, info = as_served(config, info)
    if config.generate.kv_dtype == "int8":
        _check_kv_heads(config, info)
        info = info.with_int8_kv
    check_parallel(config, info)
    arena_layout(config, info)
    _check_atoms(config, info)
    _check_swapping(config, info)
    check_needs(config, policies.by_table)
    return msgspec.structs.replace(
        info,
        draft=inspect_draft(config, plugin, info),
        context_tokens=context_tokens(config, info),
        sampling=info.sampling if config.model.sampling_defaults else SamplingDefaults(),
        chat_template=config.model.chat_template,
    )


def _check_kv_heads(config: Config, info: ModelInfo) -> None:
    if not info.kv_heads_per_token:
        raise ConfigError.of_limit(
            f"generate.kv_dtype: {config.generate.plugin} does not report the heads of model_type {info.family!r}, "
            "each of which would have a scale",
            value=config.generate.kv_dtype,
            limit="auto",
            remedy="set it to auto, or leave it out",
        )


def as_served(config: Config, info: ModelInfo) -> tuple[Config, ModelInfo]:
    """Return both with the placement resolved; without images if the checkpoint takes none or there are no encoders."""
    if info.takes_images and config.encode.replicas:
        return placed(config), info
    return config.text_alone, info.text_alone


def arena_layout(config: Config, info: ModelInfo) -> ArenaLayout:
    """Layout of the arena for a checkpoint; empty without encoders.

    Raises:
        ConfigError: If the embedding region is smaller than one page.
    """
    if not config.encode.replicas:
        return ArenaLayout(pixel_bytes=0, pages=0, page_rows=PAGE_ROWS, row_bytes=0)
    page_bytes = PAGE_ROWS * info.embedding_row_bytes
    pages = config.arena.embedding_bytes // page_bytes
    if pages < 1:
        raise ConfigError.of_limit(
            "arena.embedding_bytes: smaller than one page",
            value=config.arena.embedding_bytes,
            limit=f"at least {page_bytes} bytes for this checkpoint",
            remedy="raise arena.embedding_bytes",
        )
    return ArenaLayout(
        pixel_bytes=config.arena.pixel_bytes,
        pages=pages,
        page_rows=PAGE_ROWS,
        row_bytes=info.embedding_row_bytes,
    )


def context_tokens(config: Config, info: ModelInfo) -> int:
    """Maximum sequence length: as configured, or the checkpoint's.

    Raises:
        ConfigError: If the configured length exceeds the checkpoint's.
    """
    wanted = config.generate.context_tokens
    if wanted > info.context_tokens:
        raise ConfigError.of_limit(
            "generate.context_tokens: more than the checkpoint supports",
            value=wanted,
            limit=f"{info.context_tokens} tokens",
            remedy="lower it, or set it to 0 for the checkpoint's",
        )
    return wanted or info.context_tokens


def scheduler_limits(
    config: Config,
    info: ModelInfo,
    policies: ConfiguredPolicies,
    *,
    blocks: int,
    drafts: bool = False,
) -> SchedulerLimits:
    """Kernel limits for a KV cache of `blocks` blocks; `drafts` means that ranks can verify draft tokens.

    Raises:
        ConfigError: If no step can hold an image that must not be split.
    """
    generate, snapshots = config.generate, state_snapshots(config, info)
    _check_atoms(config, info)
    return SchedulerLimits(
        block_size=generate.block_size,
        blocks=blocks,
        slots=generate.slots,
        batch_tokens=generate.max_batch_tokens,
        chunk_tokens=generate.chunk_tokens,
        prefill_target_ns=int(generate.prefill_target_ms * 1e6),
        step_target_ns=int(generate.step_target_ms * 1e6),
        step_target_ratio=generate.step_target_ratio,
        context_tokens=context_tokens(config, info),
        page_rows=PAGE_ROWS,
        pages=arena_layout(config, info).pages,
        encode_items=policies.encode_items_max,
        waiting=generate.max_waiting,
        waiting_bytes=generate.max_waiting_bytes,
        # Without snapshots, cached blocks lack the recurrent state at their end, so they cannot be reused. Neither can
        # they if later prompt tokens influenced them (bidirectional attention).
        prefix_cache=generate.prefix_cache
        and not (info.state_bytes and not snapshots)
        and not info.prompt_atomic,
        state_snapshots=snapshots if info.state_bytes else None,
        waiting_ns=int(config.deadlines.waiting_s * 1e9),
        passed_over_ns=int(config.policies.passed_over_max_s * 1e9),
        encoders=config.encode.replicas,
        generators=generate.replicas,
        encode_pauses=config.encode_pauses,
        item_atomic=info.item_atomic,
        prompt_atomic=info.prompt_atomic,
        drafts=drafts,
        draft_model=info.draft is not None,
        swap_blocks=swap_blocks(config, info),
    )


def _check_atoms(config: Config, info: ModelInfo) -> None:
    """Check that a step can hold the largest image, if attention is bidirectional within the image or the prompt."""
    generate = config.generate
    room = generate.max_batch_tokens - generate.slots
    sees = info.item_atomic or info.prompt_atomic
    if info.takes_images and sees and info.item_tokens_max > room:
        whose = "within its prompt" if info.prompt_atomic else "within it"
        raise ConfigError.of_limit(
            "generate.max_batch_tokens: too small beyond one decode per slot: one step must hold an image whole, "
            f"because attention {whose} is bidirectional in model_type {info.family!r}",
            value=room,
            limit=f"at least {info.item_tokens_max} tokens",
            remedy=f"set it to {info.item_tokens_max + generate.slots}, or generate.slots lower",
        )


def _check_swapping(config: Config, info: ModelInfo) -> None:
    generate = config.generate
    plugin = load_worker(generate.plugin, path="generate.plugin")
    if not swap_blocks(config, info):
        return
    if not plugin.swaps_kv(info, device=generate.device):
        raise ConfigError.of_limit(
            f"generate.swap_memory: the ranks of {generate.plugin} cannot swap KV blocks of model_type "
            f"{info.family!r} on {generate.device}",
            value=generate.swap_memory,
            limit="0",
            remedy="set it to 0, or leave it out: preempted requests are recomputed",
        )


def swap_blocks(config: Config, info: ModelInfo) -> int:
    """Number of KV blocks that fit into the swap memory of each rank.

    Raises:
        ConfigError: If swapping is configured and the model also has recurrent state.
    """
    generate = config.generate
    size = size_bytes(generate.swap_memory, path="generate.swap_memory")
    if not size:
        return 0
    if info.state_bytes:
        raise ConfigError.of_limit(
            f"generate.swap_memory: layers of model_type {info.family!r} keep a state, and without it swapped KV "
            "blocks cannot be used",
            value=generate.swap_memory,
            limit="0",
            remedy="set it to 0, or leave it out: preempted requests continue from snapshots",
        )
    block_bytes = generate.block_size * rank_kv_bytes_per_token(config, info)
    if size < block_bytes:
        raise ConfigError.of_limit(
            "generate.swap_memory: smaller than one KV block",
            value=generate.swap_memory,
            limit=f"at least {block_bytes} bytes for this checkpoint",
            remedy="raise it, or set it to 0 for none",
        )
    return size // block_bytes


def adapter_table(
    config: Config, info: ModelInfo, groups: ServedGroups, *, run_dir: str
) -> AdapterTable:
    """Create the table of adapters that requests may use; copies of their files are kept below `run_dir`."""
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    keep = None
    if supports(plugin, "keep_adapter"):
        keep = partial(plugin.keep_adapter, info, rank_max=config.adapters.rank_max)
    return AdapterTable(config, groups, keep, kept_in=str(Path(run_dir) / "adapters"))


def check_parallel(config: Config, info: ModelInfo) -> None:
    """Check with the plug-ins that the model can be split across the configured number of ranks.

    Raises:
        CheckpointError: If it cannot.
    """
    for stage, section in (("encode", config.encode), ("generate", config.generate)):
        if section.replicas and section.tensor_parallel > 1:
            plugin = load_worker(section.plugin, path=f"{stage}.plugin")
            plugin.check_parallel(info, stage=stage, ranks=section.tensor_parallel)


def _worker_settings(
    config: Config, stage: Literal["encode", "generate"], replica: int, **own: Any
) -> WorkerSettings:
    section = config.encode if stage == "encode" else config.generate
    return WorkerSettings(
        device=rank_device(section.device, replica * section.tensor_parallel),
        threads=config.threads(stage),
        threads_fixed=bool(config.threads_fixed_by(stage)),
        deterministic=config.model.deterministic,
        promises=config.generate.kv_pages == "on_use",
        adapter_rank_max=config.adapters.rank_max,
        **section.quantization,
        **own,
    )


def _encode_role(config: Config, policies: ConfiguredPolicies, replica: int) -> EncodeRole:
    section, reserved = config.encode, config.encode.reserved
    return EncodeRole(
        plugin=section.plugin,
        settings=_worker_settings(
            config,
            "encode",
            replica,
            adapters=config.adapters.count_max if config.adapters.encoder else 0,
        ),
        items=policies.encode_items_max,
        tokens=policies.item_tokens_max or 0,
        pixels_max=_pixels_max(config),
        reserved_bytes=size_bytes(reserved, path="encode.reserved") if reserved != "" else None,
    )


def _generate_role(config: Config, info: ModelInfo, replica: int) -> GenerateRole:
    section = config.generate
    return GenerateRole(
        plugin=section.plugin,
        settings=_worker_settings(
            config,
            "generate",
            replica,
            attention=section.attention,
            slots=section.slots,
            state_snapshots=state_snapshots(config, info),
            adapters=config.adapters.count_max,
        ),
        limits=StepLimits(
            slots=section.slots,
            batch_tokens=section.max_batch_tokens,
            chunk_tokens=longest_chunk(config, info),
            context_tokens=context_tokens(config, info),
            block_size=section.block_size,
            state_snapshots=state_snapshots(config, info),
            swap_blocks=swap_blocks(config, info),
        ),
        pixels_max=_pixels_max(config),
        draft=None if info.draft is None else _share_of(config, info.draft),
    )


def longest_chunk(config: Config, info: ModelInfo) -> int:
    """Maximum tokens of one sequence in a step: the chunk size, or the largest unsplittable input if larger."""
    generate = config.generate
    whole = info.item_tokens_max if info.item_atomic else 0
    if info.prompt_atomic:
        whole = generate.max_batch_tokens - generate.slots
    return max(generate.chunk_tokens, whole)


def _pixels_max(config: Config) -> int:
    return config.media.image_pixels_max if config.media.images_max else 0


def rank_kv_bytes_per_token(config: Config, info: ModelInfo) -> int:
    """One rank's share of the KV cache bytes per token."""
    return info.kv_bytes_per_token // (config.generate.tensor_parallel if info.shares_kv else 1)


def cached_bytes_per_token(config: Config, info: ModelInfo) -> int:
    """KV cache bytes per token on one rank: those of the model and of its draft model."""
    models = [info] if info.draft is None else [info, info.draft]
    return sum(rank_kv_bytes_per_token(config, one) for one in models)


def _share_of(config: Config, info: ModelInfo) -> ModelInfo:
    kv_bytes = rank_kv_bytes_per_token(config, info)
    return msgspec.structs.replace(info, kv_bytes_per_token=kv_bytes)


def state_snapshots(config: Config, info: ModelInfo) -> int:
    """Number of recurrent state snapshots: as configured, by default that of slots; none without a prefix cache."""
    generate = config.generate
    if not info.state_bytes or not generate.prefix_cache:
        return 0
    if generate.state_snapshots is None:
        return min(generate.slots, STATE_SNAPSHOTS_MAX)
    return generate.state_snapshots


def state_bytes(config: Config, info: ModelInfo) -> int:
    """Bytes of the recurrent states of all slots and of the snapshots, on one rank."""
    return (config.generate.slots + state_snapshots(config, info)) * info.state_bytes


def rank_specs(config: Config, info: ModelInfo, policies: ConfiguredPolicies) -> list[RankSpec]:
    """Specifications of the ranks of each worker group, encoders first.

    Values that differ by rank or host are filled in at each start.
    """
    encoders = {
        name: _encode_role(config, policies, replica)
        for replica, name in enumerate(group_names("encode", config.encode.replicas))
    }
    generators = {
        name: _generate_role(config, info, replica)
        for replica, name in enumerate(group_names("generate", config.generate.replicas))
    }
    groups: Iterable[tuple[str, ...]] = ((name,) for name in (*encoders, *generators))
    if config.placement == "together":
        groups = zip(encoders, generators, strict=True)
    layout, share = arena_layout(config, info), _share_of(config, info)
    specs = [
        RankSpec(
            groups=names,
            ranks=config.stage(stage_of(names[-1])).tensor_parallel,
            layout=layout,
            info=share,
            timeout_s=config.deadlines.rank_timeout_s,
            encode=encoders.get(names[0]),
            generate=generators.get(names[-1]),
        )
        for names in groups
    ]
    return [_with_memory(config, info, spec, specs) for spec in specs]


def make_worker_groups(
    config: Config,
    info: ModelInfo,
    policies: ConfiguredPolicies,
    events: WorkerGroupEvents,
    *,
    launcher: Launcher,
    arena: Arena,
    sizing: Sizing,
) -> list[WorkerGroup]:
    """Create the worker groups, without starting them."""
    return [
        WorkerGroup(spec, launcher, arena, deadlines=config.deadlines, events=events, sizing=sizing)
        for spec in rank_specs(config, info, policies)
    ]


def _with_memory(
    config: Config, info: ModelInfo, spec: RankSpec, specs: Sequence[RankSpec]
) -> RankSpec:
    """Fill in the memory limit of a process on the engine's host, and the share of any other host."""
    host = _host_of(config, spec)
    limits = [config.memory_limit(stage) for stage in spec.roles]
    known = sum(
        _weights_bytes(config, spec, stage) if limit is None else limit
        for stage, limit in zip(spec.roles, limits, strict=True)
    )
    share = HostShare(
        # Each replica on Ray has its own resources.
        processes=spec.ranks if host == RAY_HOST else config.processes_on(host),
        threads=tuple(stage for stage in spec.roles if config.stage(stage).threads is None),
        memory=0 if 0 in limits else limits.count(None),
        memory_bytes=known,
        context_bytes=_context_bytes(config, info) if spec.generate else 0,
        weights_bytes=sum(
            one.ranks * _weights_bytes(config, one, stage)
            for one in ([spec] if host == RAY_HOST else specs)
            if _host_of(config, one) == host
            for stage in one.roles
        ),
    )
    limit = 0 if 0 in limits else known
    if share.memory:
        free_bytes = host_available() - share.weights_bytes
        limit = default_limit(share, free_bytes, ranks=config.ranks)
    return msgspec.structs.replace(spec, memory_limit_bytes=limit, share=share)


def _context_bytes(config: Config, info: ModelInfo) -> int:
    """KV cache of one request of the longest context, and all states, of a rank without a configured limit."""
    if config.memory_limit("generate") is not None:
        return 0
    kv_bytes = context_tokens(config, info) * cached_bytes_per_token(config, info)
    return kv_bytes + state_bytes(config, info)


def _host_of(config: Config, spec: RankSpec) -> str:
    group = spec.groups[-1]
    return config.cluster.first_host(stage_of(group), replica_of(group))


def _weights_bytes(config: Config, spec: RankSpec, stage: str) -> int:
    """Approximate size of the weights of one rank's role, as served; 0 if the plug-in does not know it."""
    weights = config.stage(stage).weights
    part = PARTS[weights]
    if stage == "encode":
        return int(spec.info.vision_bytes * part) // spec.ranks
    models = (spec.info, spec.info.draft) if spec.info.draft is not None else (spec.info,)
    quantized = weights != "auto"
    return sum(
        each.rank_bytes(int(each.language_bytes * part), spec.ranks, quantized=quantized)
        for each in models
    )


def create_sizing(config: Config, info: ModelInfo, policies: ConfiguredPolicies) -> Sizing:
    """Create the negotiation of the generate groups' KV cache sizes."""
    layout = arena_layout(config, info)
    host = [
        LedgerLine("host", "engine", "arena", layout.pixel_bytes),
        LedgerLine("host", "engine", "embeddings in flight", layout.embedding_bytes),
        LedgerLine("host", "engine", "image preprocessing", config.media.decode_bytes),
    ]
    encoders = group_names("encode", config.encode.replicas)
    generators = group_names("generate", config.generate.replicas)
    more = [*(host if encoders else []), *_swap_lines(config, info)]
    encoder_of = encoders if config.placement == "together" else [""] * len(generators)
    return Sizing(
        policies.memory,
        MemoryView(
            bytes_per_token=cached_bytes_per_token(config, info),
            block_size=config.generate.block_size,
            context_tokens=context_tokens(config, info),
            batch_tokens=config.generate.max_batch_tokens,
            slots=config.generate.slots,
            state_bytes=state_bytes(config, info),
        ),
        encode=dict.fromkeys(encoders, config.encode.tensor_parallel),
        generate=dict(zip(generators, encoder_of, strict=True)),
        more=more,
        pausing=config.encode_pauses,
        host_free=host_available,
    )


def _swap_lines(config: Config, info: ModelInfo) -> list[LedgerLine]:
    """Host memory of each generate rank for swapped-out blocks."""
    places = swap_blocks(config, info)
    size = places * config.generate.block_size * rank_kv_bytes_per_token(config, info)
    return [
        LedgerLine("host", f"{name} rank {rank}", "swap", size)
        for name in group_names("generate", config.generate.replicas)
        for rank in range(config.generate.tensor_parallel)
        if places
    ]


def memory_in_use(
    statistics: Mapping[str, Any],
    media: MediaStatistics | None,
    config: Config,
    info: ModelInfo,
) -> dict[str, int]:
    """Bytes in use now, for each ledger line that is set aside for requests.

    Totals over all groups and ranks: `info` describes the whole model.
    """
    encode = statistics["encode"]
    pages = encode["pages_total"] - encode["pages_free"] - encode["pages_evictable"]
    blocks = config.generate.block_size * config.generate.tensor_parallel
    block_bytes = blocks * rank_kv_bytes_per_token(config, info)
    generate = statistics["generate"]
    used = {
        "kv": generate["blocks_held"] * blocks * cached_bytes_per_token(config, info),
        "embeddings in flight": pages * PAGE_ROWS * info.embedding_row_bytes,
        "arena": 0,
        "image preprocessing": 0,
    }
    if swap_blocks(config, info):
        used["swap"] = generate["swap_blocks_held"] * block_bytes
    if info.state_bytes:
        used["state"] = (generate["prefilling"] + generate["decoding"]) * info.state_bytes
    if media is not None:
        used["arena"] = media.pixels.bytes_held
        used["image preprocessing"] = media.decode.bytes_used
    return used


def engine_memory(layout: ArenaLayout, *, images: int, grammars: int) -> dict[str, int]:
    """Memory of the engine's process and of the servers with these process ids, in bytes; 0 without a server."""
    return {
        "engine_resident": status_bytes("VmRSS"),
        "image_server_resident": _resident(images),
        "grammar_server_resident": _resident(grammars),
        "arena_pixels": layout.pixel_bytes,
        "arena_embeddings": layout.embedding_bytes,
    }


def _resident(pid: int) -> int:
    try:
        return status_bytes("VmRSS", Path(f"/proc/{pid}/status")) if pid else 0
    except OSError:
        return 0  # it has just ended
