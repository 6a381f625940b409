"""The end of a chunk before a missing embedding."""

from __future__ import annotations

import pytest

from tests.unit.kernel.setups import (
    assert_served,
    image_request,
    joined,
    make_limits,
    words,
)
from vsched.testing import ModelCluster, make_request

BLOCK = 4


@pytest.mark.parametrize(("text", "stop"), [(3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_chunk_before_a_missing_embedding_is_cut_back_to_a_block_boundary(
    text: int, stop: int
) -> None:
    """A little text is not worth a step of its own."""
    cluster = ModelCluster(make_limits(block_size=BLOCK))
    cluster.submit(make_request("r", words(text), [(text, 8, b"image")]))
    stops = [chunk.stop for step in cluster.decisions for chunk in step.chunks]
    assert stops == ([stop] if stop else [])


def test_chunk_is_never_cut_back_across_rows_of_an_embedding() -> None:
    """Ready embeddings are consumed, or their pages could block the missing one."""
    cluster = ModelCluster(make_limits(block_size=BLOCK, encode_items=1))
    cluster.submit(image_request("r", (b"ready", 6), (b"missing", 8)))
    cluster.run_encode()
    assert [chunk.stop for step in cluster.decisions for chunk in step.chunks] == [6]


def _chunks(cluster: ModelCluster) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for step in cluster.decisions for chunk in step.chunks]


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ("", [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 22)]),
        ("item_atomic", [(0, 3), (3, 12), (12, 14), (14, 20), (20, 22)]),
        ("prompt_atomic", [(0, 22)]),
    ],
)
def test_bidirectional_spans_are_one_chunk(fact: str, expected: list[tuple[int, int]]) -> None:
    """A chunk ends before an image or contains it whole, even if chunks should be smaller."""
    limits = make_limits(chunk_tokens=4, **({fact: True} if fact else {}))
    cluster = ModelCluster(limits)
    cluster.submit(make_request("r", words(7), [(3, 9, b"first"), (5, 6, b"second")]))
    cluster.drain()
    assert _chunks(cluster) == expected
    assert_served(cluster, "r")


def test_of_an_image_in_several_runs_each_is_one_chunk() -> None:
    """Separator tokens, of crops for example, split a bidirectional span; so a run is never longer than an image."""
    cluster = ModelCluster(make_limits(chunk_tokens=4, batch_tokens=12, item_atomic=True))
    cluster.submit(make_request("r", words(5), [(3, 14, b"crops")], row_tokens={b"crops": 7}))
    cluster.drain()
    assert _chunks(cluster) == [(0, 3), (3, 10), (10, 11), (11, 18), (18, 20)]
    assert_served(cluster, "r")


def test_an_image_that_does_not_fit_a_step_any_more_waits_and_is_not_overtaken() -> None:
    """It fits the next step; otherwise short prompts behind it could take that space again and again."""
    limits = make_limits(batch_tokens=20, chunk_tokens=12, item_atomic=True)
    cluster = ModelCluster(limits)
    cluster.submit(make_request("first", words(30)))
    cluster.submit(image_request("image", (b"image", 16)))
    cluster.submit(make_request("short", words(5, start=60)))
    cluster.drain()
    assert joined(cluster) == ["first", "image", "short"]
    assert (0, 16) in _chunks(cluster)
    assert_served(cluster, "first", "image", "short")


def test_a_prompt_waits_for_all_its_images() -> None:
    """One chunk reads them all."""
    cluster = ModelCluster(make_limits(encode_items=1, prompt_atomic=True))
    cluster.submit(image_request("r", (b"a", 6), (b"b", 8)))
    cluster.run_encode()
    assert not _chunks(cluster)
    cluster.drain()
    assert _chunks(cluster) == [(0, 15)]
