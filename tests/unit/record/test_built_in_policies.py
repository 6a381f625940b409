"""Every built-in policy is replayed byte for byte, and decides the same when restored before every event.

They are found by their entry points, so new ones are covered automatically.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.kernel.test_snapshot import RestoredCluster, noting
from tests.unit.record.recorded import record_run
from vsched.kernel import SchedulerLimits
from vsched.plugins import RegisteredPolicy, list_policies, resolve_policy
from vsched.policy import DECISIONS
from vsched.policy_host import SeatPolicies
from vsched.record import replay
from vsched.record.files import find_segments
from vsched.testing import ModelCluster, default_policies, run_random
from vsched.testing.cluster import seats_of

PLACES = {kind: seats_of(kind) for kind in DECISIONS if kind != "memory"}
"""Names of seats by decision."""
IN_KERNEL = [policy for policy in list_policies() if policy.kind in PLACES]
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
built_in = pytest.mark.parametrize(
    "registered", IN_KERNEL, ids=lambda policy: f"{policy.kind}-{policy.name}"
)


def everywhere(registered: RegisteredPolicy) -> SeatPolicies:
    """Return the defaults with a policy in every place that its kind has."""
    policy = resolve_policy(registered.kind, {"use": registered.name})
    return default_policies(**dict.fromkeys(PLACES[registered.kind], policy))


def test_every_kind_that_the_kernel_asks_has_a_built_in() -> None:
    assert {policy.kind for policy in IN_KERNEL} == PLACES.keys()


def test_schedule_asks_every_kind() -> None:
    """The other kinds are called for each request; these only if a resource is short."""
    cluster = run_random(random.Random(SEED), limits=TIGHT)
    statistics = cluster.kernel.statistics()
    assert statistics["generate"]["preemptions"] > 0
    assert statistics["encode"]["cache_preemptions"] > 0
    assert statistics["generate"]["prefix_evictions"] > 0


@built_in
def test_built_in_policy_is_replayed_byte_for_byte(
    tmp_path: Path, registered: RegisteredPolicy
) -> None:
    """From the first event, and from a segment in the middle, with its state there."""
    path = tmp_path / "record"
    policies = everywhere(registered)
    record_run(path, SEED, policies=policies, limits=TIGHT, segment_bytes=16384, segments=99)
    assert replay(path).difference is None
    segments = find_segments(path)
    assert len(segments) > 1
    segments[0].unlink()
    report = replay(path)
    assert report.difference is None
    assert report.first_event > 0


@built_in
def test_built_in_policy_goes_on_alike_after_a_restart(registered: RegisteredPolicy) -> None:
    """A run that is restored from a snapshot before every event decides as one without restarts."""
    decided: list[list[str]] = []
    for make in (ModelCluster, RestoredCluster):
        commands: list[str] = []
        policies, rng = everywhere(registered), random.Random(SEED)
        run_random(rng, policies, limits=TIGHT, make=noting(make, commands))
        decided.append(commands)
    assert decided[0] == decided[1]
