"""A rank process: `python -m vsched.rank`, started by an engine and never by hand.

Its specification comes as one line on standard input, which then stays open: when it ends, the engine is gone, however
it went, and the rank exits. Between decisions a rank blocks; if it hears nothing for the timeout, not even a heartbeat,
it stops with an error. It computes nothing that a checked log entry did not tell it to.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from typing import Protocol

import msgspec

from vsched.errors import (
    CheckpointError,
    DeviceOutOfMemory,
    GroupLost,
    RankDesync,
    VschedError,
)
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.plugins import load_worker
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import RankLink, wait_readable
from vsched.wire import (
    AcceptKv,
    Beat,
    EncodeResult,
    Failure,
    FollowerLog,
    GenerateResult,
    Heartbeat,
    Hello,
    Loaded,
    Loading,
    Ready,
    Report,
    Reserved,
    SizeKv,
    Stop,
    encode_report,
)
from vsched.worker.encode_rank import EncodeRank
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.memory import limit_process_memory, memory_errors, status_bytes
from vsched.worker.reserve import reserve_encoder
from vsched.worker.sizing import KvSizing
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec
from vsched.worker.stress import image_for

logger = logging.getLogger("vsched.rank")
SIZING_POLL_S = 60.0
"""How long a rank sleeps at most while it waits to hear the size of its KV cache."""


class Role(Protocol):
    """One group that this process belongs to."""

    def carry_out(self, entry: GenerateDecision | EncodeDecision) -> Report:
        """Carry out a decision."""
        ...


class EncodeSide:
    """The encode group's part of this process."""

    def __init__(self, rank: EncodeRank) -> None:
        self._rank = rank

    def carry_out(self, entry: GenerateDecision | EncodeDecision) -> EncodeResult:
        """Carry out a decision of the encode group."""
        if not isinstance(entry, EncodeDecision):
            raise RankDesync("an encode rank heard a decision of a generate group")
        return self._rank.apply(entry)


class GenerateSide:
    """The generate group's part of this process."""

    def __init__(self, rank: GenerateRank) -> None:
        self._rank = rank

    def carry_out(self, entry: GenerateDecision | EncodeDecision) -> GenerateResult:
        """Carry out a decision of the generate group."""
        if not isinstance(entry, GenerateDecision):
            raise RankDesync("a generate rank heard a decision of an encode group")
        with memory_errors("running a step"):
            return self._rank.apply(entry)


class Member:
    """A link to one leader, the log heard over it, and the side that carries it out."""

    def __init__(self, spec: RankSpec, address: str) -> None:
        self.link = RankLink(address, spec.rank)
        self.log = FollowerLog()
        self.side: Role | None = None
        self.heard_s: float | None = None  # the timeout runs from the first entry on
        self.link.send(encode_report(Hello(spec.rank, spec.secret)))

    def report(self, report: Report) -> None:
        """Send a report to the leader."""
        self.link.send(encode_report(report))

    def progress(self, what: str, fraction: float) -> None:
        """Report progress of loading."""
        self.report(Loading(what, fraction))

    def turn(self) -> bool | None:
        """Carry out the next entry: True when there was one, None when it was the last."""
        frames = self.link.receive()
        if frames is None:
            return False
        self.heard_s = time.monotonic()
        match self.log.accept(frames):
            case Heartbeat():
                self.report(Beat(self.log.seq, process_memory()))
            case Stop():
                return None
            case SizeKv() | AcceptKv():
                raise RankDesync("an order about the KV cache came after one was accepted")
            case entry:
                assert self.side is not None
                start_ns = time.perf_counter_ns()
                result = self.side.carry_out(entry)
                busy_ns = time.perf_counter_ns() - start_ns
                self.report(msgspec.structs.replace(result, busy_ns=busy_ns))
        # A step can take longer than the timeout: what came meanwhile was heard, only not read.
        self.heard_s = time.monotonic()
        return True


def process_memory() -> dict[str, int]:
    """Return this process's resident bytes, now and at their peak."""
    return {"resident": status_bytes("VmRSS"), "peak": status_bytes("VmHWM")}


def run(spec: RankSpec) -> None:
    """Load what the roles need, report ready, and follow the logs until told to stop.

    Raises:
        RankDesync: When a log has a gap or differs.
        GroupLost: When a leader is silent for longer than the timeout.
        DeviceOutOfMemory: When a generate step ran out of memory.
    """
    arena = Arena(spec.arena_fd, spec.layout)
    members: list[Member] = []
    try:
        if spec.encode is not None:
            members.append(Member(spec, spec.encode.address))
        if spec.generate is not None:
            members.append(Member(spec, spec.generate.address))
        try:
            limit_process_memory(spec.memory_limit_bytes)  # before a plug-in imports its libraries
            ready = _load(spec, arena, members)
            for member, report in zip(members, ready, strict=True):
                member.report(report)
            gc.collect()
            gc.freeze()  # what loading left behind lives for ever: no collection need look at it
            _follow(members, spec.timeout_s)
        except Exception as error:
            for member in members:
                member.report(Failure(type(error).__name__, str(error)))
            raise
    finally:
        for member in members:
            member.link.close()


def _load(spec: RankSpec, arena: Arena, members: list[Member]) -> list[Ready]:
    """Load what the roles need; a generate rank also carries out orders until its KV cache stands."""
    ready: list[Ready] = []
    sides = iter(members)
    if spec.encode is not None:
        ready.append(_load_encoder(spec, spec.encode, arena, next(sides)))
    if spec.generate is not None:
        ready.append(_load_generator(spec, spec.generate, arena, next(sides)))
    return ready


def _load_encoder(spec: RankSpec, role: EncodeRole, arena: Arena, member: Member) -> Ready:
    plugin = load_worker(role.plugin)
    worker = plugin.load_encoder(spec.info, role.settings, member.progress)
    member.progress("the largest batch of images", 0.0)
    loaded, reservation = reserve_encoder(plugin, worker, spec.info, role, rank=spec.rank)
    member.report(Reserved(loaded, reservation))
    patch_values = spec.info.patch_values
    member.side = EncodeSide(
        EncodeRank(worker, arena.embeddings, arena.read, patch_values=patch_values)
    )
    memory = {"weights": loaded.weights_bytes, "activations": reservation.growth_bytes}
    return Ready(0, {**memory, **process_memory()})


def _load_generator(spec: RankSpec, role: GenerateRole, arena: Arena, member: Member) -> Ready:
    plugin = load_worker(role.plugin)
    worker = plugin.load_generator(spec.info, role.settings, member.progress)
    image = image_for(plugin, spec.info, role.load, pixels_max=role.pixels_max)
    sizing = KvSizing(worker, spec.info, role.load, rank=spec.rank, image=image)
    member.report(Loaded(sizing.measure()))
    blocks = _follow_orders(sizing, member)
    rank = GenerateRank(
        worker,
        arena.embeddings,
        slots=role.load.slots,
        context_tokens=role.load.context_tokens,
        block_size=role.load.block_size,
    )
    member.side = GenerateSide(rank)
    kv_bytes = blocks * role.load.block_size * spec.info.kv_bytes_per_token
    return Ready(blocks, {"weights": worker.weights_bytes, "kv": kv_bytes, **process_memory()})


def _follow_orders(sizing: KvSizing, member: Member) -> int:
    """Build, prove and drop KV caches as told; return the blocks of the one that is accepted."""
    while True:
        wait_readable([member.link], SIZING_POLL_S)  # the lifeline ends a rank whose engine is gone
        frames = member.link.receive()
        if frames is None:
            continue
        match member.log.accept(frames):
            case SizeKv() as order:
                member.progress(f"a KV cache of {order.tokens} tokens", 0.0)
                member.report(sizing.carry_out(order))
            case AcceptKv(blocks):
                if blocks != sizing.blocks:
                    raise RankDesync(
                        f"{blocks} KV blocks are accepted, {sizing.blocks} stand on this rank"
                    )
                return blocks
            case Heartbeat():
                pass
            case entry:
                raise RankDesync(f"heard {type(entry).__name__} before a KV cache was accepted")


def _follow(members: list[Member], timeout_s: float) -> None:
    """Take turns between the logs until one says stop."""
    while True:
        turns = [member.turn() for member in members]
        if None in turns:
            return
        if any(turns):
            continue
        heard_s = [member.heard_s for member in members if member.heard_s is not None]
        # The leader is silent until every rank of the group is ready, and its deadline bounds that.
        left_s = min(heard_s) + timeout_s - time.monotonic() if heard_s else timeout_s
        waited = left_s > 0 and wait_readable([member.link for member in members], left_s)
        if not waited and heard_s:
            raise GroupLost(
                f"heard nothing from the engine for {timeout_s:g} s (deadlines.rank_timeout_s); "
                "a living engine sends a heartbeat every deadlines.heartbeat_s"
            )


def _exit_with_parent(run_dir: str) -> None:
    """Wait for the end of standard input, then end this process and remove what the engine left."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(3)


def main() -> int:
    """Read the specification and run the rank."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            return 3
        line += piece
    spec = msgspec.json.decode(bytes(line), type=RankSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when ranks stop
    watcher = threading.Thread(
        target=_exit_with_parent, args=(spec.run_dir,), name="lifeline", daemon=True
    )
    watcher.start()
    try:
        run(spec)
    except (CheckpointError, DeviceOutOfMemory) as error:
        logger.error("rank %d stops: %s", spec.rank, error)  # noqa: TRY400 - the message says it all
        return 2
    except VschedError:
        logger.exception("rank %d stops", spec.rank)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
