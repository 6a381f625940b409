"""The embedding cache: retention, eviction, protection by claims, and the reclaim policy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import (
    answering,
    assert_served,
    encode_statistics,
    image_request,
    make_cluster,
    make_limits,
    request_state,
    words,
)
from vsched.failures import EncodeErrorKind
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.request import RequestState
from vsched.policy import Admission, ReclaimView
from vsched.policy_host.seats import PolicySeats
from vsched.testing import default_policies, make_request


def test_embedding_that_a_step_reads_is_not_taken_for_an_older_request() -> None:
    """The oldest request may take embeddings of waiting younger ones, but none that a step in flight reads."""
    cluster = make_cluster(pages=4, chunk_tokens=16, generate_depth=1)
    cluster.submit(make_request("old", words(40), [(32, 16, b"late")]))
    cluster.submit(image_request("young", (b"early", 16)))
    cluster.run_encode()
    cluster.run_generate()
    assert [chunk.start for chunk in cluster.generators["generate"].log[0].chunks] == [16, 0]
    assert cluster.encoded == [[b"early"]], "the older one wants its image now, and has to wait"
    cluster.run_generate()
    assert cluster.encoded == [[b"early"], [b"late"]]
    assert_served(cluster, "old", "young")


def test_embedding_of_an_older_waiting_request_stays() -> None:
    """Claims protect: embeddings of a request that waits for a slot are not evicted for a younger one.

    Meanwhile the image of that one counts only as waiting, however often it is examined.
    """
    cluster = make_cluster(pages=4, slots=1, generate_depth=1)
    cluster.submit(make_request("running", words(3), max_tokens=6))
    cluster.submit(image_request("old", (b"a", 16)))
    cluster.run_encode()
    before = encode_statistics(cluster)
    cluster.submit(image_request("young", (b"b", 16)))
    waiting = {"waiting_items": 1, "cache_misses": 2, "cache_entries": 2}
    while "running" not in cluster.ended:
        assert encode_statistics(cluster) == {**before, **waiting}
        cluster.run_generate()
    cluster.drain()
    assert cluster.encoded == [[b"a"], [b"b"]]
    assert encode_statistics(cluster)["items_encoded"] == 2
    assert encode_statistics(cluster)["cache_preemptions"] == 0
    assert_served(cluster, "running", "old", "young")


def test_embedding_claims_end_with_the_forward() -> None:
    """Once the chunk that read an image is done, its pages may be evicted, while the request still decodes."""
    cluster = make_cluster(image_request("r", (b"a", 16), max_tokens=20), pages=8)
    cluster.run_encode()
    assert encode_statistics(cluster)["pages_evictable"] == 0
    cluster.run_generate()
    assert cluster.kernel.statistics()["running"] == 1
    assert encode_statistics(cluster)["pages_evictable"] == 4
    cluster.submit(image_request("r2", (b"b", 32)))
    assert cluster.encoded == [[b"a"], [b"b"]], "the pages are given to another request meanwhile"
    assert_served(cluster, "r", "r2")


def test_embedding_of_an_image_that_chunks_split_stays_until_the_last() -> None:
    cluster = make_cluster(pages=8, chunk_tokens=8, generate_depth=1)
    cluster.submit(image_request("r", (b"a", 20)))
    cluster.run_encode()
    evictable = []
    spans = []
    while cluster.generators["generate"].log:
        spans += [
            (chunk.start, chunk.stop, [(item.offset, item.tokens) for item in chunk.items])
            for chunk in cluster.generators["generate"].log[0].chunks
        ]
        cluster.run_generate()
        evictable.append(encode_statistics(cluster)["pages_evictable"])
    assert spans == [(0, 8, [(0, 20)]), (8, 16, [(0, 20)]), (16, 21, [(0, 20)])]
    assert evictable[:3] == [0, 0, 5]
    assert_served(cluster, "r")


def test_embedding_text_requests_run_while_the_encoder_is_down() -> None:
    cluster = make_cluster()
    cluster.lose("encode")
    cluster.submit(image_request("image", (b"a", 16)))
    cluster.submit(make_request("text", words(5)))
    assert_served(cluster, "text")
    assert "image" not in cluster.ended
    cluster.restore_group("encode")
    assert_served(cluster, "image")


def test_embedding_item_without_pixels_needs_none_when_it_is_cached() -> None:
    """A hit is served from the arena alone."""
    cluster = make_cluster(image_request("r1", (b"a", 16)), prefix_cache=False)
    cluster.drain()
    request = image_request("r2", (b"a", 16))
    bare = msgspec.structs.replace(request.items[0], extent=None)
    cluster.submit(msgspec.structs.replace(request, items=(bare,)))
    assert_served(cluster, "r1", "r2")


def test_policy_that_holds_keeps_images_of_a_failed_batch_back_as_well() -> None:
    def hold(view: Any) -> Admission:
        """Admit all at first, and then hold for a while."""
        if view.now_ns < 1_000_000_000 and view.waiting[0].tokens is None:
            return Admission(hold_until_ns=1_000_000_000)
        return Admission(range(len(view.waiting)))

    cluster = make_cluster(encode_admission=answering("admission", hold))
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8)))
    cluster.run_encode(fail=EncodeErrorKind.FAILED)
    assert len(cluster.encoded) == 1
    assert_served(cluster, "r")


def arrived(number: int, *images: tuple[bytes, int]) -> RequestState:
    return request_state(image_request(f"r{number}", *images), number)


VIEWS: list[ReclaimView] = []
NAMES = (b"old", b"middle", b"young")


def taken(indices: tuple[int, ...], tokens: int, *, front: bool = True) -> tuple[bool, list[bytes]]:
    """Let the oldest request need pages for an image, in a full cache of ready images of four pages each.

    The policy names these indices. Return whether the image got its pages, and the keys of evicted images.
    """
    policies = default_policies(reclaim=answering("reclaim", indices, VIEWS))
    cache = EmbeddingCache(make_limits(pages=12), PolicySeats(policies))
    for number, key in enumerate(NAMES, start=2):
        cache.claim(arrived(number, (key, 16)), 0, 0)
    for entry in list(cache):
        assert cache.start_encoding(entry, 0)
        assert cache.finish_encoding(entry)
    if not front:
        cache.claim(arrived(0, (b"front", 4)), 0, 0)
    cache.claim(arrived(1, (b"wanted", tokens)), 0, 0)
    wanted = cache.entries[b"wanted"]
    started = cache.start_encoding(wanted, 7)
    return started, [name for name in NAMES if not cache.is_ready(name)]


@pytest.mark.parametrize(
    ("indices", "tokens", "front", "expected"),
    [
        ((0, 1, 2), 16, True, (True, [b"old"])),
        ((1, 0), 16, True, (True, [b"middle"])),
        ((2,), 16, True, (True, [b"young"])),
        ((), 16, True, (True, [b"young"])),
        ((0,), 32, True, (True, [b"old", b"young"])),
        ((0,), 32, False, (False, [])),
        ((0,), 16, False, (True, [b"old"])),
    ],
)
def test_front_preempts_those_named_or_else_the_youngest_and_others_wait(
    indices: tuple[int, ...], tokens: int, front: bool, expected: tuple[bool, list[bytes]]
) -> None:
    """No more than needed; the oldest request must get its next image, others may be refused it."""
    assert taken(indices, tokens, front=front) == expected


def test_reclaim_policy_sees_the_eligible_requests_oldest_first() -> None:
    VIEWS.clear()
    taken((), 20)
    (view,) = VIEWS
    assert (view.now_ns, view.pages, view.front, view.tokens) == (7, 5, True, 20)
    assert [(one.pages, one.tokens, one.requests) for one in view.ready] == [(4, 16, 1)] * 3


def test_reclaim_policy_is_not_called_if_nothing_can_help() -> None:
    VIEWS.clear()
    assert taken((0,), 64) == (False, [])
    assert not VIEWS
