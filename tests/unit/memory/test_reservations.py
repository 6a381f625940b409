"""Reservations of encode ranks are complete, or not read at all."""

from __future__ import annotations

import pytest

from tests.unit.memory.views import rank_memory, reserved
from vsched.memory import Reservations, group_pools


def test_reservations_are_summed_by_pool() -> None:
    """Published by group and rank, summed by device, 0 bytes when skipped."""
    reservations = Reservations({"encode-0": 2, "encode-1": 1})
    reservations.publish("encode-1", reserved(5, pool="b"))
    reservations.publish("encode-0", reserved(0, rank=1, pool="a", held=True))
    reservations.publish("encode-0", reserved(7, pool="b"))
    assert reservations.missing() == []
    assert [each.growth_bytes for each in reservations.of_group("encode-0")] == [7, 0]
    all_of_them = [*reservations.of_group("encode-0"), *reservations.of_group("encode-1")]
    ranks = [rank_memory(pool=pool, rank=rank) for rank, pool in enumerate("ab")]
    unheld = {pool.name: pool.unheld_bytes for pool in group_pools(ranks, all_of_them)}
    assert unheld == {"a": 0, "b": 12}


def test_reservations_missing_is_not_nothing() -> None:
    """A rank that has not published is waited for, and named; it is never read as 0."""
    reservations = Reservations({"encode-0": 2, "encode-1": 1})
    reservations.publish("encode-0", reserved(0))
    assert reservations.missing() == ["encode-0 rank 1", "encode-1 rank 0"]
    with pytest.raises(KeyError):
        reservations.of_group("encode-0")
    reservations.publish("encode-0", reserved(3, rank=1))
    assert [each.growth_bytes for each in reservations.of_group("encode-0")] == [0, 3]
    assert reservations.missing() == ["encode-1 rank 0"]


def test_reservations_without_encoders_are_complete() -> None:
    reservations = Reservations({})
    assert reservations.missing() == []
    assert reservations.of_group("") == []
    assert reservations.overdue() == ""


def test_reservations_last_word_counts() -> None:
    """A rank that restarts publishes again, and is not counted twice."""
    reservations = Reservations({"encode": 1})
    reservations.publish("encode", reserved(7))
    reservations.publish("encode", reserved(9))
    assert [each.growth_bytes for each in reservations.of_group("encode")] == [9]


def test_reservations_overdue_names_deadline_and_remedy() -> None:
    """The failure after the deadline is clear."""
    reservations = Reservations({"encode": 2})
    reservations.publish("encode", reserved(7))
    message = reservations.overdue()
    assert "encode rank 1 did not" in message
    assert "value 1 of 2 reservations, limit all of them, within deadlines.ready_s" in message
    assert "Remedy: look for the reason" in message


def test_reservations_refuse_strangers() -> None:
    with pytest.raises(AssertionError, match="encode has 1 ranks"):
        Reservations({"encode": 1}).publish("encode", reserved(7, rank=1))
