"""An engine with in-process ranks: it starts in milliseconds, so a test can have a hundred of them.

Everything else is real: media pipeline, arena, kernel, policies, decision log, rank state, models.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from vsched import Engine
from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Launcher
from vsched.aio.leader import Leader
from vsched.aio.worker_groups import WorkerGroup, WorkerGroupEvents
from vsched.assembly import worker_group_plans
from vsched.config import Config, resolve_policies
from vsched.kernel.decisions import Decision, EncodeDecision, GenerateDecision
from vsched.transport.arena import Arena
from vsched.types import ModelInfo
from vsched.wire import (
    EncodeResult,
    FollowerLog,
    GenerateResult,
    LeaderLog,
    Paused,
    Ready,
    ThreadsInUse,
)
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.stage_rank import EncodeRank
from vsched_workers.plugin import plugin


class InProcessEngine(Engine):
    """Serves like `Engine`, without rank processes."""

    def _worker_groups(
        self, arena: Arena, launcher: Launcher, sizing: Sizing, events: WorkerGroupEvents
    ) -> list[WorkerGroup]:
        return [InProcessRanks(self.config, self.info, arena, events)]


ENCODE_SHARE = 0.8
"""Share of turns of the encode group when both could run: it runs ahead of generate steps in flight."""


@dataclass(frozen=True)
class InProcessLeader:
    """Carries out the decisions of one group."""

    decide: Callable[[Decision], None]
    memory: dict[int, dict[str, int]] = field(default_factory=dict)
    threads: dict[int, ThreadsInUse] = field(default_factory=dict)


class InProcessRanks(WorkerGroup):
    """Carries out decisions on the event loop, one per turn, in order within each group."""

    def __init__(
        self, config: Config, info: ModelInfo, arena: Arena, events: WorkerGroupEvents
    ) -> None:
        self.groups = ["encode", "generate"]
        self.down, self.retired, self._restarting = False, None, None
        self._settled = asyncio.Event()
        self._config = config
        self._info = info
        self._arena = arena
        self._events = events
        self._logs = {group: (LeaderLog(), FollowerLog()) for group in self.groups}
        self._sent: dict[str, deque[bytes]] = {group: deque() for group in self.groups}
        self._pace = random.Random(1)
        self._encoder: EncodeRank | None = None
        self._generator: GenerateRank | None = None

    async def start(self) -> dict[str, list[Ready]]:
        info, embeddings = self._info, self._arena.embeddings
        plans = worker_group_plans(self._config, info, resolve_policies(self._config))
        encode = next(plan.encode for plan in plans if plan.encode is not None)
        generate = next(plan.generate for plan in plans if plan.generate is not None)
        encoder = plugin.load_encoder(info, encode.settings, lambda _what, _fraction: None)
        generator = plugin.load_generator(info, generate.settings, lambda _what, _fraction: None)
        blocks = self._config.generate.memory["tokens"] // generate.limits.block_size
        generator.build_kv(blocks=blocks, block_size=generate.limits.block_size)
        self._encoder = EncodeRank(encoder, embeddings, self._arena.read)
        self._generator = GenerateRank(
            generator,
            embeddings,
            slots=generate.limits.slots,
            context_tokens=generate.limits.context_tokens,
            block_size=generate.limits.block_size,
        )
        return {"encode": [Ready(0, {})], "generate": [Ready(blocks, {})]}

    def leader(self, group: str) -> Leader:
        return cast("Leader", InProcessLeader(partial(self.decide, group)))

    def decide(self, group: str, decision: Decision) -> None:
        self._sent[group].append(self._logs[group][0].append(decision))
        asyncio.get_running_loop().call_soon(self._carry_out)

    def _carry_out(self) -> None:
        if self._encoder is None or self._generator is None:
            return  # stopped meanwhile
        waiting = [group for group in self.groups if self._sent[group]]
        group = waiting[0 if self._pace.random() < ENCODE_SHARE else -1]
        result: EncodeResult | GenerateResult | Paused
        match self._logs[group][1].accept(self._sent[group].popleft()):
            case EncodeDecision() as decision:
                result = self._encoder.apply(decision)
            case GenerateDecision() as decision:
                result = self._generator.apply(decision)
            case entry:
                raise AssertionError(f"no decision: {entry}")
        assert not isinstance(result, Paused), "nothing was sent in layers"
        self._events.on_result(group, result)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Release the arena, which closes next."""
        self._encoder = self._generator = None

    @property
    def pids(self) -> list[int]:
        return []
