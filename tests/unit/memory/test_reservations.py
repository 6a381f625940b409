"""What encode ranks publish: complete, or not read at all."""

from __future__ import annotations

import pytest

from tests.unit.memory.views import reserved
from vsched.errors import GroupLost
from vsched.memory import Reservations


def test_reservations_are_summed_by_pool() -> None:
    """B7: published by group and rank, summed by device, 0 bytes when skipped."""
    reservations = Reservations({"encode 0": 2, "encode 1": 1})
    reservations.publish("encode 1", reserved(5, pool="b"))
    reservations.publish("encode 0", reserved(0, rank=1, pool="a", held=True))
    reservations.publish("encode 0", reserved(7, pool="b"))
    assert reservations.missing() == []
    assert reservations.growth_by_pool() == {"b": 12, "a": 0}
    assert [each.growth_bytes for each in reservations.complete()] == [7, 0, 5]


def test_reservations_missing_is_not_nothing() -> None:
    """B8: a rank that has not published is waited for, and named; it is never read as 0."""
    reservations = Reservations({"encode 0": 2, "encode 1": 1})
    reservations.publish("encode 0", reserved(0))
    assert reservations.missing() == ["encode 0 rank 1", "encode 1 rank 0"]
    with pytest.raises(GroupLost, match="encode 0 rank 1, encode 1 rank 0 did not"):
        reservations.complete()
    with pytest.raises(GroupLost):
        reservations.growth_by_pool()
    reservations.publish("encode 0", reserved(3, rank=1))
    reservations.publish("encode 1", reserved(4))
    assert sum(reservations.growth_by_pool().values()) == 7


def test_reservations_without_encoders_are_complete() -> None:
    assert Reservations({}).complete() == []


def test_reservations_last_word_counts() -> None:
    """B7: a rank that restarts publishes again, and is not counted twice."""
    reservations = Reservations({"encode": 1})
    reservations.publish("encode", reserved(7))
    reservations.publish("encode", reserved(9))
    assert reservations.growth_by_pool() == {"device": 9}


def test_reservations_overdue_names_deadline_and_remedy() -> None:
    """B8: the failure after the deadline is clear."""
    reservations = Reservations({"encode": 2})
    reservations.publish("encode", reserved(7))
    message = str(reservations.overdue(waited_s=300.0))
    assert "encode rank 1 did not within 300 s" in message
    assert "value 1 of 2 reservations, limit all of them, within deadlines.ready_s" in message
    assert "Remedy: look for the reason" in message


def test_reservations_refuse_strangers() -> None:
    with pytest.raises(AssertionError, match="encode has 1 ranks"):
        Reservations({"encode": 1}).publish("encode", reserved(7, rank=1))
