"""Requests that can never fit, or cannot wait, are refused at once with the reason, without affecting others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import assert_served, image_request, make_cluster, submit_texts, words
from vsched.aio.arrivals import refusal_error
from vsched.testing import ModelCluster, make_request
from vsched.types import Extent, MediaItem, Request, Spans


def with_items(*places: tuple[int, int]) -> Request:
    """Return a request of ten tokens with items at these (offset, tokens)."""
    items = tuple(
        MediaItem(key=b"k%d" % index, tokens=tokens, offset=offset, extent=Extent(0, 16))
        for index, (offset, tokens) in enumerate(places)
    )
    return msgspec.structs.replace(make_request("bad", words(10)), items=items)


def with_runs(
    *spans: tuple[int, int], offset: int = 1, tokens: int = 4, kept: Spans = ()
) -> Request:
    """Return a request of ten tokens with one item whose placeholders are these runs."""
    item = MediaItem(key=b"k", tokens=tokens, offset=offset, spans=spans, kept=kept)
    return msgspec.structs.replace(make_request("bad", words(10)), items=(item,))


LIMITS: dict[str, Any] = {"context_tokens": 100, "blocks": 20, "pages": 8}


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (make_request("bad", words(97), max_tokens=4), "context_exceeded", ["101", "100 tokens"]),
        (make_request("bad", words(60), max_tokens=21), "kv_exceeded", ["81", "generate.memory"]),
        (image_request("bad", (b"a", 33)), "image_exceeds_cache", ["33", "arena.embedding_bytes"]),
        (make_request("bad", []), "empty", ["at least 1"]),
        (make_request("bad", words(3), max_tokens=0), "empty", ["max_tokens"]),
        (with_items((8, 4)), "bad_items", ["outside the prompt"]),
        (with_items((0, 4), (3, 4)), "bad_items", ["overlap"]),
        (with_items((0, 0)), "bad_items", []),
        (with_items((-1, 2)), "bad_items", []),
        (with_runs((1, 3), (2, 4)), "bad_items", ["overlap"]),
        (with_runs((1, 3), (9, 11)), "bad_items", ["outside"]),
        (with_runs((1, 3), (4, 4)), "bad_items", []),
        (with_runs((1, 3), (4, 5)), "bad_items", []),
        (with_runs((2, 4), (5, 7)), "bad_items", []),
        (with_runs((1, 3), kept=((0, 3),)), "bad_items", []),
        (with_runs((1, 3), kept=((2, 4), (0, 0))), "bad_items", []),
        (with_runs((1, 3), kept=((3, 5),)), "bad_items", []),
        (with_runs((1, 3), kept=((0, 1), (0, 1))), "bad_items", []),
        (with_runs(kept=((0, 4),)), "bad_items", []),
        (make_request("first", words(3)), "duplicate_id", ["in use"]),
    ],
)
def test_scheduler_refuses_the_impossible(request_: Request, code: str, said: list[str]) -> None:
    """Refused at once with value, limit and remedy; earlier and later requests are served."""
    cluster = make_cluster(**LIMITS)
    first = make_request("first", words(30))
    cluster.submit(first)
    cluster.submit(request_)
    cluster.requests["first"] = first
    cluster.submit(image_request("last", (b"image", 32)))
    refuse = refusal_error(cluster.refused[request_.request_id])
    status = 409 if code == "duplicate_id" else 400
    assert (refuse.code, refuse.status, refuse.retry_after_s) == (code, status, None)
    for text in said:
        assert text in refuse.message
    assert cluster.kernel.statistics()["refused"] == {code: 1}
    assert_served(cluster, "first", "last")


CHUNK = ["17 tokens", "16 tokens", "generate.max_batch_tokens"]
WHOLE: list[tuple[str, Request, Request, str, list[str]]] = [
    ("item_atomic", image_request("fits", (b"a", 16), (b"b", 16)),
     image_request("exceeds", (b"a", 17)), "chunk_exceeded", CHUNK),
    ("prompt_atomic", make_request("fits", words(16)),
     make_request("exceeds", words(17)), "chunk_exceeded", CHUNK),
    ("prompt_atomic", image_request("fits", (b"a", 8), (b"b", 6)),
     image_request("exceeds", (b"a", 5), (b"b", 5), (b"c", 5)), "images_exceed_cache",
     ["24 tokens", "limit 16 tokens", "send fewer images, or raise"]),
    ("prompt_atomic", image_request("fits", (b"a", 4), (b"a", 4), (b"b", 5)),
     image_request("exceeds", (b"a", 4), (b"b", 4), (b"c", 5)), "images_exceed_cache",
     ["24 tokens", "limit 16 tokens"]),
]  # fmt: skip


@pytest.mark.parametrize(("fact", "fits", "exceeds", "code", "said"), WHOLE)
def test_scheduler_refuses_spans_that_no_step_can_hold_whole(
    fact: str, fits: Request, exceeds: Request, code: str, said: list[str]
) -> None:
    """One step must hold bidirectional spans, and bidirectional prompts with the embeddings of all their images."""
    limits = {"batch_tokens": 20, "chunk_tokens": 5, "pages": 2, "page_rows": 8, fact: True}
    cluster = make_cluster(fits, exceeds, **limits)
    refuse = refusal_error(cluster.refused["exceeds"])
    assert refuse.code == code
    for text in said:
        assert text in refuse.message
    assert_served(cluster, "fits")


@pytest.mark.parametrize(
    "request_",
    [
        make_request("r", words(96), max_tokens=4),
        make_request("r", words(1), max_tokens=99),
        image_request("r", (b"a", 32), (b"b", 32)),
        with_items((0, 5), (5, 5)),
    ],
)
def test_scheduler_serves_a_request_that_just_fits(request_: Request) -> None:
    cluster = make_cluster(request_, context_tokens=100, blocks=25, pages=8, page_rows=4)
    assert_served(cluster, request_.request_id)


def assert_queue_full(cluster: ModelCluster, name: str, said: str) -> None:
    refuse = refusal_error(cluster.refused[name])
    assert (refuse.code, refuse.status) == ("queue_full", 429)
    assert (refuse.retry_after_s or 0) > 0
    assert said in refuse.message


def test_scheduler_refuses_when_too_many_wait() -> None:
    """The queue is bounded; 429 has a time to retry, and a free place is given again."""
    cluster = make_cluster(slots=1, waiting=2, generate_depth=1)
    submit_texts(cluster, 4, 3, apart=20)
    words_of_it = "too many requests wait: value 3, limit 2. Remedy: try again later, or raise"
    assert_queue_full(cluster, "r3", f"{words_of_it} generate.max_waiting.")
    cluster.abort("r2")
    cluster.submit(make_request("again", words(3)))
    assert_served(cluster, "r0", "r1", "again")


def heavy(name: str, size: int) -> Request:
    """Return a request with pixels of this size; its three tokens take 12 bytes."""
    request = image_request(name, (name.encode(), 2))
    item = msgspec.structs.replace(request.items[0], extent=Extent(0, size - 12))
    return msgspec.structs.replace(request, items=(item,))


def test_scheduler_refuses_when_too_many_bytes_wait() -> None:
    """Tokens and pixels count while a request waits; a single one may exceed the limit."""
    cluster = make_cluster(heavy("running", 5000), slots=1, waiting_bytes=1000, generate_depth=1)
    cluster.run_encode()
    assert cluster.kernel.statistics()["running"] == 1
    cluster.submit(heavy("first", 600))
    cluster.submit(heavy("second", 400))
    cluster.submit(make_request("one too many", words(1)))
    assert_queue_full(cluster, "one too many", "hold too many bytes: value 1004, limit 1000")
    assert_queue_full(cluster, "one too many", "generate.max_waiting_bytes")
    cluster.abort("second")
    cluster.submit(heavy("again", 400))
    assert_served(cluster, "running", "first", "again")
    assert list(cluster.refused) == ["one too many"]
    assert cluster.kernel.statistics()["live_bytes"] == 0
