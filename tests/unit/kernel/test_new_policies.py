"""`PolicyReplaced` with tables: new policies decide while requests run, also in snapshots and replays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import random_policies
from tests.unit.kernel.setups import complete, crash
from tests.unit.record.recorded import record_run
from vsched.errors import ConfigError
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.events import Event, PolicyReplaced
from vsched.plugins import resolve_policy
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    Hold,
    RequestPolicy,
)
from vsched.policy_host.snapshot import encode_snapshot, restore_snapshot
from vsched.record import replay
from vsched.testing import ModelCluster, default_policies, make_request
from vsched_policies.requests import ABSENT_NS, ServedTokens, TenantFair

LIMITS = SchedulerLimits(blocks=32, slots=4, context_tokens=256, pages=8, generators=2)
HERE = __name__


class Counts(msgspec.Struct):
    arrived: int = 0
    requested: int = 0


class OneAtATime(RequestPolicy, frozen=True, kw_only=True):
    """Holds arrivals, admits one request at a time, and counts."""

    state_type = Counts
    hold_s: int = 50

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        view.state.arrived += 1
        return Hold(view.now_ns + self.hold_s * 10**9) if self.hold_s else Admit()

    def admit(self, view: AdmissionView) -> Admission:
        view.state.requested += 1
        return Admission(range(0 if view.running else 1))


def install(cluster: ModelCluster, **tables: dict[str, Any]) -> None:
    named = {path.replace("__", "."): table for path, table in tables.items()}
    cluster.send(PolicyReplaced(tables=named))


def submit(cluster: ModelCluster, count: int = 4) -> None:
    for number in range(count):
        cluster.submit(make_request(f"r{len(cluster.requests)}", [number, 2, 3], max_tokens=30))


def check_restored(cluster: ModelCluster) -> None:
    """Check that a snapshot keeps the policies and their states."""
    fresh = Scheduler(LIMITS, default_policies())
    restored = restore_snapshot(fresh, encode_snapshot(cluster.kernel))
    assert restored.policy_states() == cluster.kernel.policy_states()
    assert restored.statistics() == cluster.kernel.statistics()


def running(cluster: ModelCluster) -> int:
    return sum(group.slots_held for group in cluster.kernel.generators)


def test_a_new_policy_decides_about_requests_that_wait() -> None:
    cluster = ModelCluster(LIMITS, default_policies(generate_admission=OneAtATime()))
    submit(cluster)
    assert running(cluster) == 2  # one in each group
    install(cluster, generate__admission={"use": "fifo"})
    for group in ("generate-0", "generate-1"):
        cluster.run_generate(group)
    assert running(cluster) == 4
    assert cluster.notices == ["from now on, fifo decides as generate.admission"]
    statistics = cluster.kernel.statistics()
    assert statistics["policy_tables"] == {"generate.admission": {"use": "fifo"}}
    assert "generate-0.admission" not in cluster.kernel.policy_states()
    cluster.drain()
    cluster.check_settled()


def test_a_new_policy_has_fresh_states_and_takes_the_place_of_a_default() -> None:
    cluster = ModelCluster(LIMITS, default_policies(generate_admission=OneAtATime()))
    submit(cluster)
    fresh = msgspec.msgpack.encode(Counts())
    assert cluster.kernel.policy_states()["generate-0.admission"] != fresh
    for reason in ("too slow", "again"):
        cluster.send(PolicyReplaced("generate-0.admission", reason))
    cluster.send(PolicyReplaced("nowhere", "?"))
    assert cluster.notices == ["the default decides from now on as generate-0.admission: too slow"]
    cluster.run_generate("generate-0")
    assert running(cluster) == 3  # two in the group of the default
    statistics = cluster.kernel.statistics()
    assert statistics["policy_replaced"] == {"generate-0.admission": "too slow"}
    assert statistics["policy_faults"] == {}
    cluster.drain()
    watched: list[str] = []

    def watch(seat: str, ask: Any) -> Any:
        watched.append(seat)
        return ask

    cluster.kernel.watch_policies(watch)
    assert "generate-0.admission" not in watched
    install(cluster, generate__admission={"use": f"{HERE}:OneAtATime", "hold_s": 1})
    assert watched[-2:] == ["generate-0.admission", "generate-1.admission"]
    assert cluster.kernel.policy_states()["generate-0.admission"] == fresh
    assert cluster.kernel.statistics()["policy_replaced"] == {}


def test_requests_held_at_the_arrival_are_decided_again() -> None:
    cluster = ModelCluster(LIMITS, default_policies(arrival=OneAtATime()))
    for number in range(3):
        cluster.arrive(make_request(f"r{number}", [1, 2, 3]))
    assert cluster.kernel.statistics()["arrival"]["held_now"] == 3
    install(cluster, arrival={"use": "open"})
    assert len(cluster.requests) == 3
    cluster.drain()
    cluster.check_settled()


def test_one_policy_takes_several_seats_with_one_state() -> None:
    cluster = ModelCluster(LIMITS)
    seats = ["arrival", "generate.admission"]
    install(cluster, policy={"use": f"{HERE}:OneAtATime", "hold_s": 0, "seats": seats})
    cluster.arrive(make_request("a", [1, 2, 3]))
    states = cluster.kernel.policy_states()
    assert states["arrival"] == states["generate-0.admission"] == states["generate-1.admission"]
    assert msgspec.msgpack.decode(states["arrival"], type=Counts).arrived == 1
    assert "encode.admission" not in states
    install(cluster, arrival={"use": "open"})
    assert "arrival" not in cluster.kernel.policy_states()
    check_restored(cluster)


@pytest.mark.parametrize(("name", "cached"), [("s3-fifo", 6), ("none", 0)])
def test_evictable_entries_are_handed_to_a_new_eviction_order(name: str, cached: int) -> None:
    cluster = ModelCluster(msgspec.structs.replace(LIMITS, generators=1))
    for letter in "abc":
        items = [(0, 64, letter.encode())]
        complete(cluster, make_request(letter, [ord(letter)] * 33, items, max_tokens=1))
    before = cluster.kernel.statistics()
    install(cluster, generate__eviction={"use": name}, encode__eviction={"use": name})
    after = cluster.kernel.statistics()
    kept = before["generate"]["blocks_cached"] if cached else 0
    assert before["generate"]["blocks_cached"] > 0
    assert after["generate"]["blocks_cached"] == kept
    assert after["encode"]["pages_evictable"] == (3 if cached else 0)
    for number, letter in enumerate("xyzxyz"):
        complete(cluster, make_request(f"{letter}{number}", [ord(letter)] * 200))
    cluster.check_settled()


def test_a_lost_group_comes_back_with_the_new_eviction_policy() -> None:
    cluster = ModelCluster(LIMITS)
    install(cluster, generate__eviction={"use": "none"})
    crash(cluster, "generate-0")
    submit(cluster)
    cluster.drain()
    assert cluster.kernel.statistics()["generate"]["blocks_cached"] == 0


def test_a_policy_that_cannot_be_built_changes_nothing() -> None:
    cluster = ModelCluster(LIMITS)
    tables = {"generate.step": {"use": "tenant-fair"}, "routing": {"use": "nowhere"}}
    with pytest.raises(ConfigError, match="'nowhere' is unknown"):
        cluster.send(PolicyReplaced(tables=tables))
    assert cluster.kernel.statistics()["policy_tables"] == {}
    assert "generate-0.step" not in cluster.kernel.policy_states()


CHOICES: dict[str, list[dict[str, Any]]] = {
    "encode.admission": [{"use": "token-budget", "max_items": 2}, {"use": "fifo"}],
    "encode.eviction": [{"use": "lru"}, {"use": "s3-fifo"}, {"use": "none"}],
    "encode.reclaim": [{"use": "youngest"}],
    "generate.admission": [{"use": "shortest-first"}, {"use": "tenant-fair"}],
    "generate.eviction": [{"use": "lru"}, {"use": "s3-fifo"}, {"use": "none"}],
    "generate.step": [{"use": "tenant-fair"}, {"use": "slo-feedback"}, {"use": "in-order"}],
    "generate.insertion": [{"use": "matching", "tokens_min": 20}, {"use": "everything"}],
    "arrival": [{"use": "tenant-fair", "rate": 0.5, "burst": 1, "wait_s": 5}, {"use": "open"}],
    "policy": [{"use": f"{HERE}:OneAtATime", "hold_s": 1, "seats": ["arrival"]}],
}


@pytest.mark.parametrize("seed", range(4))
def test_a_record_of_replacements_is_replayed_from_any_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(f"replacements {seed}")
    send = ModelCluster.send

    def with_replacements(self: ModelCluster, event: Event) -> object:
        if rng.random() < 0.05:
            send(self, PolicyReplaced(rng.choice([*self.kernel._seats._seats]), "too slow"))
        if rng.random() < 0.15:
            paths = rng.sample(sorted(CHOICES), rng.randint(1, 2))
            if not {"policy", "arrival"}.issubset(paths):
                tables = {path: rng.choice(CHOICES[path]) for path in paths}
                send(self, PolicyReplaced(tables=tables))
        return send(self, event)

    monkeypatch.setattr(ModelCluster, "send", with_replacements)
    path = tmp_path / "run.vlog"
    policies = default_policies()
    if seed % 2:
        drawn = random_policies(random.Random(seed))
        policies = msgspec.structs.replace(drawn, build=resolve_policy)
    cluster = record_run(path, seed, policies=policies, segment_bytes=4096, segments=100)
    assert cluster.kernel.statistics()["policy_tables"]
    report = replay(path)
    assert report.difference is None
    for old in sorted(tmp_path.glob("run.vlog.*"))[: report.segments // 2]:
        old.unlink()
    assert replay(path).difference is None


class Fails(RequestPolicy, frozen=True, kw_only=True):
    kind: str

    def admit(self, view: AdmissionView) -> Admission:
        raise {"old": LookupError, "new": ZeroDivisionError}[self.kind](self.kind)


def test_failures_of_a_policy_that_is_installed_again_are_noticed() -> None:
    cluster = ModelCluster(LIMITS, default_policies(generate_admission=Fails(kind="old")))
    for number in range(200):
        complete(cluster, make_request(f"r{number}", [number, 2], max_tokens=1))
    assert cluster.kernel.statistics()["policy_faults"]["Fails"] > 100
    cluster.notices.clear()
    install(cluster, generate__admission={"use": f"{HERE}:Fails", "kind": "new"})
    submit(cluster, 1)
    cluster.drain()
    assert cluster.kernel.statistics()["policy_faults"]["Fails"] < 10
    assert any("(ZeroDivisionError: new)" in notice for notice in cluster.notices)
    (trace,) = cluster.kernel.policy_failures.values()
    assert "ZeroDivisionError: new" in "".join(trace.format())


class KeepsSeats(RequestPolicy, frozen=True, kw_only=True):
    """Leaves slots free; its field has the name of a key of the table `policy`."""

    seats: int

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(0 if view.running else view.entries_free - self.seats))


def test_a_policy_may_have_a_field_seats() -> None:
    cluster = ModelCluster(LIMITS)
    install(cluster, generate__admission={"use": f"{HERE}:KeepsSeats", "seats": 3})
    submit(cluster)
    for group in ("generate-0", "generate-1"):
        cluster.run_generate(group)
    assert running(cluster) == 2
    check_restored(cluster)
    install(cluster, generate__admission={"use": "fifo"})
    assert cluster.kernel.statistics()["policy_tables"] == {"generate.admission": {"use": "fifo"}}
    cluster.drain()
    cluster.check_settled()


def test_a_later_policy_leaves_the_other_seats_to_the_one_before() -> None:
    cluster = ModelCluster(LIMITS)
    first = {"use": f"{HERE}:OneAtATime", "hold_s": 0, "seats": ["arrival", "generate.admission"]}
    second = {"use": f"{HERE}:OneAtATime", "hold_s": 0, "seats": ["arrival"]}
    install(cluster, policy=first)
    install(cluster, policy=second)
    decide = {"arrival": second, "generate.admission": first}
    assert cluster.kernel.statistics()["policy_tables"] == decide
    cluster.arrive(make_request("a", [1, 2, 3]))
    check_restored(cluster)
    install(cluster, policy={**first, "seats": ["generate.admission"]})
    assert cluster.kernel.statistics()["policy_tables"].keys() == decide.keys()


def test_tenant_fair_counts_on_when_another_policy_decides_at_arrival() -> None:
    limits = msgspec.structs.replace(LIMITS, generators=1)
    cluster = ModelCluster(limits, default_policies(TenantFair()))

    def counted_after(*names: str) -> float:
        for name in names:
            request = make_request(name, [1, 2, 3], max_tokens=30)
            cluster.arrive(msgspec.structs.replace(request, tenant="a"))
            cluster.drain()
        data = cluster.kernel.policy_states()["generate.admission"]
        return msgspec.msgpack.decode(data, type=ServedTokens).tokens["a"]

    before = counted_after("r0", "r1")
    install(cluster, arrival={"use": "open"})
    cluster.wait(2 * ABSENT_NS)
    assert counted_after("r2", "r3") == before + 2 * (3 + 2 * 30)
