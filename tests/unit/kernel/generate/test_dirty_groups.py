"""Only marked groups are planned, with the same decisions as if all were, and no mark is missing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.unit.kernel.policy_pool import random_policies
from vsched.kernel.commands import Command
from vsched.kernel.groups import DirtyGroups
from vsched.policy_host.waiting import Holds
from vsched.testing import ModelCluster, run_random


class Listening(ModelCluster):
    """Keeps every command."""

    received: list[Command]

    def carry_out(self, command: Command) -> None:
        self.__dict__.setdefault("received", []).append(command)
        super().carry_out(command)


def run(seed: int) -> ModelCluster:
    """Run a random schedule under random policies, or under the default ones."""
    rng = random.Random(seed)
    return run_random(rng, random_policies(rng) if seed % 3 else None, make=Listening)


def run_many() -> None:
    for seed in range(100):
        run(seed)


@pytest.mark.parametrize("seed", range(9))
def test_marked_groups_decide_what_asking_all_would(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = run(seed)
    assert isinstance(marked, Listening)
    walk, count = DirtyGroups.walk, marked.limits.generators

    def all_of(marks: DirtyGroups) -> Iterator[int]:
        list(walk(marks))
        yield from range(count)

    monkeypatch.setattr(DirtyGroups, "walk", all_of)
    full = run(seed)
    assert isinstance(full, Listening)
    assert marked.received == full.received
    assert marked.kernel.statistics() == full.kernel.statistics()


def test_checks_find_a_hold_whose_end_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_ended = Holds.take_ended

    def miss(holds: Holds, now_ns: int) -> list[int]:
        take_ended(holds, now_ns)
        return []

    monkeypatch.setattr(Holds, "take_ended", miss)
    with pytest.raises(AssertionError, match=r"is not marked|than is noted"):
        run_many()
