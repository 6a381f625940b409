"""A rank process: `python -m vsched.rank`, started by an engine and never by hand.

Its specification is one line on standard input, which then stays open: when it closes, the engine is gone, and the rank
exits. A rank blocks between decisions; if it receives nothing within the timeout, not even a heartbeat, it stops with
an error. It only computes steps from checked log entries. The first rank of a group reports the results of a step, the
others a checksum to compare with them.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence

import msgspec
from setproctitle import setproctitle

from vsched.errors import CheckpointError, ConfigError, DeviceOutOfMemory, PeerLost
from vsched.fork_server import drop_code_pages, release_free_memory
from vsched.logs import configure_logging
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import PulseThread, RankLink, wait_readable
from vsched.worker.member import PULSES_PER_TIMEOUT, Member, Rank
from vsched.worker.memory import limit_process_memory, memory_errors, spare_memory, weights_bytes
from vsched.worker.spec import RankSpec

logger = logging.getLogger("vsched.rank")


def run(spec: RankSpec) -> None:
    """Load the models of the roles, report ready, and follow the logs until a stop entry.

    Raises:
        RankDesync: If a log has a gap or differs.
        GroupLostError: If a leader is silent for longer than the timeout.
        DeviceOutOfMemory: If a generate step ran out of memory.
    """
    arena = Arena(spec.arena_fd, spec.layout)
    members: list[Member[RankLink]] = []
    try:
        for role in spec.roles.values():
            link = RankLink(role.address, spec.rank)
            members.append(Member(spec, link))
        every_s = spec.timeout_s / PULSES_PER_TIMEOUT
        pulse = PulseThread(members[0].link, spec.rank, spec.secret, every_s=every_s)
        try:
            # Before a plug-in imports its libraries.
            paths = {one.path for one in (spec.info, spec.info.draft) if one is not None}
            limit_process_memory(
                spec.memory_limit_bytes,
                keys=spec.memory_keys,
                mapped_bytes=sum(map(weights_bytes, paths)),
            )
            rank = Rank(spec, arena, members)
            with memory_errors("starting", remedy=f"raise {spec.memory_keys}"), spare_memory():
                rank.load()
                while not (rank.serving or rank.over):
                    step(rank, spec.timeout_s)
            gc.collect()
            gc.freeze()  # objects from loading live forever, so collections need not scan them
            drop_code_pages()  # mostly pages of the compiler, which loaded the kernels
            release_free_memory()  # of loading, and of the largest steps
            while not rank.over:
                step(rank, spec.timeout_s)
        except Exception as error:
            for member in members:
                member.report_failure(error)
            raise
        finally:
            pulse.close()
    finally:
        for member in members:
            member.link.close()


def step(rank: Rank[RankLink], timeout_s: float) -> None:
    """Execute the next entry of a log, or block until a log that can have the next turn has a message."""
    if rank.advance():
        return
    awaited = rank.awaited()
    if len(awaited) == 1:
        received = awaited[0].listen(timeout_s) or awaited[0].listen(rank.grace_s)
    else:
        # Usually a message is there already: decisions are ahead of steps.
        received = _look(awaited)
        if not received:
            links = [member.link for member in awaited]
            received = wait_readable(links, rank.left_s()) or wait_readable(links, rank.grace_s)
            _look(awaited)
    if not received:
        rank.received_nothing()


def _look(members: Sequence[Member[RankLink]]) -> bool:
    """Receive pending messages from each link without waiting; return True if there were any."""
    return sum(member.listen(0) for member in members) > 0  # reads all, even if one had messages


def _exit_with_parent(run_dir: str) -> None:
    """Wait for the end of standard input, then remove the engine's run directory and exit."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(3)


def main() -> int:
    """Read the specification and run the rank."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            return 3
        line += piece
    spec = msgspec.json.decode(bytes(line), type=RankSpec)
    setproctitle(f"vsched: {spec.name}")
    configure_logging(spec.name)
    for number in (signal.SIGINT, signal.SIGTERM):  # systemd sends it to all processes of a service
        signal.signal(number, signal.SIG_IGN)  # the engine drains, and decides when ranks stop
    watcher = threading.Thread(
        target=_exit_with_parent, args=(spec.run_dir,), name="lifeline", daemon=True
    )
    watcher.start()
    try:
        run(spec)
    except Exception as error:  # noqa: BLE001
        return exit_status(error)
    return 0


def exit_status(error: Exception) -> int:
    """Log why a rank stops, with a traceback if the message does not say it all; return the exit status."""
    if isinstance(error, CheckpointError | ConfigError | DeviceOutOfMemory):
        logger.error("stops: %s", error)
        return 2
    if isinstance(error, PeerLost):
        logger.warning("stops: %s", error)
    else:
        logger.error("stops", exc_info=error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
