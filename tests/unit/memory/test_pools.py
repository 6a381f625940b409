"""Reservations by pool; shares in a host's memory: their sum is at most what is free, and no rank exceeds its limit."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.memory.views import rank_memory, reserved
from vsched.memory import HostShares, group_pools, on_host
from vsched.policy import RankMemory


def test_reservations_are_summed_by_pool() -> None:
    """Those that are held count among the peers instead."""
    reservations = [
        reserved(5, pool="b"),
        reserved(0, rank=1, pool="a"),
        reserved(9, rank=2, pool="a", held=True),
        reserved(7, pool="b"),
    ]
    ranks = [rank_memory(pool=pool, rank=rank) for rank, pool in enumerate("ab")]
    unheld = {pool.name: pool.unheld_bytes for pool in group_pools(ranks, reservations)}
    assert unheld == {"a": 0, "b": 12}


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


def test_shares_bound_limits_that_are_together_more_than_the_host_has() -> None:
    """Free memory, less that kept for others, in equal parts on top of the memory that each holds."""
    ranks = [limited(1, 900_000), limited(2, 800_000, reserved_bytes=200_000)]
    shares = HostShares(ranks, 700_000, kept_bytes=100_000)
    first, second = shares.within(ranks)
    assert (first.total_bytes, first.available_bytes) == (400_000, 300_000)
    assert (second.total_bytes, second.available_bytes) == (500_000, 300_000)
    note = shares.note()
    assert "generate-1 rank 0, generate-2 rank 0 may take 293.0 KiB each" in note
    assert "683.6 KiB free" in note


def test_shares_leave_limits_that_fit() -> None:
    """No share exceeds the rank's limit."""
    ranks = [limited(1, 300_000), limited(2, 900_000)]
    shares = HostShares(ranks, 1_000_000)
    first, second = shares.within(ranks)
    assert first == ranks[0]
    assert second.total_bytes == 600_000
    assert "generate-1" not in shares.note()
    assert HostShares(ranks, 10_000_000).note() == ""


def test_shares_of_a_pool_are_those_of_its_ranks() -> None:
    """Without limits, ranks see one memory; memory they hold in it counts once."""
    ranks = [rank_memory(rank=number, pool="cpu", available_bytes=600_000) for number in (0, 1)]
    shares = HostShares(ranks, 600_000, kept_bytes=200_000)
    for rank in shares.within(ranks):
        assert (rank.total_bytes, rank.available_bytes) == (800_000, 400_000)
    grown = [msgspec.structs.replace(rank, reserved_bytes=300_000) for rank in ranks]
    assert [rank.available_bytes for rank in shares.within(grown)] == [200_000, 200_000]


def test_shares_see_what_strangers_take_later() -> None:
    """A share is an upper bound: the minimum of it and the free memory counts."""
    rank = limited(1, 900_000)
    shares = HostShares([rank], 500_000)
    (bound,) = shares.within([msgspec.structs.replace(rank, available_bytes=10_000)])
    assert (bound.total_bytes, bound.available_bytes) == (600_000, 10_000)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("cpu", True), ("cpu limit of 7", True), ("cuda:GPU-1", False), ("device of 7", False)],
)
def test_shares_are_of_the_host(pool: str, *, expected: bool) -> None:
    assert on_host(pool) is expected
    rank = msgspec.structs.replace(limited(1, 900_000), pool=pool)
    assert (HostShares([rank], 0).within([rank]) != [rank]) is expected
