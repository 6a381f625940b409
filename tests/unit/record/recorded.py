"""Random runs with a record of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from vsched.config import Config
from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.policy import Policy
from vsched.policy_host import SeatPolicies
from vsched.policy_host.snapshot import LAYOUT
from vsched.record import Recorder, open_recorder
from vsched.record.entries import REMOVED_SETTINGS
from vsched.record.files import FORMAT, VERSION, FrameReader, find_segments, frame
from vsched.testing import ModelCluster, run_random
from vsched.testing.cluster import default_policies


def table(policy: Policy) -> dict[str, object]:
    """Return the configuration table of a policy."""
    cls = type(policy)
    fields: dict[str, object] = msgspec.to_builtins(policy)
    return {"use": f"{cls.__module__}:{cls.__qualname__}", **fields}


def config_for(
    path: Path, policies: SeatPolicies, *, limits: SchedulerLimits | None = None, **record: int
) -> Config:
    """Return a configuration that names these policies and records."""
    tables: dict[str, Any] = {"record": {"path": str(path), **record}, "encode": {}, "generate": {}}
    for place, policy in policies.by_table.items():
        section, _, name = place.rpartition(".")
        (tables[section] if section else tables)[name] = table(policy)
    if limits is not None:
        tables["encode"]["replicas"] = limits.encoders
        tables["generate"]["replicas"] = limits.generators
    return msgspec.convert(tables, Config)


class RecordedCluster(ModelCluster):
    """Records its run from the first event on.

    Attributes:
        seen: After each event: the number of outputs of each accepted request, and the requests that had ended.
    """

    def __init__(
        self, limits: SchedulerLimits, policies: SeatPolicies | None, path: Path, record: Any
    ) -> None:
        self.recorder: Recorder | None = None
        self.config = config_for(path, policies or default_policies(), limits=limits, **record)
        self.received: list[Event] = []
        self.seen: list[tuple[dict[str, int], set[str]]] = []
        super().__init__(limits, policies)

    def _handle(self, event: Event) -> list[Command]:
        self.recorder = self.recorder or open_recorder(self.config, self.kernel)
        assert self.recorder is not None
        commands = self.kernel.handle(event, self.now_ns)
        self.received.append(event)
        self.recorder.record_event(event, self.now_ns, commands)
        for command in commands:
            self.carry_out(command)
        self.seen.append(({name: len(one) for name, one in self.outputs.items()}, {*self.ended}))
        self.kernel.check_invariants()
        return commands


def record_run(
    path: Path,
    seed: int,
    *,
    policies: SeatPolicies | None = None,
    limits: SchedulerLimits | None = None,
    events: int = 80,
    faults: bool = True,
    **record: int,
) -> RecordedCluster:
    """Record a random run; `record` are fields of `RecordConfig`."""
    cluster = run_random(
        random.Random(seed),
        policies,
        limits=limits,
        events=events,
        faults=faults,
        make=lambda limits, policies: RecordedCluster(limits, policies, path, record),
    )
    assert isinstance(cluster, RecordedCluster)
    assert cluster.recorder is not None
    cluster.recorder.close()
    return cluster


def read_bodies(path: Path) -> list[bytes]:
    """Return the header and the entries of a segment."""
    return [body for _, body in FrameReader(path, newest=True).bodies()]


def write_bodies(path: Path, bodies: list[bytes], tail: bytes = b"") -> None:
    """Write a segment."""
    path.write_bytes(FORMAT + VERSION + b"".join(map(frame, bodies)) + tail)


def downgrade(path: Path) -> None:
    """Rewrite a record as an earlier version wrote it: with unreadable snapshots and settings that are gone."""
    for segment in find_segments(path):
        bodies = read_bodies(segment)
        *header, _, layout = msgspec.msgpack.decode(bodies[0])
        assert layout == LAYOUT
        for section, name in REMOVED_SETTINGS:
            header[5].setdefault(section, {})[name] = False
        bodies[0] = msgspec.msgpack.encode([*header, b"a state as it once was"])
        write_bodies(segment, bodies)
