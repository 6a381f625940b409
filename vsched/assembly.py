"""From a configuration to the parts of an engine: sizes, layouts, settings, rank specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vsched.aio.leader import Deadlines
from vsched.aio.sizing import Sizing, SizingLimits
from vsched.config import Config, ConfiguredPolicies
from vsched.config.byte_sizes import size_bytes
from vsched.errors import ConfigError, limit_message
from vsched.kernel import KernelPolicies, Sizes
from vsched.media.pipeline import MediaStatistics
from vsched.media.settings import MediaSettings
from vsched.memory import LedgerLine
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.memory import host_available
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec
from vsched.worker.stress import Load

PAGE_ROWS = 64
"""Embedding rows of an arena page: small enough to waste little, large enough to keep lists short."""


def kernel_policies(policies: ConfiguredPolicies) -> KernelPolicies:
    """Return the policies that the kernel consults."""
    return KernelPolicies(
        encode_admission=policies.encode_admission,
        generate_admission=policies.generate_admission,
        encoding=policies.encoding,
        embedding_eviction=policies.encode_eviction,
        prefix_eviction=policies.generate_eviction,
        preemption=policies.preemption,
    )


def media_settings(config: Config) -> MediaSettings:
    """Return the media pipeline's settings: the section has the same keys."""
    return MediaSettings(**msgspec.structs.asdict(config.media))


def arena_layout(config: Config, info: ModelInfo) -> ArenaLayout:
    """Return the arena's layout for a checkpoint.

    Raises:
        ConfigError: When the embedding region is smaller than one page.
    """
    page_bytes = PAGE_ROWS * info.embedding_row_bytes
    pages = config.arena.embedding_bytes // page_bytes
    if pages < 1:
        raise ConfigError(
            limit_message(
                "arena.embedding_bytes: smaller than one page",
                value=config.arena.embedding_bytes,
                limit=f"at least {page_bytes} bytes for this checkpoint",
                remedy="raise arena.embedding_bytes",
            )
        )
    return ArenaLayout(
        pixel_bytes=config.arena.pixel_bytes,
        pages=pages,
        page_rows=PAGE_ROWS,
        row_bytes=info.embedding_row_bytes,
    )


def context_tokens(config: Config, info: ModelInfo) -> int:
    """Return the longest sequence: as configured, but never longer than the checkpoint allows.

    Raises:
        ConfigError: When more is configured than the checkpoint allows.
    """
    wanted = config.generate.context_tokens
    if wanted > info.context_tokens:
        raise ConfigError(
            limit_message(
                "generate.context_tokens: more than the checkpoint was made for",
                value=wanted,
                limit=f"{info.context_tokens} tokens",
                remedy="lower it, or set it to 0 for the checkpoint's",
            )
        )
    return wanted or info.context_tokens


def kernel_sizes(
    config: Config, info: ModelInfo, policies: ConfiguredPolicies, *, blocks: int
) -> Sizes:
    """Return the kernel's limits for a KV cache of so many blocks."""
    generate = config.generate
    return Sizes(
        block_size=generate.block_size,
        blocks=blocks,
        slots=generate.slots,
        batch_tokens=generate.max_batch_tokens,
        chunk_tokens=generate.chunk_tokens,
        step_target_ns=int(generate.step_target_ms * 1e6),
        context_tokens=context_tokens(config, info),
        page_rows=PAGE_ROWS,
        pages=arena_layout(config, info).pages,
        encode_items=policies.encode_items_max,
        waiting=generate.max_waiting,
        waiting_bytes=generate.max_waiting_bytes,
        prefix_cache=generate.prefix_cache,
    )


def leader_deadlines(config: Config) -> Deadlines:
    """Return how long leaders wait for ranks."""
    limits = config.deadlines
    return Deadlines(
        ready_s=limits.ready_s,
        step_s=limits.step_s,
        heartbeat_s=limits.heartbeat_s,
        rank_timeout_s=limits.rank_timeout_s,
    )


def rank_roles(
    config: Config, info: ModelInfo, policies: ConfiguredPolicies
) -> list[tuple[EncodeRole | None, GenerateRole | None]]:
    """Return the roles of each crew: one crew a group, or one for both; addresses come later."""
    pixels_max = config.media.image_pixels_max if config.media.images_max else 0
    encode = EncodeRole(
        address="",
        plugin=config.encode.plugin,
        settings=WorkerSettings(device=config.encode.device, threads=config.encode.threads_used),
        items=policies.encode_items_max,
        tokens=policies.item_tokens_max or 0,
        pixels_max=pixels_max,
        reserved_bytes=size_bytes(config.encode.reserved, path="encode.reserved")
        if config.encode.reserved != ""
        else None,
    )
    generate = GenerateRole(
        address="",
        plugin=config.generate.plugin,
        settings=WorkerSettings(
            device=config.generate.device,
            threads=config.generate.threads_used,
            attention=config.generate.attention,
        ),
        load=Load(
            slots=config.generate.slots,
            batch_tokens=config.generate.max_batch_tokens,
            chunk_tokens=config.generate.chunk_tokens,
            context_tokens=context_tokens(config, info),
            block_size=config.generate.block_size,
        ),
        pixels_max=pixels_max,
    )
    if config.placement == "together":
        return [(encode, generate)]
    return [(encode, None), (None, generate)]


def rank_specs(
    config: Config, info: ModelInfo, policies: ConfiguredPolicies, *, arena: Arena, run_dir: str
) -> list[RankSpec]:
    """Return what a rank of each crew is told; rank, secret and addresses come with each start."""
    return [
        RankSpec(
            rank=0,
            secret="",
            run_dir=run_dir,
            arena_fd=arena.fd,
            layout=arena.layout,
            info=info,
            timeout_s=config.deadlines.rank_timeout_s,
            memory_limit_bytes=memory_limit(config, encode, generate),
            encode=encode,
            generate=generate,
        )
        for encode, generate in rank_roles(config, info, policies)
    ]


def memory_limit(config: Config, encode: EncodeRole | None, generate: GenerateRole | None) -> int:
    """Return the limit on the memory of a process with these roles, in bytes; 0 for none."""
    limits = []
    for role, section, path in (
        (encode, config.encode, "encode.memory_limit"),
        (generate, config.generate, "generate.memory_limit"),
    ):
        if role is None:
            continue
        if section.memory_limit != "auto":
            limits.append(size_bytes(section.memory_limit, path=path))
        else:
            limits.append(default_limit(host_available()) if section.device == "cpu" else 0)
    return sum(limits) if all(limits) else 0


def default_limit(available_bytes: int) -> int:
    """Return the share of a host's free memory that a rank may take unless the operator says.

    An eighth, or 2 GiB where an eighth is less, but never above a quarter: there may be two ranks, and other programs.
    """
    return min(max(available_bytes // 8, 2 << 30), available_bytes // 4)


def kv_sizing(config: Config, info: ModelInfo, policies: ConfiguredPolicies) -> Sizing:
    """Return what leads the generate group to the size of its KV cache."""
    layout = arena_layout(config, info)
    host = [
        LedgerLine("host", "engine", "arena", layout.pixel_bytes),
        LedgerLine("host", "engine", "embeddings in flight", layout.embedding_bytes),
        LedgerLine("host", "engine", "image preprocessing", config.media.decode_bytes),
    ]
    return Sizing(
        policies.memory,
        SizingLimits(
            bytes_per_token=info.kv_bytes_per_token,
            block_size=config.generate.block_size,
            context_tokens=context_tokens(config, info),
            batch_tokens=config.generate.max_batch_tokens,
            slots=config.generate.slots,
        ),
        encode_ranks=1,
        together=config.placement == "together",
        more=host,
    )


def memory_in_use(
    replicas: Sequence[Mapping[str, Any]],
    media: MediaStatistics | None,
    config: Config,
    info: ModelInfo,
) -> dict[str, int]:
    """Return what is used now, in bytes, of the lines of the ledger that are set aside for requests."""
    block_bytes = config.generate.block_size * info.kv_bytes_per_token
    page_bytes = PAGE_ROWS * info.embedding_row_bytes
    used = {"kv": 0, "embeddings in flight": 0, "arena": 0, "image preprocessing": 0}
    for replica in replicas:
        if replica:
            encode = replica["encode"]
            pages = encode["pages_total"] - encode["pages_free"] - encode["pages_evictable"]
            used["kv"] += replica["generate"]["blocks_held"] * block_bytes
            used["embeddings in flight"] += pages * page_bytes
    if media is not None:
        used["arena"] = media.pixels.bytes_held
        used["image preprocessing"] = media.decode.bytes_used
    return used
