"""The embedding cache: retention, eviction, and protection by claims."""

from __future__ import annotations

import msgspec

from tests.unit.kernel.setups import (
    assert_served,
    encode_statistics,
    image_request,
    make_limits,
    words,
)
from vsched.testing import ModelCluster, make_request


def test_embedding_read_by_a_step_in_flight_stays() -> None:
    """All pages are read by a step in flight; the next image waits for it, whichever request needs the image."""
    cluster = ModelCluster(make_limits(pages=4))
    cluster.submit(image_request("r1", (b"a", 16)))
    cluster.run_encode()
    cluster.submit(image_request("r2", (b"b", 16)))
    assert cluster.generate_log
    assert cluster.encoded == [[b"a"]]
    cluster.abort("r1")
    assert cluster.encoded == [[b"a"]], "the step still reads the pages of the request that left"
    cluster.run_generate()
    assert cluster.encoded == [[b"a"], [b"b"]]
    assert_served(cluster, "r2")


def test_embedding_that_a_step_reads_is_not_taken_for_an_older_request() -> None:
    """The oldest request may take embeddings of waiting younger ones, but none that a step in flight reads."""
    cluster = ModelCluster(make_limits(pages=4, chunk_tokens=16, generate_depth=1))
    cluster.submit(make_request("old", words(40), [(32, 16, b"late")]))
    cluster.submit(image_request("young", (b"early", 16)))
    cluster.run_encode()
    cluster.run_generate()
    assert [chunk.start for chunk in cluster.generate_log[0].chunks] == [16, 0]
    assert cluster.encoded == [[b"early"]], "the older one wants its image now, and has to wait"
    cluster.run_generate()
    assert cluster.encoded == [[b"early"], [b"late"]]
    assert_served(cluster, "old", "young")


def test_embedding_of_an_older_waiting_request_stays() -> None:
    """Claims protect: embeddings of a request that waits for a slot are not evicted for a younger one."""
    cluster = ModelCluster(make_limits(pages=4, slots=1, generate_depth=1))
    cluster.submit(make_request("running", words(3), max_tokens=6))
    cluster.submit(image_request("old", (b"a", 16)))
    cluster.run_encode()
    cluster.submit(image_request("young", (b"b", 16)))
    while "running" not in cluster.ended:
        assert cluster.encoded == [[b"a"]]
        cluster.run_generate()
    cluster.drain()
    assert cluster.encoded == [[b"a"], [b"b"]]
    assert encode_statistics(cluster)["cache_preemptions"] == 0
    assert_served(cluster, "running", "old", "young")


def test_embedding_of_an_item_that_waits_for_room_counts_only_as_waiting() -> None:
    """Counters change when an item is encoded, not when it is examined."""
    cluster = ModelCluster(make_limits(pages=4, slots=1, generate_depth=1))
    cluster.submit(make_request("running", words(3), max_tokens=6))
    cluster.submit(image_request("holder", (b"a", 16)))
    cluster.run_encode()
    before = encode_statistics(cluster)
    cluster.submit(image_request("waiting", (b"b", 16)))
    cluster.run_generate()
    expected = {"waiting_items": 1, "cache_misses": 2, "cache_entries": 2}
    assert encode_statistics(cluster) == {**before, **expected}
    cluster.drain()
    assert encode_statistics(cluster)["items_encoded"] == 2
    assert_served(cluster, "running", "holder", "waiting")


def test_embedding_larger_than_the_cache_is_refused_before_anything_is_evicted() -> None:
    """Such an item is refused at submission, and the cache stays as it is."""
    cluster = ModelCluster(make_limits(pages=8))
    cluster.submit(image_request("cached", (b"a", 16)))
    cluster.drain()
    cluster.submit(image_request("huge", (b"b", 33)))
    assert cluster.refused["huge"].code == "image_exceeds_cache"
    cluster.submit(image_request("again", (b"a", 16)))
    cluster.drain()
    assert cluster.encoded == [[b"a"]]
    assert encode_statistics(cluster)["cache_evictions"] == 0


def test_embedding_claims_end_with_the_forward() -> None:
    """Once the chunk that read an image is done, its pages may be evicted, while the request still decodes."""
    cluster = ModelCluster(make_limits(pages=8))
    cluster.submit(image_request("r", (b"a", 16), max_tokens=20))
    cluster.run_encode()
    assert encode_statistics(cluster)["pages_evictable"] == 0
    cluster.run_generate()
    assert cluster.kernel.statistics()["running"] == 1
    assert encode_statistics(cluster)["pages_evictable"] == 4
    cluster.submit(image_request("r2", (b"b", 32)))
    assert cluster.encoded == [[b"a"], [b"b"]], "the pages are given to another request meanwhile"
    assert_served(cluster, "r", "r2")


def test_embedding_of_an_image_that_chunks_split_stays_until_the_last() -> None:
    """Pages are held from the first chunk that overlaps the image to the last."""
    cluster = ModelCluster(make_limits(pages=8, chunk_tokens=8, generate_depth=1))
    cluster.submit(image_request("r", (b"a", 20)))
    cluster.run_encode()
    evictable = []
    spans = []
    while cluster.generate_log:
        spans += [
            (chunk.start, chunk.stop, [(item.offset, item.tokens) for item in chunk.items])
            for chunk in cluster.generate_log[0].chunks
        ]
        cluster.run_generate()
        evictable.append(encode_statistics(cluster)["pages_evictable"])
    assert spans == [(0, 8, [(0, 20)]), (8, 16, [(0, 20)]), (16, 21, [(0, 20)])]
    assert evictable[:3] == [0, 0, 5]
    assert_served(cluster, "r")


def test_embedding_chunks_name_only_the_items_that_they_meet() -> None:
    """A decision carries the pages of the items in its chunk and no others."""
    cluster = ModelCluster(make_limits(chunk_tokens=16, generate_depth=1))
    items = [(0, 10, b"a"), (2, 12, b"b"), (50, 4, b"c")]
    cluster.submit(make_request("r", words(60), items))
    cluster.drain()
    chunks = [chunk for step in cluster.decisions for chunk in step.chunks]
    placed = cluster.requests["r"].items
    for chunk in chunks:
        met = [item for item in placed if item.offset < chunk.stop and item.end > chunk.start]
        assert [item.offset for item in chunk.items] == [item.offset for item in met]
        for item in chunk.items:
            assert len(item.pages) == cluster.limits.pages_for(item.tokens)
    assert any(not chunk.items for chunk in chunks)
    assert any(len(chunk.items) == 2 for chunk in chunks)
    assert_served(cluster, "r")


def test_embedding_text_requests_run_while_the_encoder_is_down() -> None:
    """Text needs no encoder; images wait for it and are served when it is back."""
    cluster = ModelCluster(make_limits())
    cluster.lose("encode")
    cluster.submit(image_request("image", (b"a", 16)))
    cluster.submit(make_request("text", words(5)))
    assert_served(cluster, "text")
    assert "image" not in cluster.ended
    cluster.restore_group("encode")
    assert_served(cluster, "image")


def test_embedding_item_without_pixels_needs_none_when_it_is_cached() -> None:
    """A hit is served from the arena alone."""
    cluster = ModelCluster(make_limits(prefix_cache=False))
    cluster.submit(image_request("r1", (b"a", 16)))
    cluster.drain()
    request = image_request("r2", (b"a", 16))
    bare = msgspec.structs.replace(request.items[0], extent=None)
    cluster.submit(msgspec.structs.replace(request, items=(bare,)))
    assert_served(cluster, "r1", "r2")
