"""A request that crashes its group is found, and no other request is ended for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.unit.kernel.setups import (
    assert_holds_nothing,
    assert_served,
    joined,
    make_limits,
    words,
)
from vsched.kernel.events import Drain
from vsched.testing import ModelCluster, make_request


def text(name: str, *, start: int = 10, max_tokens: int = 9) -> Any:
    return make_request(name, words(6, start=start), max_tokens=max_tokens)


def lose_while_running(cluster: ModelCluster, poison: str, group: str = "generate") -> int:
    """Run a cluster in which a group is lost whenever it runs a given request; return the number of losses."""
    losses = 0
    for _ in range(500):
        if poison in cluster.ended:
            return losses
        number = next(number for number, name in cluster.names.items() if name == poison)
        sequences = cluster.generators[group].sequences
        if number in sequences and sequences[number].state.length:
            losses += 1
            cluster.lose(group)
            cluster.restore_group(group)
        elif cluster.busy("generate"):
            cluster.run_generate()
    raise AssertionError("the poison was never found")


def test_poison_alone_is_ended_at_its_second_loss() -> None:
    """Not retried for ever."""
    cluster = ModelCluster(make_limits(slots=1))
    cluster.submit(text("poison"))
    assert lose_while_running(cluster, "poison") == 2
    assert cluster.ended["poison"].code == "group_lost"
    assert_holds_nothing(cluster)


def test_poison_among_others_is_found_and_no_other_request_ends() -> None:
    """Suspects come back one at a time; the one in quarantine when the group is lost is to blame."""
    cluster = ModelCluster(make_limits(slots=8))
    names = [f"r{number}" for number in range(7)]
    for number, name in enumerate(names):
        cluster.submit(text(name, start=30 * number, max_tokens=12))
    losses = lose_while_running(cluster, "r4")
    assert losses == 3
    assert Counter(finish.code for finish in cluster.ended.values() if finish.code) == {
        "group_lost": 1
    }
    assert_served(cluster, *(name for name in names if name != "r4"))


def test_suspects_of_two_losses_from_outside_are_cleared() -> None:
    """A group that is killed from outside, however often, ends no request as long as others run there."""
    cluster = ModelCluster(make_limits(slots=4))
    names = [f"r{number}" for number in range(4)]
    for number, name in enumerate(names):
        cluster.submit(text(name, start=30 * number, max_tokens=40))
    for _ in range(4):
        while len(cluster.kernel.generators[0].running) < 4:
            cluster.run_generate()
        for _ in range(3):
            cluster.run_generate()
        cluster.lose("generate")
        cluster.restore_group("generate")
    assert_served(cluster, *names)


def test_cleared_suspect_is_not_ended_for_one_more_loss() -> None:
    """A request that got past the point of the loss starts over, even if it runs alone by then."""
    cluster = ModelCluster(make_limits(slots=2))
    cluster.submit(text("long", max_tokens=60))
    cluster.submit(text("short", start=40, max_tokens=15))
    for _ in range(2):
        for _ in range(5):
            cluster.run_generate()
        cluster.lose("generate")
        cluster.restore_group("generate")
    while "short" not in cluster.ended:
        cluster.run_generate()
    cluster.lose("generate")
    cluster.restore_group("generate")
    assert_served(cluster, "long", "short")


def lose_repeatedly(cluster: ModelCluster, group: str, *, times: int) -> set[int]:
    """Lose a group several times after a few steps each; return the numbers of the requests that ran there."""
    running: set[int] = set()
    for _ in range(times):
        for _ in range(3):
            cluster.run_generate(group)
        running |= cluster.generators[group].sequences.keys()
        cluster.lose(group)
        cluster.restore_group(group)
    return running


@pytest.mark.parametrize("losses", [1, 2])
def test_drain_finishes_what_ran_in_its_group_when_it_was_lost(losses: int) -> None:
    """No other group accepts such a request, so draining must not leave it behind."""
    cluster = ModelCluster(make_limits(generators=2))
    names = [f"r{number}" for number in range(4)]
    for number, name in enumerate(names):
        cluster.submit(text(name, start=30 * number, max_tokens=20))
    own = lose_repeatedly(cluster, "generate-0", times=losses)
    assert len(own) == 2
    cluster.send(Drain("generate-0"))
    while not cluster.drained:
        cluster.run_generate()
        assert not own & cluster.generators["generate-1"].sequences.keys(), (
            "it went to another group"
        )
    assert {cluster.names[number] for number in own} <= cluster.ended.keys()
    assert_served(cluster, *names)
    assert cluster.drained == ["generate-0"]
    assert_holds_nothing(cluster)


def test_requests_that_are_no_suspects_join_next_to_one() -> None:
    """Only suspects wait for each other."""
    cluster = ModelCluster(make_limits(slots=4))
    for number in range(2):
        cluster.submit(text(f"r{number}", start=30 * number, max_tokens=40))
    lose_repeatedly(cluster, "generate", times=2)
    cluster.submit(text("new", start=200))
    before = len(joined(cluster))
    assert_served(cluster, "r0", "r1", "new")
    assert joined(cluster)[before:] == ["new", "r1"]
