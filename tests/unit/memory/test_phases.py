"""The phases of sizing: each reservation, probe and build, its outcome and its retries."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.memory.views import attempted, memory_view, rank_memory, reserved
from vsched.errors import DeviceOutOfMemory
from vsched.memory import KvNegotiation, Ledger, Sized, group_ledger
from vsched.policy import AttemptOutcome, Build
from vsched_policies.memory import AutoProfile, Fraction

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
    assert [one.ranks[0].peak_bytes for one in phases] == [
        307_000,
        260_000,
        990_000,
        820_000,
    ]


def test_phases_are_drawn_with_what_ranks_said() -> None:
    """The table distinguishes configured sizes from measured ones."""
    table = retried(measured=False).render_phases()
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["phase", "outcome", "KV", "tokens", "headroom", "peak", "limit"]
    assert lines[1][:7] == ["encode", "rank", "0:", "reserve", "fits,", "not", "measured"]
    assert lines[3][:6] == ["generate:", "build", "out", "of", "memory", "60,000"]
    assert lines[4][:6] == ["generate:", "build,", "retry", "1", "fits", "57,000"]
    assert lines[5] == ["generate:", "build:", "rank", "0:", "out_of_memory"]
    assert Ledger.balanced({}, []).render_phases() == ""


def test_phases_are_in_the_json_of_the_ledger() -> None:
    ledger = msgspec.json.decode(msgspec.json.encode(retried().as_dict()))
    phases: list[dict[str, Any]] = ledger["phases"]
    assert [one["action"] for one in phases] == ["reserve", "probe", "build", "build"]
    assert phases[2]["message"] == "rank 0: out_of_memory"
    assert phases[2]["ranks"][0]["peak_bytes"] == 990_000


def fit_after(failures: int, negotiation: KvNegotiation) -> None:
    """Reply to each order; the first `failures` builds do not fit."""
    order, left = negotiation.start(), failures
    while not hasattr(order, "blocks"):
        fails = isinstance(order, Build) and left > 0
        left -= fails
        outcome: AttemptOutcome = "out_of_memory" if fails else "fits"
        memory = rank_memory(kv_bytes=10 * order.tokens, peak_bytes=210_000 + 10 * order.tokens)
        order = negotiation.take([Sized(outcome, "", memory)])


@pytest.mark.parametrize("failures", [0, 2])
def test_phases_of_a_negotiation_report_headroom_and_retries(failures: int) -> None:
    negotiation = KvNegotiation(AutoProfile(headroom_bytes=5_000), memory_view())
    fit_after(failures, negotiation)
    phases = negotiation.ledger().phases
    assert [(one.action, one.retry, one.headroom_bytes) for one in phases] == [
        ("probe", 0, 0),
        *[("build", retry, 5_000) for retry in range(failures + 1)],
    ]
    assert all(one.profile for one in phases)


def test_phases_of_a_negotiation_that_failed_are_kept() -> None:
    """A start that fails has its ledger, with every retry."""
    negotiation = KvNegotiation(AutoProfile(headroom_bytes=5_000), memory_view())
    with pytest.raises(DeviceOutOfMemory):
        fit_after(99, negotiation)
    assert [one.retry for one in negotiation.ledger().phases] == [0, 0, 1, 2, 3]


def test_phase_of_a_build_without_steps_reports_it() -> None:
    negotiation = KvNegotiation(Fraction(), memory_view())
    fit_after(0, negotiation)
    assert [(one.action, one.profile) for one in negotiation.ledger().phases] == [("build", False)]
