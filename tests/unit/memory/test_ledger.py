"""Ledger, pools and shares of a host's memory, every byte once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.memory.views import attempted, memory_view, rank_memory, reserved
from tests.workers.properties import REPEATABLE
from vsched.errors import DeviceOutOfMemory
from vsched.memory import HostShares, Ledger, LedgerLine, group_ledger, on_host
from vsched.policy import Attempt, RankMemory
from vsched.sim.ranks.device_memory import SimulatedMemory

POOLS = st.sampled_from(["a", "b", "c"])


@st.composite
def measured(draw: st.DrawFn) -> RankMemory:
    total = 10**9
    reserved_bytes = draw(st.integers(0, total))
    return rank_memory(
        rank=draw(st.integers(0, 99)),
        pool=draw(POOLS),
        total_bytes=total,
        reserved_bytes=reserved_bytes,
        available_bytes=draw(st.integers(0, total - reserved_bytes)),
        weights_bytes=draw(st.integers(0, reserved_bytes)),
        peak_bytes=draw(st.integers(0, total)),
        kv_bytes=draw(st.integers(0, 10**8)),
    )


@REPEATABLE
@given(
    ranks=st.lists(measured(), min_size=1, max_size=3),
    encoders=st.lists(measured(), max_size=2),
    growth=st.lists(st.tuples(POOLS, st.integers(0, 10**8), st.booleans()), max_size=3),
    headroom_bytes=st.integers(0, 10**8),
    together=st.booleans(),
)
def test_group_ledger_adds_up(
    ranks: list[RankMemory],
    encoders: list[RankMemory],
    growth: list[tuple[str, int, bool]],
    headroom_bytes: int,
    together: bool,
) -> None:
    """No line but unclaimed is negative, and every reservation is listed, even one of 0 bytes."""
    attempt = Attempt(
        action="build",
        tokens=1,
        outcome="fits",
        message="",
        ranks=ranks,
        headroom_bytes=headroom_bytes,
    )
    reservations = [reserved(size, pool=pool, held=held) for pool, size, held in growth]
    ledger = group_ledger(
        memory_view(ranks=ranks, reservations=reservations),
        [attempt],
        encoders=encoders,
        together=together,
    )
    for pool, total in ledger.totals.items():
        assert sum(line.bytes for line in ledger.of_pool(pool)) == total
    assert all(line.bytes >= 0 for line in ledger.lines if line.line != "unclaimed")
    activations = [line for line in ledger.lines if line.line == "encoder activations"]
    assert sorted(line.bytes for line in activations) == sorted(size for _, size, _ in growth)


def lines_of(ledger: Ledger, pool: str = "device") -> dict[str, int]:
    return {f"{line.owner} {line.line}".strip(): line.bytes for line in ledger.of_pool(pool)}


def test_group_ledger_after_loading() -> None:
    assert lines_of(group_ledger(memory_view())) == {
        "generate rank 0 weights": 150_000,
        "generate rank 0 kv": 0,
        "generate rank 0 language activations": 50_000,
        "others peers": 100_000,
        "unclaimed": 700_000,
    }


def test_group_ledger_at_the_peak_of_a_build() -> None:
    """The headroom has a line of its own, and is not among the activations."""
    build = attempted("build", 40_000, peak_bytes=700_000, reserved_bytes=600_000)
    view = memory_view(reservations=[reserved(30_000)])
    build = msgspec.structs.replace(build, headroom_bytes=50_000)
    assert lines_of(group_ledger(view, [build])) == {
        "generate rank 0 weights": 150_000,
        "generate rank 0 kv": 400_000,
        "generate rank 0 language activations": 100_000,
        "generate rank 0 headroom": 50_000,
        "others peers": 120_000,
        "encode rank 0 encoder activations": 30_000,
        "unclaimed": 150_000,
    }


def test_group_ledger_has_a_line_for_states() -> None:
    """They are not among the activations; a model without has no such line."""
    build = attempted("build", 40_000, peak_bytes=700_000, state_bytes=60_000)
    lines = lines_of(group_ledger(memory_view(), [build]))
    assert lines["generate rank 0 state"] == 60_000
    assert lines["generate rank 0 language activations"] == 700_000 - 150_000 - 400_000 - 60_000


def test_group_ledger_counts_an_encoder_once() -> None:
    """Memory of an encoder in a process of its own is no longer counted among the peers."""
    view = memory_view(reservations=[reserved(30_000, held=True)])
    encoder = rank_memory(weights_bytes=45_000)
    apart = lines_of(group_ledger(view, encoders=[encoder]))
    assert apart["others peers"] == 25_000
    assert apart["encode rank 0 weights"] == 45_000
    assert apart["encode rank 0 encoder activations"] == 30_000
    assert apart["generate rank 0 language activations"] == 50_000
    together = lines_of(group_ledger(view, encoders=[encoder], together=True))
    assert together["others peers"] == 100_000
    assert "encode rank 0 weights" not in together
    assert together["generate rank 0 language activations"] == 20_000
    assert apart["unclaimed"] == together["unclaimed"] == 700_000


def test_group_ledger_counts_ranks_on_one_device_once() -> None:
    ranks = [rank_memory(rank=rank, available_bytes=500_000) for rank in range(2)]
    ledger = lines_of(group_ledger(memory_view(ranks=ranks)))
    assert ledger["others peers"] == 100_000
    assert ledger["generate rank 1 weights"] == 150_000
    assert ledger["unclaimed"] == 500_000


def test_ledger_shows_overdrawn_accounts() -> None:
    ledger = Ledger.balanced({"a": 10}, [LedgerLine("a", "x", "kv", 30)])
    assert "unclaimed -20 bytes" in ledger.summary()


def example() -> Ledger:
    gib = 1 << 30
    return Ledger.balanced(
        {"cuda:GPU-1": 80 * gib, "host": 4 * gib},
        [
            LedgerLine("cuda:GPU-1", "generate rank 0", "weights", 15 * gib),
            LedgerLine("cuda:GPU-1", "generate rank 0", "kv", 60 * gib),
            LedgerLine("cuda:GPU-1", "encode rank 0", "encoder activations", 0),
            LedgerLine("cuda:GPU-1", "others", "peers", 0),
            LedgerLine("host", "engine", "arena", gib // 2),
        ],
    )


def test_ledger_renders_a_table() -> None:
    lines = [" ".join(line.split()) for line in example().render().splitlines()]
    assert lines[1:3] == ["cuda:GPU-1 total 80.00 GiB", "generate rank 0 weights 15.00 GiB 18.8 %"]
    assert "encode rank 0 encoder activations 0 bytes 0.0 %" in lines
    assert lines[-2:] == ["engine arena 512.0 MiB 12.5 %", "unclaimed 3.50 GiB 87.5 %"]


ENCODER = rank_memory(reserved_bytes=300_000)


def retried(*, measured: bool = True, owner: str = "generate") -> Ledger:
    """A probe that fits, a build that does not, and one that does, after a reservation of 7,000 bytes."""
    reservation = msgspec.structs.replace(reserved(7_000), measured=measured)
    attempts = [
        attempted("probe", 1_000),
        attempted("build", 60_000, "out_of_memory", peak_bytes=990_000),
        attempted("build", 57_000),
    ]
    view = memory_view(reservations=[reservation])
    return group_ledger(view, attempts, encoders=[ENCODER], owner=owner)


def test_phases_are_the_reservations_and_then_every_attempt_with_its_retries() -> None:
    phases = retried(owner="generate-1").phases
    reported = [(one.owner, one.action, one.outcome, one.tokens, one.retry) for one in phases]
    assert reported == [
        ("encode rank 0", "reserve", "fits", 0, 0),
        ("generate-1", "probe", "fits", 1_000, 0),
        ("generate-1", "build", "out_of_memory", 60_000, 0),
        ("generate-1", "build", "fits", 57_000, 1),
    ]
    assert [one.ranks[0].peak_bytes for one in phases] == [307_000, 260_000, 990_000, 820_000]


def test_phases_are_drawn_with_the_reports_of_ranks() -> None:
    """The table distinguishes configured sizes from measured ones."""
    table = " ".join(retried(measured=False).render_phases().split())
    assert "encode rank 0: reserve fits, not measured" in table
    assert "generate: build out of memory 60,000" in table
    assert "generate: build, retry 1 fits 57,000" in table
    assert "generate: build: rank 0: out_of_memory" in table
    assert Ledger.balanced({}, []).render_phases() == ""


def test_phases_are_in_the_json_of_the_ledger() -> None:
    ledger = msgspec.json.decode(msgspec.json.encode(retried().as_dict()))
    phases: list[dict[str, Any]] = ledger["phases"]
    assert [one["action"] for one in phases] == ["reserve", "probe", "build", "build"]
    assert phases[2]["message"] == "rank 0: out_of_memory"
    assert phases[2]["ranks"][0]["peak_bytes"] == 990_000


def limited(pid: int, limit_bytes: int, *, reserved_bytes: int = 100_000) -> RankMemory:
    """A rank under a limit of its own, from its own point of view."""
    return rank_memory(
        rank=pid,
        pool=f"cpu limit of {pid}",
        total_bytes=limit_bytes,
        available_bytes=limit_bytes - reserved_bytes,
        reserved_bytes=reserved_bytes,
        owner=f"generate-{pid} rank 0",
    )


def test_shares_leave_limits_that_fit() -> None:
    ranks = [limited(1, 300_000), limited(2, 900_000)]
    shares = HostShares(ranks, 1_000_000)
    first, second = shares.within(ranks)
    assert first == ranks[0]
    assert second.total_bytes == 600_000
    assert "generate-1" not in shares.limit_note()
    assert HostShares(ranks, 10_000_000).limit_note() == ""


def test_shares_of_a_pool_are_those_of_its_ranks() -> None:
    """Without limits, ranks see one memory; memory they hold in it counts once."""
    ranks = [rank_memory(rank=number, pool="cpu", available_bytes=600_000) for number in (0, 1)]
    shares = HostShares(ranks, 600_000, kept_bytes=200_000)
    for rank in shares.within(ranks):
        assert (rank.total_bytes, rank.available_bytes) == (800_000, 400_000)
    grown = [msgspec.structs.replace(rank, reserved_bytes=300_000) for rank in ranks]
    assert [rank.available_bytes for rank in shares.within(grown)] == [200_000, 200_000]


def test_shares_see_memory_that_other_programs_take_later() -> None:
    """A share is an upper bound: the minimum of it and the free memory counts."""
    rank = limited(1, 900_000)
    shares = HostShares([rank], 500_000)
    (bound,) = shares.within([msgspec.structs.replace(rank, available_bytes=10_000)])
    assert (bound.total_bytes, bound.available_bytes) == (600_000, 10_000)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("cpu", True),
        ("cpu limit of 7", True),
        ("far: cpu limit of 7", False),
        ("device of 7", False),
    ],
)
def test_shares_are_of_the_host(pool: str, *, expected: bool) -> None:
    assert on_host(pool) is expected
    rank = msgspec.structs.replace(limited(1, 900_000), pool=pool)
    assert (HostShares([rank], 0).within([rank]) != [rank]) is expected


MIB = 1 << 20


def test_simulated_memory_fragments() -> None:
    """Two free pieces of two segments make no large one, and one small tenant keeps a whole segment."""
    memory = SimulatedMemory(48 * MIB)
    handles = [memory.allocate(5 * MIB) for _ in range(8)]
    for handle in handles[1:4] + handles[5:]:
        memory.free(handle)
    assert memory.reserved() - memory.allocated() == 30 * MIB
    with pytest.raises(DeviceOutOfMemory, match=r"value 16777216 bytes, limit 8388608 bytes free"):
        memory.allocate(16 * MIB)
    memory.allocate(15 * MIB)
    memory.release()
    assert memory.reserved() == 40 * MIB
