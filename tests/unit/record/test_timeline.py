from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.trace_format import check_trace_events
from tests.unit.record.recorded import RecordedCluster, record_run
from tests.unit.sim.shapes import COST, arrival, config
from vsched.config import load_config
from vsched.kernel import SchedulerLimits
from vsched.kernel.events import Stepped
from vsched.record import TraceTimeline, replay
from vsched.sim.cost.model import GenerateCost
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import workload_of

LIMITS = SchedulerLimits(
    blocks=60,
    slots=4,
    batch_tokens=64,
    context_tokens=200,
    page_rows=4,
    pages=40,
    encoders=2,
    generators=2,
)
Trace = list[dict[str, Any]]
LOSING_SEED = 5
"""A schedule that loses a group during a step."""


def trace_of(path: Path) -> Trace:
    file = io.BytesIO()
    drawn = TraceTimeline(file)
    report = replay(path, observer=drawn)
    drawn.close()
    assert report.difference is None
    events: Trace = msgspec.json.decode(file.getvalue())["traceEvents"]
    assert len(events) == drawn.events
    check_trace_events(events)
    return events


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, RecordedCluster]:
    path = tmp_path_factory.mktemp("timeline") / "run.vlog"
    cluster = record_run(path, 3, limits=LIMITS, events=400, faults=False)
    return trace_of(path), cluster


def named(trace: Trace, key: str) -> dict[str, int]:
    return {one["args"]["name"]: one["pid"] for one in trace if one["name"] == key}


def test_timeline_has_a_slice_for_each_step_in_the_process_of_its_group(
    traced: tuple[Trace, RecordedCluster],
) -> None:
    trace, cluster = traced
    groups = {"encode-0", "encode-1", "generate-0", "generate-1"}
    assert {"scheduler", *groups} == set(named(trace, "process_name"))
    slices: dict[int, Trace] = {}
    for one in trace:
        if one["ph"] == "X":
            slices.setdefault(one["pid"], []).append(one)
    assert len(slices) == 4
    assert sum(map(len, slices.values())) == len(cluster.decisions) + len(cluster.encoded)
    for own in slices.values():
        assert [one["args"]["step"] for one in own] == list(range(1, len(own) + 1))
        for before, after in pairwise(own):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6


def test_timeline_counts_the_work_of_steps(traced: tuple[Trace, RecordedCluster]) -> None:
    trace, cluster = traced
    prefill = sum(one["args"].get("prefill_tokens", 0) for one in trace if one["ph"] == "X")
    yielded = sum(one["args"].get("yielded", 0) for one in trace if one["ph"] == "X")
    decodes = sum(one["args"].get("decodes", 0) for one in trace if one["ph"] == "X")
    assert prefill == cluster.kernel.statistics()["generate"]["tokens_prefilled"]
    received = [event for event in cluster.received if isinstance(event, Stepped)]
    assert yielded == sum(token >= 0 for event in received for token in event.tokens)
    assert 0 < decodes < yielded
    counters = {one["name"] for one in trace if one["ph"] == "C"}
    blocks = {"KV blocks of generate-0", "KV blocks of generate-1"}
    assert counters == {"requests", "encode queue", "embedding pages", "prompt tokens"} | blocks


def test_timeline_ends_every_request_that_it_begins(traced: tuple[Trace, RecordedCluster]) -> None:
    trace, _ = traced
    started = Counter((one["id"], one["name"]) for one in trace if one["ph"] == "b")
    ended = Counter((one["id"], one["name"]) for one in trace if one["ph"] == "e")
    assert started == ended
    assert "decode" in {name for _, name in started}


def test_timeline_has_a_track_for_each_rank() -> None:
    file = io.BytesIO()
    drawn = TraceTimeline(file)
    drawn.see_start(load_config(None, sets=["generate.tensor_parallel=4"], environ={}).config)
    drawn.close()
    trace = msgspec.json.decode(file.getvalue())["traceEvents"]
    process = named(trace, "process_name")["generate"]
    tracks = [one for one in trace if one["name"] == "thread_name" and one["pid"] == process]
    assert [one["args"]["name"] for one in tracks] == [f"rank {rank}" for rank in range(4)]


def test_timeline_shows_steps_cut_off_by_a_loss(tmp_path: Path) -> None:
    record_run(tmp_path / "run.vlog", LOSING_SEED, limits=LIMITS, events=200)
    trace = trace_of(tmp_path / "run.vlog")
    lost = {one["pid"] for one in trace if "lost" in one.get("args", ())}
    marks = {one["pid"] for one in trace if one["ph"] == "i" and "lost on purpose" in one["name"]}
    assert lost
    assert lost <= marks


def test_timeline_of_a_record_without_its_beginning_is_whole(tmp_path: Path) -> None:
    record_run(tmp_path / "run.vlog", 3, limits=LIMITS, events=300, segment_bytes=4096, segments=2)
    trace = trace_of(tmp_path / "run.vlog")
    assert Counter(one["ph"] for one in trace)["X"] > 3
    assert all(one.get("ts", 0) >= 0 for one in trace)


def test_timeline_shows_rejections_and_that_nothing_runs_until_the_next_event() -> None:
    file = io.BytesIO()
    drawn = TraceTimeline(file)
    settings = config("arrival={use='tenant-fair',rate=0.1,burst=1}")
    costs = msgspec.structs.replace(COST, generate=GenerateCost(step_ns=4e5))
    requests = workload_of("", [arrival(0, 0, outputs=3), arrival(1, 5000)])
    simulate(settings, requests, cost=costs, observers=[drawn])
    drawn.close()
    trace: Trace = msgspec.json.decode(file.getvalue())["traceEvents"]
    assert [one["args"]["running"] for one in trace if one["name"] == "requests"] == [0, 1, 0]
    assert sum(one["name"].startswith("rejected: ") for one in trace) == 1
