"""Decisions of the built-in routing policies, case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from vsched.policy import ReplicaView, RoutingPolicy, RoutingView
from vsched_policies.routing import ImageAffinity, LeastLoaded, RoundRobin

LIMIT = 1000
"""Tokens that a replica can run at once; a quarter of them is the default bound of image-affinity."""


def replicas(
    *loads: int, down: Sequence[int] = (), prefix: Sequence[int] = (), seen: Sequence[int] = ()
) -> list[ReplicaView]:
    """Return replicas with these loads; `prefix` and `seen` of the first ones, 0 of the rest."""
    known = [[*each, *[0] * (len(loads) - len(each))] for each in (prefix, seen)]
    return [
        ReplicaView(
            index=index,
            load_tokens=load,
            healthy=index not in down,
            prefix_tokens=known[0][index],
            items_seen=known[1][index],
        )
        for index, load in enumerate(loads)
    ]


def routing_view(
    of: list[ReplicaView], *, items: Sequence[bytes] = (), routed: int = 0, prompt_tokens: int = 100
) -> RoutingView:
    return RoutingView(
        replicas=of,
        prompt_tokens=prompt_tokens,
        item_keys=items,
        routed=routed,
        load_limit_tokens=LIMIT,
    )


def image(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize(
    ("policy", "of", "turns"),
    [
        (RoundRobin(), replicas(9, 0, 5), [0, 1, 2, 0]),
        (RoundRobin(), replicas(9, 0, 5, down=[1]), [0, 2, 0, 2]),
        (RoundRobin(), replicas(9, 0, 5, down=[0, 1, 2]), [0, 1, 2, 0]),
        (LeastLoaded(), replicas(0, 7, 0, 0, down=[3]), [0, 2, 0, 2]),
        (ImageAffinity(), replicas(30, 20, 20), [1, 2, 1, 2]),
    ],
)
def test_replicas_take_turns_all_or_those_of_equal_load(
    policy: RoutingPolicy, of: list[ReplicaView], turns: list[int]
) -> None:
    """Otherwise an idle server would use its first replica only."""
    assert [policy.choose(routing_view(of, routed=routed)) for routed in range(4)] == turns


@pytest.mark.parametrize(
    ("loads", "down", "chosen"),
    [
        ((70, 30, 50), (), 1),
        ((70, 30, 50), (1,), 2),
        ((70, 30, 50), (1, 2), 0),
        ((70, 30, 50), (0, 1, 2), 1),
        ((31,), (), 0),
        ((0, 1), (), 0),
    ],
)
def test_least_loaded_by_tokens(loads: tuple[int, ...], down: Sequence[int], chosen: int) -> None:
    """Of the healthy; with none healthy, of all: its queue holds the request."""
    for routed in range(3):
        view = routing_view(replicas(*loads, down=down), routed=routed)
        assert LeastLoaded().choose(view) == chosen


@pytest.mark.parametrize(
    ("of", "items", "chosen"),
    [
        # Of a text: the longest cached prefix, however long.
        (replicas(0, 9, 9, prefix=[0, 16, 48]), 0, 2),
        (replicas(9, 5, 7, prefix=[48, 48, 48]), 0, 1),
        # The replica that has seen more of the images, although others have the prefix that all prompts share.
        (replicas(0, 9, prefix=[16, 0], seen=[0, 1]), 1, 1),
        (replicas(0, 9, 9, seen=[0, 1, 2]), 3, 2),
        # A prefix is a fact: it wins over an image that went elsewhere with another prompt.
        (replicas(9, 0, prefix=[90], seen=[0, 1]), 1, 0),
        # A replica that is down knows nothing.
        (replicas(0, 9, 5, prefix=[0, 48, 16], down=[1]), 0, 2),
        (replicas(5, 9, seen=[0, 1], down=[0, 1]), 1, 1),
    ],
)
def test_image_affinity_follows_the_known(of: list[ReplicaView], items: int, chosen: int) -> None:
    keys = [image(number) for number in range(items)]
    assert ImageAffinity().choose(routing_view(of, items=keys)) == chosen


@pytest.mark.parametrize(
    ("imbalance", "load", "chosen"),
    [(0.25, 350, 1), (0.25, 351, 0), (1.0, 1100, 1), (0.001, 102, 0)],
)
def test_image_affinity_is_bounded_by_load(imbalance: float, load: int, chosen: int) -> None:
    """The bound is a share of the replica's capacity, above the least loaded replica."""
    of = replicas(100, load, prefix=[0, 99], seen=[0, 1])
    policy = ImageAffinity(imbalance=imbalance)
    assert policy.choose(routing_view(of, items=[image(1)])) == chosen
    assert policy.choose(routing_view(of)) == chosen


def first_choice(number: int, count: int, *, down: Sequence[int] = (), loads: int = 0) -> int:
    of = replicas(*[loads] * count, down=down)
    return ImageAffinity().choose(routing_view(of, items=[image(number), image(7)], routed=number))


def test_image_affinity_spreads_unseen_images_which_stay_when_a_replica_comes_or_goes() -> None:
    """Only the images of the replica that went move, and a new one gets images of all others."""
    counts = Counter(first_choice(number, 4) for number in range(1000))
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 200
    for number in range(200):
        before = first_choice(number, 3)
        assert first_choice(number, 4) in {before, 3}
        after = first_choice(number, 3, down=[1])
        assert after == before if before != 1 else after in {0, 2}
