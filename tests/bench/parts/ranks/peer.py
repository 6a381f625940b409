"""The far end of `python -m tests.bench.parts ranks`: a process that replies with the time it decoded each message.

`python -m tests.bench.parts.ranks.peer KIND ADDRESS BACK`; BACK is the address for replies, if they use
another socket.
"""

from __future__ import annotations

import gc
import sys
import time
from types import SimpleNamespace
from typing import cast

import msgspec
import uvloop
import zmq
import zmq.asyncio

from vsched.kernel.decisions import GenerateDecision
from vsched.rank import follow
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_workers import StandInEncoder
from vsched.transport.zmq_link import RankLink
from vsched.wire import GenerateResult, LogEntry
from vsched.worker.member import Member
from vsched.worker.spec import RankSpec
from vsched.worker.stage_rank import StageRank

SECRET = "measured"
SILENCE_S = 600.0


def stamp(received_ns: int) -> bytes:
    """Encode a time for the reply."""
    return received_ns.to_bytes(8, "little")


class Clock(StageRank):
    """A rank that computes nothing."""

    def __init__(self) -> None:
        super().__init__(StandInEncoder(SimulatedMemory(0)))

    def carry_out(self, entry: LogEntry) -> GenerateResult:
        """Return the time when the entry was accepted and decoded."""
        received_ns = time.monotonic_ns()
        assert isinstance(entry, GenerateDecision)
        return GenerateResult(entry.step, stamp(received_ns), b"", [], [], 0)


def follow_log(address: str) -> None:
    """Follow a decision log as a rank does, checks included."""
    spec = cast("RankSpec", SimpleNamespace(rank=0, secret=SECRET))
    member = Member(spec, RankLink(address, 0))
    member.stage = Clock()
    follow([member], SILENCE_S)
    member.link.close()


async def subscribe_on_a_loop(address: str, back: str) -> None:
    """Read a broadcast with zmq.asyncio."""
    context = zmq.asyncio.Context()
    received, reply = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    received.setsockopt(zmq.SUBSCRIBE, b"")
    received.connect(address)
    reply.connect(back)
    decoder = msgspec.msgpack.Decoder(GenerateDecision)
    while body := await received.recv():
        decoder.decode(body)
        await reply.send(stamp(time.monotonic_ns()))
    context.destroy(linger=0)


def subscribe(address: str, back: str) -> None:
    """Read a broadcast with blocking calls."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    received, reply = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    received.setsockopt(zmq.SUBSCRIBE, b"")
    received.connect(address)
    reply.connect(back)
    decoder = msgspec.msgpack.Decoder(GenerateDecision)
    while body := received.recv():
        decoder.decode(body)
        reply.send(stamp(time.monotonic_ns()))
    context.destroy(linger=0)


def main(kind: str, address: str, back: str) -> None:
    """Run until stopped by `Stop` or an empty message."""
    gc.collect()
    gc.freeze()
    if kind == "vsched":
        follow_log(address)
    elif kind == "zmq.asyncio":
        uvloop.run(subscribe_on_a_loop(address, back))
    else:
        subscribe(address, back)


if __name__ == "__main__":
    main(*sys.argv[1:])
