"""Embeddings shared by item or by request, and entries that are replaced."""

from __future__ import annotations

from vsched.aio.arrivals import refusal_error
from vsched.kernel import SchedulerLimits
from vsched.testing import ModelCluster as Cluster
from vsched.testing import default_policies, make_request
from vsched_policies.encoding import Combined

LIMITS = SchedulerLimits(
    block_size=4,
    blocks=64,
    slots=4,
    batch_tokens=64,
    chunk_tokens=32,
    context_tokens=200,
    page_rows=4,
    pages=8,
    prefix_cache=False,
)


def test_scope_request_refuses_a_set_that_never_fits_together() -> None:
    """A set that is shared as a whole must fit as a whole."""
    images = [(index, 12, b"image%d" % index) for index in (1, 2, 3)]
    request = make_request("large", list(range(10, 20)), images)
    whole = Cluster(LIMITS, default_policies(encoding=Combined()))
    whole.submit(request)
    assert whole.refused["large"].code == "images_exceed_cache"
    assert "limit 32 tokens" in refusal_error(whole.refused["large"]).message
    single = Cluster(LIMITS)
    single.submit(request)
    single.drain()
    assert "large" in single.ended


def test_entry_of_another_length_replaces_value_and_accounting() -> None:
    """The entry under an existing key is replaced, its pages counted once."""
    cluster = Cluster(LIMITS)
    cluster.submit(make_request("one", [10, 11, 12], [(1, 16, b"same")]))
    cluster.drain()
    before = cluster.kernel.encode.statistics()
    cluster.submit(make_request("two", [10, 11, 12], [(1, 8, b"same")]))
    cluster.drain()
    after = cluster.kernel.encode.statistics()
    assert (before["cache_entries"], after["cache_entries"]) == (1, 1)
    assert (before["pages_evictable"], after["pages_evictable"]) == (4, 2)
    assert after["pages_free"] + after["pages_evictable"] == LIMITS.pages
