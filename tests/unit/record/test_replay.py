"""A record replays to the same decisions, and a wrong record is detected."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.commands import run_command
from tests.unit.kernel.policy_pool import Stubborn, Tallied, random_policies
from tests.unit.record.recorded import downgrade, read_bodies, record_run, write_bodies
from tests.workers.properties import thorough
from vsched.errors import RecordError
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.plugins import RegisteredPolicy, list_policies, resolve_policy
from vsched.policy import DECISIONS, Policy
from vsched.policy_host import SeatPolicies
from vsched.record import replay
from vsched.record.files import find_segments
from vsched.record.replay import Difference
from vsched.testing import default_policies, run_random
from vsched.testing.cluster import seats_of

STATEFUL = ("encode_admission", "generate_admission", "encoding", "preemption", "routing")


@pytest.mark.parametrize("seed", [*range(4), *thorough(*range(4, 8))])
def test_replay_decides_the_same(tmp_path: Path, seed: int) -> None:
    """Random schedules with faults, drains and restarts, under the default policies and under any."""
    policies = random_policies(random.Random(seed)) if seed % 2 else None
    sizes: dict[str, Any] = {"segment_bytes": 4096 if seed % 3 else 64 << 20, "segments": 100}
    cluster = record_run(tmp_path / "run.vlog", seed, policies=policies, **sizes)
    report = replay(str(tmp_path / "run.vlog"))
    assert report.difference is None
    assert report.events == len(cluster.received)
    assert report.dropped_bytes == 0


@pytest.mark.parametrize(
    "policies",
    [
        dict.fromkeys(("generate_eviction", "encode_eviction"), Stubborn(keeps=3)),
        dict.fromkeys(STATEFUL, Tallied(fails=0)),
        dict.fromkeys(STATEFUL, Tallied(fails=3)),
    ],
    ids=["order", "state", "failing"],
)
def test_replay_continues_states_of_policies(tmp_path: Path, policies: dict[str, Policy]) -> None:
    """Even if a part of the record is gone, so that it begins with their state."""
    path = tmp_path / "run.vlog"
    seats = default_policies(**policies)
    record_run(path, 3, policies=seats, events=200, segment_bytes=8192, segments=99)
    report = replay(path)
    assert report.segments > 2
    assert report.difference is None
    find_segments(path)[0].unlink()
    report = replay(path)
    assert report.difference is None
    assert report.first_event > 0


# --- damaged records ---


def rewrite(path: Path, change: Callable[[int, list[Any]], Any]) -> None:
    """Let `change` edit each entry in place, before it is framed again."""
    bodies = read_bodies(path)
    for index, body in enumerate(bodies[1:], start=1):
        entry = msgspec.msgpack.decode(body)
        change(entry[0], entry)
        bodies[index] = msgspec.msgpack.encode(entry)
    write_bodies(path, bodies)


def decisions(path: Path) -> list[int]:
    """Return the numbers of the events that led to a generate decision."""
    found: list[int] = []

    def look(number: int, entry: list[Any]) -> None:
        rows = [row for row in entry[3] if row[0] == "Decide" and row[2][0] == "g"]
        found.extend([number] if rows else [])

    rewrite(path, look)
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.vlog"
    record_run(path, 0, events=100)
    return path


@pytest.fixture
def path(tmp_path: Path, recorded: Path) -> Path:
    """A copy of a record, which the test may damage."""
    return Path(shutil.copy(recorded, tmp_path))


def difference(path: Path) -> Difference:
    """Return the difference that a replay finds."""
    found = replay(path).difference
    assert found is not None
    return found


def change_step(commands: list[Any]) -> None:
    (row, *_) = [row for row in commands if row[0] == "Decide" and row[2][0] == "g"]
    row[2][1] += 1000


@pytest.mark.parametrize(
    ("change", "expected", "got"),
    [
        (change_step, r"step=1\d\d\d,", r"step=\d{1,3},"),
        (lambda commands: commands.append(["Drained", "generate"]), "Drained", "nothing"),
        (list.clear, "nothing", "EmitTokens"),
    ],
)
def test_replay_finds_decisions_that_were_changed(
    path: Path, change: Callable[[list[Any]], None], expected: str, got: str
) -> None:
    """The command shows the difference and exits with 1."""
    target = decisions(path)[5]
    rewrite(path, lambda number, entry: change(entry[3]) if number == target else None)
    found = difference(path)
    assert (found.number, found.segment) == (target, "run.vlog")
    assert re.search(expected, found.expected)
    assert re.search(got, found.got)
    output = run_command("replay", path, status=1)
    assert f"Event {target} (run.vlog, " in output
    assert "was answered differently" in output
    assert f"recorded  {found.expected}\n" in output


def test_replay_finds_request_data_that_was_changed(path: Path) -> None:
    changed: list[int] = []

    def change_first(number: int, entry: list[Any]) -> None:
        if entry[4] and not changed:
            changed.append(number)
            entry[4] = bytes(16)

    rewrite(path, change_first)
    found = difference(path)
    assert [found.number] == changed
    assert "digest" in found.expected


def test_replay_does_not_compare_the_words_of_notices(tmp_path: Path) -> None:
    """They may quote a policy's message, with memory addresses."""
    path, changed = tmp_path / "run.vlog", list[int]()
    failing = dict.fromkeys(STATEFUL, Tallied(fails=3))
    record_run(path, 3, policies=default_policies(**failing), events=100)

    def change_notices(number: int, entry: list[Any]) -> None:
        for row in [row for row in entry[3] if row[0] == "Notice"]:
            row[1] += " at 0x7f"
            changed.append(number)

    rewrite(path, change_notices)
    assert changed
    assert replay(path).difference is None


def test_replay_reports_a_kernel_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Scheduler.handle
    handled: list[int] = []

    def fail(self: Scheduler, event: Event, now_ns: int) -> list[Command]:
        handled.append(now_ns)
        if len(handled) == 30:
            raise KeyError("a bug")
        return handle(self, event, now_ns)

    monkeypatch.setattr(Scheduler, "handle", fail)
    found = difference(path)
    assert found.number == 29
    assert "KeyError: 'a bug'" in found.got


def test_replay_finds_an_event_or_segment_that_is_missing(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such record. Remedy: "):
        replay(tmp_path / "other.vlog")
    record_run(tmp_path / "other.vlog", 0, events=300, segment_bytes=4096)
    (tmp_path / "other.vlog.000002").unlink()
    with pytest.raises(RecordError, match="a segment is missing"):
        replay(tmp_path / "other.vlog")
    bodies = read_bodies(path)
    del bodies[8]
    write_bodies(path, bodies)
    with pytest.raises(RecordError, match="event 8 follows, 7 was due"):
        replay(path)
    write_bodies(path, [])
    with pytest.raises(RecordError, match="nothing was recorded yet"):
        replay(path)


@pytest.mark.parametrize(
    ("field", "key", "value"), [(5, "new", {}), (5, "cluster", 5), (6, "blocks", 2**63)]
)
def test_replay_of_a_record_by_another_version_reports_which(
    path: Path, field: int, key: str, value: object
) -> None:
    bodies = read_bodies(path)
    header = msgspec.msgpack.decode(bodies[0])
    header[2] = "9.9"
    header[field][key] = value
    write_bodies(path, [msgspec.msgpack.encode(header), *bodies[1:]])
    with pytest.raises(RecordError, match=r"recorded with vsched 9\.9, and its configuration"):
        replay(path)


def test_replay_of_a_record_whose_snapshots_have_another_layout(tmp_path: Path) -> None:
    """Its events lead to the same states, from the first one on; removed settings are left out."""
    path = tmp_path / "run.vlog"
    record_run(path, 0, events=300, segment_bytes=4096, segments=99)
    report = replay(path)
    downgrade(path)
    assert report.segments > 2
    assert replay(path) == report
    find_segments(path)[0].unlink()
    with pytest.raises(RecordError, match="whose snapshots cannot be read here"):
        replay(path)


# --- the command ---


def test_replay_command_prints_counts_and_writes_figures(path: Path, tmp_path: Path) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "out.json"
    output = run_command("replay", path, "--json", figures, "--timeline", trace)
    report = replay(path)
    assert f"{report.events} events from number 0 on" in output
    assert "Everything was decided the same again." in output
    assert "ui.perfetto.dev" in output
    assert msgspec.json.decode(figures.read_bytes())["decisions"] == report.decisions
    assert msgspec.json.decode(trace.read_bytes())["traceEvents"]


def test_replay_command_lists_unfinished_requests_of_a_killed_engine(path: Path) -> None:
    """Accepted requests without an end, up to the last event."""
    assert "Every request has an end." in run_command("replay", path, "--unfinished")
    bodies = read_bodies(path)
    write_bodies(path, bodies[: len(bodies) // 2])
    started: dict[str, None] = {}
    for body in bodies[1 : len(bodies) // 2]:
        for name, request_id, *_ in msgspec.msgpack.decode(body)[3]:
            if name == "Accept":
                started[request_id] = None
            elif name == "Finish":
                started.pop(request_id, None)
    assert started, "no request was running"
    assert [one.request_id for one in replay(path).unfinished] == [*started]
    output = run_command("replay", path, "--unfinished")
    lines = output.partition("requests without an end:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == [*started]


# --- built-in policies, which are found by their entry points ---


PLACES = {kind: seats_of(kind) for kind in DECISIONS if seats_of(kind)}
"""Names of seats by decision of the kernel."""
IN_KERNEL = [policy for policy in list_policies() if policy.kind in PLACES]
ONE_OF_EACH = {policy.kind: policy for policy in IN_KERNEL}.values()
TIGHT = SchedulerLimits(
    block_size=4,
    blocks=24,
    slots=3,
    batch_tokens=64,
    chunk_tokens=16,
    step_target_ns=1_000_000,
    context_tokens=64,
    page_rows=4,
    pages=8,
    encode_items=2,
    encoders=2,
    generators=2,
    drafts=True,
)
"""Two groups of each stage, with less of everything than they need."""
SEED = 20
"""A schedule that calls every kind of policy."""


def everywhere(registered: RegisteredPolicy) -> SeatPolicies:
    """Return the defaults with a policy in every place that its kind has."""
    policy = resolve_policy(registered.kind, {"use": registered.name})
    return default_policies(**dict.fromkeys(PLACES[registered.kind], policy))


def test_schedule_asks_every_kind() -> None:
    """The other kinds are called for each request; these only if a resource is short."""
    assert {policy.kind for policy in IN_KERNEL} == PLACES.keys()
    cluster = run_random(random.Random(SEED), limits=TIGHT)
    statistics = cluster.kernel.statistics()
    assert statistics["generate"]["preemptions"] > 0
    assert statistics["encode"]["cache_preemptions"] > 0
    assert statistics["generate"]["prefix_evictions"] > 0


@pytest.mark.parametrize(
    "registered",
    [*ONE_OF_EACH, *thorough(*(one for one in IN_KERNEL if one not in ONE_OF_EACH))],
    ids=lambda policy: f"{policy.kind}-{policy.name}",
)
def test_built_in_policy_is_replayed_exactly(tmp_path: Path, registered: RegisteredPolicy) -> None:
    """From the first event, and from a segment in the middle, with its state there; it fails in no call."""
    path = tmp_path / "record"
    policies = everywhere(registered)
    run = record_run(path, SEED, policies=policies, limits=TIGHT, segment_bytes=16384, segments=99)
    assert run.kernel.statistics()["policy_faults"] == {}
    assert replay(path).difference is None
    segments = find_segments(path)
    assert len(segments) > 1
    segments[0].unlink()
    report = replay(path)
    assert report.difference is None
    assert report.first_event > 0
