"""A rank as a member of its groups: start-up, received entries, their order of execution, and reports.

Nothing here blocks. A rank process waits on its links between entries, and a simulated rank is a task that awaits them;
both pass received frames to a `Member`, and have `Rank` execute the next entry.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec

from vsched.errors import ConfigError, GroupLostError, RankDesync, error_kind
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.probes import probe
from vsched.transport.arena import Arena
from vsched.wire import (
    ON_THE_WAY,
    AcceptKv,
    AdapterChanged,
    AddAdapter,
    Beat,
    Continue,
    FollowerLog,
    Heartbeat,
    Hello,
    Loaded,
    Loading,
    LogEntry,
    Paused,
    RankFailed,
    RankReport,
    Ready,
    RemoveAdapter,
    RunHook,
    SizeKv,
    StepCheck,
    Stop,
    ThreadsInUse,
    check_of,
    encode_report,
)
from vsched.worker.contract import (
    EncodeWorker,
    GenerateWorker,
    Progress,
    WorkerPlugin,
    WorkerSettings,
    supports,
)
from vsched.worker.drafts import DraftModel, DraftWorker
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.memory import mapped_weights, status_bytes
from vsched.worker.registry import load_worker
from vsched.worker.sizing import KvBuilder, image_for, reserve_encoder
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec, threads_of
from vsched.worker.stage_rank import EncodeRank, StageRank

PULSES_PER_TIMEOUT = 4
"""Number of heartbeats of a rank's process per timeout."""


def process_memory() -> dict[str, int]:
    """Return the current and the peak resident memory of this process, in bytes."""
    return {"resident": status_bytes("VmRSS"), "peak": status_bytes("VmHWM")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """The process functions used by a rank; replaced for simulated ranks, which share a process.

    Attributes:
        memory: Returns the memory of the process, in bytes by name.
        collect: Collects garbage before memory is measured.
    """

    now_ns: Callable[[], int] = time.perf_counter_ns
    memory: Callable[[], dict[str, int]] = process_memory
    collect: Callable[[], object] = gc.collect
    load_worker: Callable[[str], WorkerPlugin] = load_worker


class MemberLink(Protocol):
    """A rank's end of the link to one leader."""

    def send(self, frame: bytes) -> object:
        """Send a report."""

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Return the next frame; None if none arrives in time."""

    def close(self) -> None:
        """Close the link."""


Link = TypeVar("Link", bound=MemberLink)


class Member(Generic[Link]):
    """A link to one leader, the log received over it, and the stage that executes its entries.

    Attributes:
        stage: Executes the entries; set when the model is loaded, of a generate rank when its KV cache is accepted.
        sizing: Builds KV caches, and finishes the start with the accepted one; None before and after.
        entry: The received entry that is not executed yet.
        received_ns: Time of the last received frame; the timeout applies from the first entry after the start on.
    """

    def __init__(self, spec: RankSpec, link: Link, host: RankHost | None = None) -> None:
        self.link = link
        self.log = FollowerLog()
        self.stage: StageRank
        self.sizing: tuple[KvBuilder, Callable[[], None]] | None = None
        self.entry: LogEntry | None = None
        self.received_ns: int | None = None
        self._spec = spec
        self._rank = spec.rank
        self._threads = 0
        self._busy_ns = 0
        self._host = host or RankHost()
        self.report(Hello(spec.rank, spec.secret))

    def report(self, report: RankReport) -> None:
        """Send a report to the leader."""
        self.link.send(encode_report(report))

    def progress(self, what: str, fraction: float) -> None:
        """Report progress of loading."""
        self.report(Loading(what, fraction))

    def report_ready(self, report: Ready) -> None:
        """Report that this rank is ready, and its initial number of threads."""
        self.report(msgspec.structs.replace(report, threads=self._changed_threads()))

    def _changed_threads(self) -> ThreadsInUse | None:
        """Return the number of compute threads; None if it has not changed since the last report."""
        threads = self.stage.worker.threads_here()
        if threads == self._threads:
            return None
        self._threads = threads
        return ThreadsInUse(threads, threads_of(self._spec))

    def report_failure(self, error: Exception) -> None:
        """Report why this rank stops."""
        self.report(RankFailed(error_kind(error), type(error).__name__, str(error)))

    def listen(self, timeout_s: float) -> bool:
        """Wait for the next entry, which is executed in its turn; return True if any frame arrived."""
        frame = self.link.receive(timeout_s)
        if frame is None:
            return False
        if frame != ON_THE_WAY:
            self.entry = self.log.accept(frame)
        if self.sizing is None and (self.entry is not None or self.received_ns is not None):
            self.received_ns = self._host.now_ns()
        return True

    def is_next(self, turn: int) -> bool:
        """Return True if there is an entry to execute after the step with this turn."""
        return self.entry is not None and self.log.turn in (0, turn + 1)

    def carry_out(self) -> bool:
        """Execute the entry; return False if it was the last."""
        entry, self.entry = self.entry, None
        if self.sizing is not None:
            self._size(entry, *self.sizing)
            return True
        match entry:
            case GenerateDecision() | EncodeDecision() | Continue():
                self._step(entry)
            case Stop():
                return False
            case SizeKv() | AcceptKv() | None:
                raise RankDesync("an order about the KV cache came after one was accepted")
            case Heartbeat():
                self._beat()
            case RunHook(name):
                self.stage.run_hook(name)
                self._beat()
            case AddAdapter() | RemoveAdapter():
                error = self.stage.change_adapters(entry)
                self.report(AdapterChanged(self.log.seq, error))
        threads = self._changed_threads()
        if threads is not None:
            self.report(threads)
        # A step can take longer than the timeout: frames that arrived in between are not read yet.
        self.received_ns = self._host.now_ns()
        return True

    def _size(self, entry: LogEntry | None, builder: KvBuilder, finish: Callable[[], None]) -> None:
        """Build, measure or drop a KV cache, or serve with the current one."""
        match entry:
            case SizeKv(tokens):
                if tokens:
                    self.progress(f"measuring a KV cache of {tokens} tokens", 0.0)
                self.report(builder.carry_out(entry))
            case AcceptKv(blocks):
                if blocks != builder.blocks:
                    raise RankDesync(
                        f"{blocks} KV blocks are accepted, {builder.blocks} stand on this rank"
                    )
                builder.settle()
                self.sizing = None
                finish()
            case Heartbeat():
                pass
            case _:
                raise RankDesync(f"heard {type(entry).__name__} before a KV cache was accepted")

    def _beat(self) -> None:
        self.report(Beat(self.log.seq, self._host.memory(), self.stage.kernels_late()))

    def _step(self, entry: LogEntry) -> None:
        start_ns = self._host.now_ns()
        result = self.stage.carry_out(entry)
        busy_ns = self._host.now_ns() - start_ns
        if result is None:
            return
        if isinstance(result, Paused):
            self._busy_ns += busy_ns
            if self._rank == 0:
                self.report(msgspec.structs.replace(result, busy_ns=busy_ns))
            return
        busy_ns, self._busy_ns = busy_ns + self._busy_ns, 0
        if self._rank == 0:
            self.report(msgspec.structs.replace(result, busy_ns=busy_ns))
        else:
            self.report(StepCheck(result.step, check_of(result)))
        self.stage.look_ahead()


class Rank(Generic[Link]):
    """One rank: loads the models of its roles, then executes the entries of all logs, in the order of their turns.

    `members` are those of the encode group and the generate group, if the rank has the role.

    Attributes:
        serving: Whether the start is complete: a KV cache is accepted, and ready is reported.
        over: Whether a log has ended with `Stop`.
        grace_s: Time to listen once more after the timeout. After a suspension of the whole machine, the timeout is
            over before a live engine can send anything.
    """

    def __init__(
        self,
        spec: RankSpec,
        arena: Arena,
        members: Sequence[Member[Link]],
        host: RankHost | None = None,
    ) -> None:
        self.serving = self.over = False
        self.grace_s = spec.timeout_s / PULSES_PER_TIMEOUT
        self._spec = spec
        self._arena = arena
        self._members = members
        self._host = host or RankHost()
        self._turn = 0
        self._ready: list[Ready] = []

    # --- the start ---

    def load(self) -> None:
        """Load the models; entries about the KV cache follow.

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

    def _load_encoder(self, role: EncodeRole, member: Member[Link]) -> None:
        spec, arena, host = self._spec, self._arena, self._host
        plugin = host.load_worker(role.plugin)
        with mapped_weights():
            worker = plugin.load_encoder(spec.info, role.settings, member.progress)
        adapters = _adapter_memory(worker, role.settings)
        member.progress("measuring the largest batch of images", 0.0)
        loaded, reservation = reserve_encoder(
            plugin, worker, spec.info, role, rank=spec.rank, collect=host.collect
        )
        member.report(Loaded(loaded, reservation))
        member.stage = EncodeRank(worker, arena.embeddings, arena.read, rank=spec.rank)
        memory = {"weights": loaded.weights_bytes, "activations": reservation.growth_bytes}
        memory |= {**adapters, **host.memory()}
        self._ready.append(Ready(0, memory, dict(worker.hooks())))

    def _load_generator(self, role: GenerateRole, member: Member[Link]) -> None:
        spec, host = self._spec, self._host
        plugin = host.load_worker(role.plugin)
        # Before the target model, whose process-wide settings, such as torch's threads, must prevail.
        with mapped_weights():
            draft = _load_draft(plugin, role, member.progress)
            worker = plugin.load_generator(spec.info, role.settings, member.progress)
        adapters = _adapter_memory(worker, role.settings)
        # Before memory is measured, because it needs some for a large vocabulary.
        grammars = plugin.load_grammars(spec.info)
        image = image_for(plugin, spec.info, role.limits, pixels_max=role.pixels_max)
        builder = KvBuilder(
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
            limits, info, draft_model = role.limits, spec.info, None
            memory = {"weights": worker.weights_bytes, "kv": builder.kv_bytes, **adapters}
            if draft is not None:
                draft_model = DraftModel(
                    draft, limits, vocabulary=info.vocab_size, blocks=builder.blocks
                )
                memory["draft model"] = draft.worker.weights_bytes
            if limits.swap_blocks:
                if not supports(worker, "build_swap"):
                    raise ConfigError(
                        f"generate.swap_memory: workers such as {type(worker).__name__} swap nothing. "
                        "Remedy: set it to 0."
                    )
                worker.build_swap(limits.swap_blocks)
                block_bytes = limits.block_size * info.kv_bytes_per_token
                memory["swap"] = limits.swap_blocks * block_bytes
            if info.state_bytes:
                memory["state"] = builder.state_bytes
            member.stage = GenerateRank(
                worker,
                self._arena.embeddings,
                slots=limits.slots,
                context_tokens=limits.context_tokens,
                block_size=limits.block_size,
                keeps_state=info.state_bytes > 0,
                grammars=grammars,
                swap_blocks=limits.swap_blocks,
                draft_model=draft_model,
                now_ns=host.now_ns,
            )
            memory |= host.memory()
            self._ready.append(Ready(builder.blocks, memory, dict(worker.hooks())))
            self._report_ready()

        member.sizing = builder, finish

    def _report_ready(self) -> None:
        for member, report in zip(self._members, self._ready, strict=True):
            member.stage.mark_kernels()
            member.report_ready(report)
        self.serving = True

    # --- entries ---

    @property
    def next(self) -> Member[Link] | None:
        """The member with the next entry; None if an entry must be received first."""
        return next((one for one in self._members if one.is_next(self._turn)), None)

    def advance(self) -> bool:
        """Execute the next entry; return False without effect if an entry must be received first."""
        member = self.next
        if member is None:
            return False
        self._turn = max(self._turn, member.log.turn)
        self.over = not member.carry_out()
        return True

    def awaited(self) -> list[Member[Link]]:
        """Return the members whose next entry may have the next turn.

        Raises:
            RankDesync: When there are none.
        """
        awaited = [one for one in self._members if one.entry is None]
        if not awaited:
            raise RankDesync("every log of this rank waits for a turn that none of them has")
        return awaited

    def left_s(self) -> float:
        """Return the remaining time until silent leaders time out, in seconds."""
        now_ns, awaited = self._host.now_ns(), self.awaited()
        silent_ns = [now_ns - one.received_ns for one in awaited if one.received_ns is not None]
        return max(0.0, self._spec.timeout_s - max(silent_ns, default=0) / 1e9)

    def received_nothing(self) -> None:
        """Handle a timeout: fail, unless no leader has sent anything since the start.

        Until all ranks of its group are ready, a leader sends only orders about the KV cache; its own deadline limits
        that time.

        Raises:
            GroupLostError: When a leader is silent after it has sent an entry.
        """
        if any(member.received_ns is not None for member in self.awaited()):
            probe("rank.engine_silent")
            raise GroupLostError(
                f"heard nothing from the engine for {self._spec.timeout_s:g} s (deadlines.rank_timeout_s); "
                "a living engine sends a heartbeat every deadlines.heartbeat_s"
            )


def _load_draft(plugin: WorkerPlugin, role: GenerateRole, progress: Progress) -> DraftWorker | None:
    """Load the draft model, if there is one.

    It has no adapters. It need not be deterministic: all ranks compute the same draft tokens, which are verified.
    """
    if role.draft is None:
        return None
    meeting = role.settings.rendezvous
    settings = replace(
        role.settings,
        adapters=0,
        deterministic=False,
        rendezvous=f"{meeting}-draft" if meeting else "",
    )
    return DraftWorker(plugin.load_generator(role.draft, settings, progress), role.draft)


def _adapter_memory(
    worker: EncodeWorker | GenerateWorker, settings: WorkerSettings
) -> dict[str, int]:
    """Return the memory allocated by a worker for adapters, by name; empty if none are configured."""
    if not settings.adapters:
        return {}
    if not supports(worker, "add_adapter"):
        raise ConfigError(
            f"adapters.count_max: workers such as {type(worker).__name__} take no adapters. Remedy: set it to 0."
        )
    return {"adapters": worker.adapter_bytes}
