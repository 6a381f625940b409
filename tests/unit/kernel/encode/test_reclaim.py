"""The reclaim policy chooses the ready embeddings to evict; the front of the queue gets its pages in any case."""

from __future__ import annotations

import pytest

from tests.unit.kernel.setups import answering, image_request, make_limits, request_state
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.request import RequestState
from vsched.policy import ReclaimView
from vsched.policy_host.seats import PolicySeats
from vsched.testing import default_policies


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
    ("indices", "gone"),
    [
        ((0, 1, 2), [b"old"]),
        ((1, 0), [b"middle"]),
        ((2,), [b"young"]),
        ((), [b"young"]),
    ],
)
def test_front_preempts_the_first_named_and_no_more(
    indices: tuple[int, ...], gone: list[bytes]
) -> None:
    """If it names none, the youngest is evicted: the oldest request must get its next image."""
    assert taken(indices, 16) == (True, gone)


def test_front_takes_the_youngest_if_those_named_are_too_few() -> None:
    assert taken((0,), 32) == (True, [b"old", b"young"])


def test_others_wait_if_the_policy_spares_what_they_need() -> None:
    assert taken((0,), 32, front=False) == (False, [])
    assert taken((0,), 16, front=False) == (True, [b"old"])


def test_reclaim_policy_sees_who_may_give_way_the_oldest_first() -> None:
    VIEWS.clear()
    taken((), 20)
    (view,) = VIEWS
    assert (view.now_ns, view.pages, view.front, view.tokens) == (7, 5, True, 20)
    assert [(one.pages, one.tokens, one.requests) for one in view.ready] == [(4, 16, 1)] * 3


def test_reclaim_policy_is_not_called_if_nothing_can_help() -> None:
    VIEWS.clear()
    assert taken((0,), 64) == (False, [])
    assert not VIEWS
