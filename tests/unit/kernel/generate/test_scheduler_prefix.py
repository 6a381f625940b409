"""The prefix cache: block hashes, reuse across turns, insertion, and snapshots of recurrent states."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import (
    answering,
    assert_served,
    complete,
    crash,
    encode_statistics,
    generate_statistics,
    image_request,
    make_cluster,
    words,
)
from vsched.kernel.decisions import Join
from vsched.policy import InsertionView, Policy
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import PLACEHOLDER
from vsched.types import Request
from vsched_policies.eviction import KeepNothing


def next_turn(
    cluster: ModelCluster, request: Request, name: str, image: tuple[bytes, int]
) -> Request:
    """The conversation so far, a new image and a new question."""
    history = [*request.prompt_token_ids, *cluster.outputs[request.request_id]]
    added = image_request(name, image, max_tokens=4)
    offset = len(history)
    moved = msgspec.structs.replace(added.items[0], offset=offset)
    return msgspec.structs.replace(
        added, prompt_token_ids=[*history, *added.prompt_token_ids], items=(*request.items, moved)
    )


@pytest.mark.parametrize(
    ("block_size", "policies"),
    [(1, {}), (4, {}), (16, {}), (4, {"encode_eviction": KeepNothing()})],
)
def test_prefix_second_turn_computes_only_new_tokens(
    block_size: int, policies: dict[str, Policy]
) -> None:
    """The next turn prefills the new tokens (and the rest of a block) and encodes only the new image.

    Images whose KV is cached are not encoded again, even if their embeddings are gone.
    """
    cluster = make_cluster(block_size=block_size, **policies)
    request = image_request("turn1", (b"image1", 30), max_tokens=4)
    complete(cluster, request)
    for turn in range(2, 6):
        before = generate_statistics(cluster)["tokens_prefilled"]
        # The last output was sampled and never computed.
        known = len(request.prompt_token_ids) + len(cluster.outputs[request.request_id]) - 1
        request = next_turn(cluster, request, f"turn{turn}", (b"image%d" % turn, 20 + turn))
        complete(cluster, request)
        cached = known - known % block_size
        prefilled = generate_statistics(cluster)["tokens_prefilled"] - before
        assert prefilled == len(request.prompt_token_ids) - cached
        assert cluster.ended[f"turn{turn}"].times.cached_tokens == cached
        assert cluster.ended[f"turn{turn}"].times.encoded_items == 1
        assert cluster.encoded[turn - 1 :] == [[b"image%d" % turn]]
        assert_served(cluster, f"turn{turn}")
    assert encode_statistics(cluster)["items_encoded"] == 5


@pytest.mark.parametrize(
    ("of_image", "of_request", "cached"),
    [
        ({}, {}, 12),
        ({"key": b"b"}, {}, 0),
        ({"metadata": b"the same frames, a second later"}, {}, 0),
        ({"attention": ((4, 9),)}, {}, 0),
        ({}, {"cache_salt": "tenant"}, 0),
        ({}, {"adapter": 0}, 0),
        ({}, {"adapter": 8}, 0),
    ],
)
def test_prefix_is_shared_only_with_equal_content_salt_and_adapter(
    of_image: dict[str, Any], of_request: dict[str, Any], cached: int
) -> None:
    cluster = make_cluster()
    first = msgspec.structs.replace(image_request("r1", (b"a", 14)), adapter=7)
    complete(cluster, first)
    images = tuple(msgspec.structs.replace(one, **of_image) for one in first.items)
    changes = {"request_id": "r2", "items": images, **of_request}
    complete(cluster, msgspec.structs.replace(first, **changes))
    assert cluster.ended["r2"].times.cached_tokens == cached
    assert_served(cluster, "r2")


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ([], [(0, 16, b"a")], 0),
        ([(8, 4, b"a")], [(8, 4, b"b")], 8),
        ([(4, 8, b"a")], [(6, 8, b"a")], 4),
        ([(0, 4, b"a"), (0, 4, b"b")], [(0, 4, b"b"), (0, 4, b"a")], 0),
        ([(0, 2, b"a"), (0, 2, b"b")], [(0, 2, b"c"), (0, 2, b"b")], 0),
    ],
)
def test_prefix_is_shared_up_to_the_first_image_that_differs(
    first: list[tuple[int, int, bytes]], second: list[tuple[int, int, bytes]], cached: int
) -> None:
    """Though every placeholder is the same token, and a text may be made of them."""
    cluster = make_cluster()
    for name, images in (("r1", first), ("r2", second)):
        text = [PLACEHOLDER] * (17 - sum(tokens for _, tokens, _ in images))
        complete(cluster, make_request(name, text, images))
    assert cluster.ended["r2"].times.cached_tokens == cached
    assert_served(cluster, "r2")


def test_prefix_of_a_running_request_is_shared() -> None:
    """A block can be found as soon as the step that fills it is decided: ranks execute in order."""
    cluster = make_cluster(make_request("r1", words(40), max_tokens=30), generate_depth=1)
    cluster.submit(make_request("r2", words(40), max_tokens=30))
    cluster.run_generate()
    assert generate_statistics(cluster)["tokens_cached"] == 36
    held = generate_statistics(cluster)["blocks_held"]
    assert held <= 10 + 1 + 2, "nine blocks are held once for both"
    assert_served(cluster, "r1", "r2")


def test_prefix_blocks_are_evicted_from_their_end() -> None:
    """The end of a prefix is evicted before its beginning, so the rest can still be found."""
    cluster = make_cluster(make_request("long", words(39), max_tokens=1), blocks=12)
    cluster.drain()
    complete(cluster, make_request("other", words(16, start=500), max_tokens=1))
    complete(cluster, make_request("again", words(39), max_tokens=1))
    assert generate_statistics(cluster)["prefix_evictions"] >= 2
    assert 24 <= cluster.ended["again"].times.cached_tokens < 36
    assert_served(cluster, "long", "other", "again")


VIEWS: list[InsertionView] = []


def cluster_with(kept: int, **limits: Any) -> ModelCluster:
    """A cluster whose insertion policy keeps this number of blocks, and records its views."""
    VIEWS.clear()
    return make_cluster(insertion=answering("insertion", kept, VIEWS), **limits)


def test_insertion_policy_says_how_many_blocks_stay() -> None:
    """Blocks hold four tokens; of 12 + 5 tokens, four blocks are full."""
    cluster = cluster_with(2)
    assert serve(cluster, "a", words(12), max_tokens=6) == 0
    (view,) = VIEWS
    assert (len(view.hashes), view.prompt_blocks, view.found, view.block_tokens) == (4, 3, 0, 4)
    assert (view.prompt_tokens, view.output_tokens) == (12, 6)
    assert generate_statistics(cluster)["blocks_cached"] == 2
    assert serve(cluster, "b", words(12), max_tokens=6) == 8
    assert VIEWS[-1].found == 2
    assert generate_statistics(cluster)["blocks_cached"] == 2


def test_insertion_policy_is_not_called_without_blocks() -> None:
    """A request of less than a block, and one without a prefix cache."""
    cluster = cluster_with(0)
    complete(cluster, make_request("short", [1], max_tokens=2))
    assert not VIEWS
    cluster = cluster_with(0, prefix_cache=False)
    serve(cluster, "a", words(12), max_tokens=6)
    assert not VIEWS


def test_blocks_that_others_use_stay_until_they_end() -> None:
    """Blocks that are not kept can still be shared while the first request is there."""
    cluster = cluster_with(0)
    cluster.submit(make_request("long", words(12), max_tokens=40))
    cluster.run_generate()
    cluster.submit(make_request("short", words(13), max_tokens=1))
    assert_served(cluster, "long", "short")
    assert cluster.ended["short"].times.cached_tokens == 12
    assert generate_statistics(cluster)["blocks_cached"] == 0


def test_preempted_request_finds_its_computed_blocks() -> None:
    """That is recomputation, not caching: the policy is called at the end."""
    cluster = cluster_with(0, blocks=12, slots=2)
    for name, start in (("a", 10), ("b", 60)):
        cluster.submit(make_request(name, words(12, start=start), max_tokens=24))
    assert_served(cluster, "a", "b")
    assert generate_statistics(cluster)["preemptions"] > 0
    assert generate_statistics(cluster)["tokens_cached"] > 0
    assert len(VIEWS) == 2
    assert generate_statistics(cluster)["blocks_cached"] == 0


def joins(cluster: ModelCluster) -> list[Join]:
    return [join for decision in cluster.decisions for join in decision.joined]


def writes(cluster: ModelCluster) -> list[tuple[int, int]]:
    return [
        (write.end, write.snapshot_slot)
        for decision in cluster.decisions
        for chunk in decision.chunks
        for write in chunk.writes
    ]


def serve(cluster: ModelCluster, name: str, text: list[int], **more: Any) -> int:
    """Serve a request to its end; return the number of its cached tokens."""
    cluster.submit(make_request(name, text, **more))
    assert_served(cluster, name)
    return cluster.ended[name].times.cached_tokens


def test_next_turn_goes_on_from_the_last_end_of_a_block() -> None:
    """Of the last prompt: the blocks of the response are cached too, but without a state."""
    cluster = make_cluster(state_snapshots=3)
    text = words(13)
    assert serve(cluster, "turn1", text) == 0
    assert writes(cluster) == [(12, 0)]
    longer = [*text, *cluster.outputs["turn1"], *words(9, start=50)]
    assert serve(cluster, "turn2", longer) == 12
    assert [join.restored for join in joins(cluster)] == [None, 0]
    assert serve(cluster, "turn2 again", longer) == (len(longer) - 1) // 4 * 4


def test_shared_beginning_is_kept_once_it_was_seen_twice() -> None:
    """The second request computes it again and leaves a snapshot at its end; the third resumes there."""
    cluster = make_cluster(state_snapshots=8)
    shared = words(20)
    assert serve(cluster, "one", [*shared, *words(7, start=100)]) == 0
    assert serve(cluster, "two", [*shared, *words(7, start=200)]) == 0
    assert [end for end, _ in writes(cluster)] == [24, 20, 24]
    assert serve(cluster, "three", [*shared, *words(7, start=300)]) == 20


def test_snapshots_give_way_in_the_order_of_the_policy() -> None:
    cluster = make_cluster(state_snapshots=2)
    texts = [words(9, start=100 * number) for number in range(3)]
    for number, text in enumerate(texts[:2]):
        serve(cluster, f"first {number}", text)
    assert serve(cluster, "again", texts[0]) == 8
    serve(cluster, "third", texts[2])
    assert serve(cluster, "the one used last is there", texts[0]) == 8
    assert serve(cluster, "the other went", texts[1]) == 0


@pytest.mark.parametrize("places", [0, 1])
def test_without_a_place_all_is_computed(places: int) -> None:
    """No snapshots at all, or a policy that keeps nothing."""
    policies = {"generate_eviction": KeepNothing()} if places else {}
    cluster = make_cluster(state_snapshots=places, **policies)
    assert [serve(cluster, f"turn {number}", words(13)) for number in range(3)] == [0, 0, 0]


def test_preempted_request_goes_on_from_its_own_snapshot() -> None:
    cluster = make_cluster(state_snapshots=4, blocks=10, slots=2)
    for number in range(2):
        cluster.submit(make_request(f"r{number}", words(9, start=100 * number), max_tokens=20))
    cluster.drain()
    assert generate_statistics(cluster)["preemptions"] > 0
    assert [join.computed for join in joins(cluster)][:3] == [0, 0, 8]
    for number in range(2):
        assert_served(cluster, f"r{number}")


def test_lost_group_has_no_snapshots() -> None:
    cluster = make_cluster(state_snapshots=4)
    serve(cluster, "before", words(13))
    crash(cluster)
    assert serve(cluster, "after", words(13)) == 0
