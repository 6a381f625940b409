"""Where a chunk ends before an embedding that is not there."""

from __future__ import annotations

import pytest

from tests.unit.kernel.setups import image_request, make_limits, words
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
    """What is ready is consumed, or its pages could keep the missing one out."""
    cluster = ModelCluster(make_limits(block_size=BLOCK, encode_items=1))
    cluster.submit(image_request("r", (b"ready", 6), (b"missing", 8)))
    cluster.run_encode()
    assert [chunk.stop for step in cluster.decisions for chunk in step.chunks] == [6]
