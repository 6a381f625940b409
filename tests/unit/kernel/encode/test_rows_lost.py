"""Embeddings that are lost with their host are encoded again if a request needs them, and forgotten otherwise."""

from __future__ import annotations

from tests.unit.kernel.setups import (
    assert_holds_nothing,
    assert_served,
    encode_statistics,
    image_request,
    make_limits,
)
from vsched.testing import ModelCluster

A = (b"a", 8)


def test_rows_that_a_request_waits_to_read_are_encoded_again() -> None:
    """Its group is down when they are lost, and reads them once it is up."""
    cluster = ModelCluster(make_limits())
    cluster.submit(image_request("r", A))
    cluster.lose("generate")
    cluster.run_encode()
    cluster.lose_rows(range(500))
    assert cluster.encoded == [[b"a"], [b"a"]]
    cluster.restore_group("generate")
    cluster.drain()
    assert_served(cluster, "r")
    assert_holds_nothing(cluster)


def test_rows_that_nobody_needs_are_forgotten() -> None:
    """The next request finds none of them in the cache."""
    cluster = ModelCluster(make_limits(prefix_cache=False))
    cluster.submit(image_request("r1", A))
    cluster.drain()
    assert encode_statistics(cluster)["pages_evictable"] == 2
    cluster.lose_rows(range(500))
    assert encode_statistics(cluster)["pages_free"] == 500
    cluster.submit(image_request("r2", A))
    cluster.drain()
    assert cluster.encoded == [[b"a"], [b"a"]]
    assert_served(cluster, "r1", "r2")


def test_rows_that_a_step_reads_stay_until_it_is_over() -> None:
    """The step has them; a request that arrives meanwhile does not count on them."""
    cluster = ModelCluster(make_limits(prefix_cache=False))
    cluster.submit(image_request("r1", A))
    cluster.run_encode()
    assert cluster.generate_log
    cluster.lose_rows(range(500))
    cluster.submit(image_request("r2", A))
    assert cluster.encoded == [[b"a"]], "the pages are those of a step in flight"
    cluster.run_generate()
    assert cluster.encoded == [[b"a"], [b"a"]]
    cluster.drain()
    assert_served(cluster, "r1", "r2")
    assert_holds_nothing(cluster)


def test_rows_of_other_pages_stay() -> None:
    cluster = ModelCluster(make_limits(prefix_cache=False))
    cluster.submit(image_request("r1", A, (b"b", 8)))
    cluster.drain()
    kept, lost = map(cluster.kernel.embeddings.entries.__getitem__, [b"a", b"b"])
    cluster.lose_rows(lost.pages[:1])
    assert [*cluster.kernel.embeddings] == [kept]


def test_rows_are_wanted_where_requests_wait_for_them() -> None:
    """Of two replicas, each gets the images of its own requests."""
    cluster = ModelCluster(make_limits(generators=2, encode_items=1))
    cluster.submit(image_request("r1", (b"busy", 8)))
    cluster.submit(image_request("r2", A))
    cluster.submit(image_request("r3", A))
    (busy,) = cluster.encode_log[0].tasks
    cluster.run_encode()
    (shared,) = cluster.encode_log[0].tasks
    replicas = {
        cluster.kernel._table.find(name).replica  # type: ignore[union-attr]
        for name in ("r2", "r3")
    }
    assert len(busy.readers) == 1
    assert shared.readers == sorted(replicas)
