"""What a rank process is told when it starts."""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.types import ArenaLayout, ModelInfo
from vsched.worker.contract import WorkerSettings


class EncodeRole(msgspec.Struct, frozen=True, kw_only=True):
    """The rank belongs to an encode group."""

    address: str
    plugin: str
    settings: WorkerSettings


class GenerateRole(msgspec.Struct, frozen=True, kw_only=True):
    """The rank belongs to a generate group. `memory` is the memory policy's table."""

    address: str
    plugin: str
    settings: WorkerSettings
    memory: dict[str, Any]
    slots: int
    block_size: int
    context_tokens: int
    tokens_min: int


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its roles (two where the stages share a process) and what they share."""

    rank: int
    secret: str
    run_dir: str
    arena_fd: int
    layout: ArenaLayout
    info: ModelInfo
    timeout_s: float
    encode: EncodeRole | None = None
    generate: GenerateRole | None = None
