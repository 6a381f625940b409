"""Start of a rank, its reports, silence of its leaders, and refused log entries."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.rank.fake_plugin import LAYOUT, NAME, FakeGenerator, FakePlugin, model_info
from tests.unit.rank.worker_groups import LOAD
from vsched.errors import CheckpointError, GroupLostError, RankDesync
from vsched.kernel.decisions import EncodeDecision
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder, StandInWorker
from vsched.types import ModelInfo
from vsched.wire import (
    ON_THE_WAY,
    AcceptKv,
    AdapterChanged,
    AddAdapter,
    Beat,
    Continue,
    EncodeResult,
    Heartbeat,
    Hello,
    LeaderLog,
    LogEntry,
    Paused,
    RankReport,
    Ready,
    RemoveAdapter,
    RunHook,
    SizeKv,
    StepCheck,
    ThreadsInUse,
    decode_report,
)
from vsched.worker.contract import Progress, WorkerSettings
from vsched.worker.member import Member, Rank, RankHost
from vsched.worker.spec import GenerateRole, RankSpec
from vsched.worker.stage_rank import EncodeRank, StageRank

EMBEDDINGS, NO_BYTES = np.zeros((1, 1, 1), np.uint8), np.zeros(0, np.uint8)


class Link:
    """Delivers injected frames at once, and keeps sent ones."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.sent: list[RankReport] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(decode_report(frame))

    def receive(self, _timeout_s: float = 0.0) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    def close(self) -> None:
        """No-op."""


class FakeWorker(StandInEncoder):
    """A worker with a number of threads, compiled kernels, and space for one adapter."""

    adapter_bytes = 8

    def __init__(self) -> None:
        super().__init__(SimulatedMemory(1 << 20))
        self.threads = 0
        self.kernels = {"norm.add": 1}
        self.paths: dict[int, str] = {}

    def threads_here(self) -> int:
        return self.threads

    def kernels_here(self) -> dict[str, int]:
        return dict(self.kernels)

    def add_adapter(self, number: int, path: str) -> None:
        if path == "huge":
            raise MemoryError
        if self.paths:
            raise CheckpointError("no room. Remedy: take one away.")
        self.paths[number] = path

    def remove_adapter(self, number: int) -> None:
        self.paths.pop(number, None)


class Stage(StageRank):
    """Returns its given results one by one, each after its own time."""

    worker: FakeWorker

    def __init__(self, *said: tuple[int, EncodeResult | Paused | None]) -> None:
        super().__init__(FakeWorker())
        self.now_ns = 0
        self.hooks_run: list[str] = []
        self._said = deque(said)
        self.order: list[str] = []

    def run_hook(self, name: str) -> None:
        self.hooks_run.append(name)

    def kernels_late(self) -> int:
        return len(self.hooks_run)

    def look_ahead(self) -> None:
        self.order.append("looks ahead")

    def carry_out(self, _entry: LogEntry) -> EncodeResult | Paused | None:
        took_ns, said = self._said.popleft()
        self.now_ns += took_ns
        self.order.append("carries out")
        return said


def member_of(side: Stage, rank: int = 0) -> Member[Link]:
    """Return a rank that has loaded, on a clock that advances by its computing time."""
    spec = SimpleNamespace(rank=rank, secret="sesame")
    host = RankHost(now_ns=lambda: side.now_ns, memory=lambda: {"resident": 5})
    member = Member(spec, Link(), host)  # type: ignore[arg-type]
    member.stage = side
    return member


def rank_of(*members: Member[Link], timeout_s: float = 20.0) -> Rank[Link]:
    """Return a rank of members that have loaded, all on the clock of the first."""
    spec: RankSpec = SimpleNamespace(timeout_s=timeout_s)  # type: ignore[assignment]
    return Rank(spec, None, members, members[0]._host)  # type: ignore[arg-type]


def receive(member: Member[Link], log: LeaderLog, entry: LogEntry) -> None:
    member.link.frames.append(log.append(entry))
    member.listen(0)


def carry_out(member: Member[Link], *entries: LogEntry, log: LeaderLog | None = None) -> None:
    """Have a rank carry out entries of a new log, or of this one."""
    log = log or LeaderLog()
    for entry in entries:
        receive(member, log, entry)
        assert member.carry_out()


@pytest.mark.parametrize("rank", [0, 1])
def test_member_reports_pauses_and_the_time_of_the_whole_step(rank: int) -> None:
    """The first rank reports the time of each time slice, and in the end of all; the others report at the end."""
    side = Stage(
        (5, Paused(1, 1, 0)),
        (7, Paused(1, 2, 0)),
        (9, EncodeResult(1, None, 0)),
        (100, None),
        (3, EncodeResult(2, None, 0)),
    )
    member, log = member_of(side, rank), LeaderLog()
    order: list[LogEntry] = [EncodeDecision(1, [], 10, 1), Continue(1, 2), Continue(1, 2)]
    for entry in (*order, Continue(1, 0), EncodeDecision(2, [])):
        receive(member, log, entry)
        assert member.log.turn == log.seq, "each has a turn"
        assert member.carry_out()
    steps = [*3 * ["carries out"], "looks ahead", *2 * ["carries out"], "looks ahead"]
    assert side.order == steps, "once a step is complete"
    slices = [Paused(1, 1, 5), Paused(1, 2, 7), EncodeResult(1, None, 21), EncodeResult(2, None, 3)]
    checks = [StepCheck(1, b""), StepCheck(2, b"")]
    assert member.link.sent == [Hello(rank, "sesame"), *(checks if rank else slices)]


def test_member_answers_heartbeats_and_hooks_by_their_place_in_the_log() -> None:
    """Each with the memory of the process; a hook once it has run."""
    side = Stage()
    member = member_of(side)
    carry_out(member, Heartbeat(), RunHook("balance"), Heartbeat())
    assert side.hooks_run == ["balance"]
    beats = [Beat(seq, {"resident": 5}, late) for seq, late in ((1, 0), (2, 1), (3, 1))]
    assert member.link.sent == [Hello(0, "sesame"), *beats]


def test_member_reports_its_threads_when_their_number_changes() -> None:
    """After the result of the step before, so that the result is not delayed."""
    side = Stage(*((1, EncodeResult(step, None, 0)) for step in (1, 2, 3)))
    member, log = member_of(side), LeaderLog()
    settings = WorkerSettings(threads=4)
    member._spec = SimpleNamespace(  # type: ignore[assignment]
        roles={"encode": SimpleNamespace(settings=settings)}
    )
    side.worker.threads = 4
    member.report_ready(Ready(8, {}))
    for step, threads in ((1, 4), (2, 3), (3, 3)):
        side.worker.threads = threads
        carry_out(member, EncodeDecision(step, []), log=log)
    side.worker.threads = 4
    carry_out(member, Heartbeat(), log=log)
    kinds = [type(one) for one in member.link.sent[1:]]
    assert kinds[:4] == [Ready, EncodeResult, EncodeResult, ThreadsInUse]
    assert kinds[4:] == [EncodeResult, Beat, ThreadsInUse]
    reports = [one for one in member.link.sent if isinstance(one, Ready | ThreadsInUse)]
    ready = Ready(8, {}, threads=ThreadsInUse(4, 4))
    assert reports == [ready, ThreadsInUse(3, 4), ThreadsInUse(4, 4)]


def test_executor_counts_compilations_while_serving_and_reports_them_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiling = FakeWorker()
    side = StageRank(compiling)
    compiling.kernels["norm.add"] = 2
    side.mark_kernels()
    assert side.kernels_late() == 0
    compiling.kernels |= {"norm.add": 3, "rope.turn": 1}
    assert [side.kernels_late(), side.kernels_late()] == [2, 2]
    assert caplog.messages == ["requests have waited for kernels: norm.add, rope.turn"]


def test_member_adds_and_removes_adapters_and_reports_why_one_cannot_be_added() -> None:
    """A rank that cannot add one keeps all the others, and goes on."""
    adapting, member = FakeWorker(), member_of(Stage())
    side = member.stage = EncodeRank(adapting, EMBEDDINGS, read=lambda _: NO_BYTES)
    adds = AddAdapter(1, "huge"), AddAdapter(2, "a"), AddAdapter(3, "b")
    carry_out(member, *adds, RemoveAdapter(3), RemoveAdapter(2), AddAdapter(4, "b"))
    (_, huge, *others) = member.link.sent
    assert isinstance(huge, AdapterChanged)
    assert "Remedy: raise encode.memory_limit" in huge.error
    no_room = AdapterChanged(3, "no room. Remedy: take one away.")
    assert others == [AdapterChanged(2), no_room, *(AdapterChanged(seq) for seq in (4, 5, 6))]
    assert adapting.paths == {4: "b"}
    assert side.adapters == {4}


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (AddAdapter(1, "a"), "takes none"),
        # Sequences are in the KV cache that was accepted.
        (SizeKv(64, profile=False, headroom_bytes=0), "came after one was accepted"),
        (AcceptKv(1), "came after one was accepted"),
    ],
    ids=repr,
)
def test_member_follows_no_leader_with_impossible_decisions(entry: LogEntry, error: str) -> None:
    member = member_of(Stage())
    member.stage.worker = StandInWorker(SimulatedMemory(1 << 20))
    with pytest.raises(RankDesync, match=error):
        carry_out(member, entry)


SECOND_NS = 1_000_000_000


def test_rank_gives_leaders_the_whole_timeout_after_the_last_message() -> None:
    """Of two leaders, the one that is silent for longer counts, and one that has never sent anything does not."""
    side = Stage()
    side.now_ns = 50 * SECOND_NS
    members = member_of(side), member_of(side)
    rank = rank_of(*members)
    assert rank.left_s() == 20.0
    for member, left_s in zip(members, (15.0, 10.0), strict=True):
        carry_out(member, Heartbeat())
        side.now_ns += 5 * SECOND_NS
        assert rank.left_s() == left_s
    side.now_ns += 50 * SECOND_NS
    assert rank.left_s() == 0.0


def test_rank_counts_from_the_end_of_a_step() -> None:
    """Messages that came meanwhile were received, only not read."""
    side = Stage((60 * SECOND_NS, EncodeResult(1, None, 0)))
    member = member_of(side)
    rank = rank_of(member)
    receive(member, LeaderLog(), EncodeDecision(1, []))
    assert rank.advance()
    assert rank.left_s() == 20.0


def test_rank_waits_for_messages_on_the_way() -> None:
    """A notice of data in transit resets the silence of a leader, which counts from its first entry on.

    Until every rank of a group is ready, its leader is silent.
    """
    side = Stage()
    member, log = member_of(side), LeaderLog()
    rank = rank_of(member)
    assert not member.listen(0)
    rank.received_nothing()
    member.link.frames.append(ON_THE_WAY)
    assert member.listen(0)
    side.now_ns += 50 * SECOND_NS
    assert rank.left_s() == 20.0
    receive(member, log, Heartbeat())
    rank.advance()
    side.now_ns += 15 * SECOND_NS
    member.link.frames.append(ON_THE_WAY)
    assert member.listen(0)
    assert rank.left_s() == 20.0
    assert rank.next is None, "it is not an entry of the log"
    receive(member, log, Heartbeat())
    assert rank.advance()
    with pytest.raises(GroupLostError, match="heard nothing from the engine for 20 s"):
        rank.received_nothing()


class Recording(FakePlugin):
    """Records the models to load, and loads no deterministic one."""

    def __init__(self) -> None:
        self.requested: list[bool] = []

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> FakeGenerator:
        self.requested.append(settings.deterministic)
        if settings.deterministic:
            raise CheckpointError("that was the model")
        return super().load_generator(info, settings, progress)


def test_a_draft_model_is_loaded_first_so_that_the_process_is_as_the_model_wants_it() -> None:
    """A deterministic model sets torch to one thread, and a draft model, which need not be, to all."""
    plugin = Recording()
    info, settings = model_info(), WorkerSettings(deterministic=True)
    role = GenerateRole(address="", plugin=NAME, settings=settings, limits=LOAD, draft=info)
    spec = RankSpec(groups=("generate",), layout=LAYOUT, info=info, timeout_s=9, generate=role)
    host = RankHost(load_worker=lambda _name: plugin)
    with pytest.raises(CheckpointError, match="that was the model"):
        Rank(spec, None, [Member(spec, Link(), host)], host).load()  # type: ignore[arg-type]
    assert plugin.requested == [False, True]
