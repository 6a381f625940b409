"""Start-up of a rank, from its specification to readiness; like `member`, it never blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic

from vsched.errors import ConfigError, RankDesync
from vsched.transport.arena import Arena
from vsched.types import ModelInfo
from vsched.wire import AcceptKv, Heartbeat, Loaded, Ready, Reserved, SizeKv
from vsched.worker.contract import (
    EncodeWorker,
    GenerateWorker,
    Grammars,
    Progress,
    WorkerPlugin,
    WorkerSettings,
    supports,
)
from vsched.worker.drafts import DraftModel, DraftWorker
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.kv_builder import KvBuilder
from vsched.worker.member import Link, Member, RankHost
from vsched.worker.profiling_run import StepLimits, image_for
from vsched.worker.reserve import reserve_encoder
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec
from vsched.worker.stage_rank import EncodeRank


class RankLoading(Generic[Link]):
    """Loads the models of the roles, and reports ready after a KV cache is accepted.

    `members` are those of the encode group and the generate group, if the rank has the role.

    Attributes:
        sizing: The member whose leader sends orders about the KV cache; None once the rank is ready.
    """

    def __init__(
        self,
        spec: RankSpec,
        arena: Arena,
        members: Sequence[Member[Link]],
        host: RankHost | None = None,
    ) -> None:
        self.sizing: Member[Link] | None = None
        self._spec = spec
        self._arena = arena
        self._members = members
        self._host = host or RankHost()
        self._ready: list[Ready] = []
        self._builder: KvBuilder
        self._finish: Callable[[], None]

    def begin(self) -> None:
        """Load the models; orders about the KV cache follow.

        Raises:
            CheckpointError, DeviceOutOfMemory: From the worker.
        """
        members = iter(self._members)
        if self._spec.encode is not None:
            self._load_encoder(self._spec.encode, next(members))
        if self._spec.generate is not None:
            self._load_generator(self._spec.generate, next(members))
        else:
            self._report_ready()

    def take(self, frame: bytes) -> None:
        """Execute an order: build, measure or drop a KV cache, or serve with the current one.

        Raises:
            RankDesync: When the entry is no such order, or does not match the current KV cache.
        """
        member, builder = self.sizing, self._builder
        assert member is not None, "the rank is ready"
        match member.log.accept(frame):
            case SizeKv() as order:
                if order.tokens:
                    member.progress(f"measuring a KV cache of {order.tokens} tokens", 0.0)
                member.report(builder.carry_out(order))
            case AcceptKv(blocks):
                if blocks != builder.blocks:
                    raise RankDesync(
                        f"{blocks} KV blocks are accepted, {builder.blocks} stand on this rank"
                    )
                builder.settle()
                self._finish()
            case Heartbeat():
                pass
            case entry:
                raise RankDesync(f"heard {type(entry).__name__} before a KV cache was accepted")

    def _load_encoder(self, role: EncodeRole, member: Member[Link]) -> None:
        spec, arena, host = self._spec, self._arena, self._host
        plugin = host.load_worker(role.plugin)
        worker = plugin.load_encoder(spec.info, role.settings, member.progress)
        adapters = _adapter_memory(worker, role.settings)
        member.progress("measuring the largest batch of images", 0.0)
        loaded, reservation = reserve_encoder(
            plugin, worker, spec.info, role, rank=spec.rank, collect=host.collect
        )
        member.report(Reserved(loaded, reservation))
        member.stage = EncodeRank(worker, arena.embeddings, arena.read, rank=spec.rank)
        memory = {"weights": loaded.weights_bytes, "activations": reservation.growth_bytes}
        memory |= {**adapters, **host.memory()}
        self._ready.append(Ready(0, memory, member.stage.hooks()))

    def _load_generator(self, role: GenerateRole, member: Member[Link]) -> None:
        spec, host = self._spec, self._host
        plugin = host.load_worker(role.plugin)
        # Before the target model, whose process-wide settings, such as torch's threads, must prevail.
        draft = _load_draft(plugin, role, member.progress)
        worker = plugin.load_generator(spec.info, role.settings, member.progress)
        adapters = _adapter_memory(worker, role.settings)
        # Before memory is measured, because it needs some for a large vocabulary.
        grammars = plugin.load_grammars(spec.info)
        image = image_for(plugin, spec.info, role.limits, pixels_max=role.pixels_max)
        builder = self._builder = KvBuilder(
            worker,
            spec.info,
            role.limits,
            rank=spec.rank,
            image=image,
            draft=draft,
            collect=host.collect,
        )
        member.report(Loaded(builder.measure()))

        def finish() -> None:
            member.stage = self._generate_rank(role.limits, worker, grammars, draft, builder.blocks)
            memory = {"weights": worker.weights_bytes, "kv": builder.kv_bytes, **adapters}
            memory |= host.memory()
            if draft is not None:
                memory["draft model"] = draft.worker.weights_bytes
            if role.limits.swap_blocks:
                block_bytes = role.limits.block_size * spec.info.kv_bytes_per_token
                memory["swap"] = role.limits.swap_blocks * block_bytes
            if spec.info.state_bytes:
                memory["state"] = builder.state_bytes
            self._ready.append(Ready(builder.blocks, memory, member.stage.hooks()))
            self._report_ready()

        self._finish = finish
        self.sizing = member

    def _generate_rank(
        self,
        limits: StepLimits,
        worker: GenerateWorker,
        grammars: Grammars | None,
        draft: DraftWorker | None,
        blocks: int,
    ) -> GenerateRank:
        info = self._spec.info
        if limits.swap_blocks:
            _build_swap(worker, limits.swap_blocks)
        return GenerateRank(
            worker,
            self._arena.embeddings,
            slots=limits.slots,
            context_tokens=limits.context_tokens,
            block_size=limits.block_size,
            keeps_state=info.state_bytes > 0,
            grammars=grammars,
            swap_blocks=limits.swap_blocks,
            draft_model=None if draft is None else _draft_model(draft, info, limits, blocks),
            now_ns=self._host.now_ns,
        )

    def _report_ready(self) -> None:
        self.sizing = None
        for member, report in zip(self._members, self._ready, strict=True):
            member.stage.begin()
            member.report_ready(report)


def _load_draft(plugin: WorkerPlugin, role: GenerateRole, progress: Progress) -> DraftWorker | None:
    """Load the draft model, if there is one.

    It has no adapters, and no calibration file, which is for the target model. It need not be deterministic: all ranks
    compute the same draft tokens, which are verified.
    """
    if role.draft is None:
        return None
    meeting = role.settings.rendezvous
    settings = dataclasses.replace(
        role.settings,
        adapters=0,
        deterministic=False,
        calibration="",
        rendezvous=f"{meeting}-draft" if meeting else "",
    )
    return DraftWorker(plugin.load_generator(role.draft, settings, progress), role.draft)


def _draft_model(
    draft: DraftWorker, info: ModelInfo, limits: StepLimits, blocks: int
) -> DraftModel:
    return DraftModel(
        draft,
        vocabulary=info.vocab_size,
        blocks=blocks,
        block_size=limits.block_size,
        chunk_tokens=limits.chunk_tokens,
        batch_tokens=limits.batch_tokens,
    )


def _build_swap(worker: GenerateWorker, blocks: int) -> None:
    """Have a worker allocate host memory for swapped blocks.

    Raises:
        ConfigError: When it does not support swapping.
    """
    if not supports(worker, "build_swap"):
        raise ConfigError(
            f"generate.swap_memory: workers such as {type(worker).__name__} swap nothing. Remedy: set it to 0."
        )
    worker.build_swap(blocks)


def _adapter_memory(
    worker: EncodeWorker | GenerateWorker, settings: WorkerSettings
) -> dict[str, int]:
    """Return the memory allocated by a worker for adapters, by name; empty if none are configured.

    Raises:
        ConfigError: When they are configured, and the worker does not support them.
    """
    if not settings.adapters:
        return {}
    if not supports(worker, "add_adapter"):
        raise ConfigError(
            f"adapters.count_max: workers such as {type(worker).__name__} take no adapters. Remedy: set it to 0."
        )
    return {"adapters": worker.adapter_bytes}
