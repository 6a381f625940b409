"""Attention spans of images in requests, and bounds of the pixels to which they are resized."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from tests.each_case import each_case
from tests.patience import PATIENCE_S
from tests.unit.media.fakes import (
    BoundedPreprocessor,
    FakePreprocessor,
    data_url,
    embedded,
    embedding_file,
    image_bytes,
    model_info,
)
from tests.unit.media.pipelines import Bench
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.kernel.request import chain_hashes, int32
from vsched.media import ImageReference, MediaReference
from vsched.media.pictures import processes
from vsched.media.pixels import PixelStore
from vsched.media.references import as_reference, place_attention
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, MediaItem, Spans
from vsched.worker.contract import PixelBounds, VideoSampling

RUNS = ((10, 14), (15, 19))
"""An image of two rows."""
IMAGE = data_url(image_bytes(16, 16))
VIDEO = MediaReference((IMAGE,), is_video=True)
OUTSIDE = [(3, 5), (0, 0), (2, 1), (7, 9), (8, 9), (0, 1 << 31)]


@each_case(
    ("spans", "placed"),
    [
        ((), ()),
        (((0, 4), (4, 8)), RUNS),
        (((1, 3),), ((11, 13),)),
        (((2, 4), (5, 6), (6, 8)), ((12, 14), (16, 17), (17, 19))),
        (((0, 3), (2, 4)), None),
        *((((0, 1), span), None) for span in OUTSIDE),
        *(((span,), None) for span in OUTSIDE),
    ],
)
def test_spans_are_placed_in_the_prompt(spans: Spans, placed: Spans | None) -> None:
    """Those out of bounds or out of order are refused."""
    if placed is not None:
        assert place_attention(spans, RUNS) == placed
        return
    with pytest.raises(RequestRefused, match=r"limit ascending .* 8 tokens.* Remedy: ") as caught:
        place_attention(spans, RUNS)
    assert caught.value.code == "attention_spans_invalid"


async def prepared(*images: ImageReference, **info: bool | int) -> tuple[MediaItem, ...]:
    facts = msgspec.structs.replace(model_info(video_token_id=2), **info)
    prompt = "a" + "".join("\x02" if as_reference(each).is_video else "\x01" for each in images)
    async with Bench(preprocessor=FakePreprocessor(facts)) as bench:
        return (await bench.prepare(prompt, images)).items


async def test_items_have_the_spans_of_their_images() -> None:
    spanned = MediaReference(IMAGE, attention=((1, 4),))
    first, second = await prepared(IMAGE, spanned, item_atomic=True)
    assert (first.attention, first.atoms) == (None, ((1, 5),))
    assert (second.attention, second.atoms) == (((6, 9),), ((6, 9),))
    assert first.key == second.key, "the encoder does not depend on it"


@each_case(
    ("info", "image", "text"),
    [
        ({}, IMAGE, "image 0: .*: the model's attention is causal. Remedy: leave"),
        ({"prompt_atomic": True}, IMAGE, "bidirectional within the whole prompt"),
        ({"item_atomic": True}, VIDEO, "video 0: .*frames of videos"),
    ],
)
async def test_spans_not_honoured_are_refused(info: dict[str, bool], image: str, text: str) -> None:
    with pytest.raises(RequestRefused, match=text) as caught:
        await prepared(replace(as_reference(image), attention=((0, 1),)), **info)
    assert (caught.value.code, caught.value.status) == ("attention_spans_not_taken", 400)


async def test_frames_last_no_longer_than_a_video() -> None:
    """Times beyond float32 have no positions."""
    video = replace(VIDEO, sampling=VideoSampling(5e-324))
    with pytest.raises(RequestRefused, match=r"video 0: .*too long.* limit 3600 s.*seconds_max"):
        await prepared(video)


def test_prefixes_with_other_spans_are_not_shared() -> None:
    kinds: list[Spans | None] = [None, (), ((2, 6),), ((3, 6),), ((2, 4), (4, 6))]
    hashes = set()
    for attention in kinds:
        item = MediaItem(key=b"k" * 32, tokens=4, offset=2, attention=attention)
        tokens = int32(range(16))
        hashes.add(chain_hashes(tokens, (item,), block_size=8, parent=b"", start_block=0)[0])
    assert len(hashes) == len(kinds)


URL = data_url(image_bytes(64, 8))
"""A picture of eight tokens."""
TWO = PixelBounds(max_pixels=128)
"""Bounds that leave two of them."""


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench(MediaConfig(allow_embeddings=True), BoundedPreprocessor(), items=512) as bench:
        yield bench


async def test_two_sizes_of_one_picture_are_two_items(bench: Bench) -> None:
    """Bounds that change nothing keep the key of the image."""
    bounds = [None, TWO, TWO, PixelBounds(max_pixels=64 * 64)]
    images = [MediaReference(URL, bounds=each) for each in bounds]
    plain, small, again, same = (await bench.prepare("\x01a\x01a\x01a\x01", images)).items
    assert [item.tokens for item in (plain, small, again)] == [8, 2, 2]
    assert small.key == again.key != plain.key == same.key
    assert bench.pipeline.statistics().processed == 2
    assert sum(spec.shape[0] for spec in small.arrays) == 8  # two tokens of four patches


async def test_a_name_is_of_an_image_of_one_size(bench: Bench) -> None:
    sent = await bench.prepare("\x01", [MediaReference(URL, uuid="cat", bounds=TWO)])
    found = await bench.prepare("\x01", [MediaReference(uuid="cat", bounds=TWO)])
    assert found.items[0].key == sent.items[0].key
    error = await bench.refusal("\x01", [MediaReference(uuid="cat")])
    assert error.message.startswith("image 0: no image is kept")


async def test_an_embedding_has_its_size(bench: Bench) -> None:
    assert (await bench.prepare("\x01", [embedded(embedding_file())])).items[0].encoded


async def test_bounds_that_are_not_taken_are_refused() -> None:
    async with Bench(MediaConfig(image_pixels_max=1000), BoundedPreprocessor()) as limited:
        large = MediaReference(URL, bounds=PixelBounds(max_pixels=1001))
        error = await limited.refusal("\x01a\x01", [URL, large])
        assert error.message.startswith("image 1: above")
        assert error.code == "pixel_bounds_invalid"
    async with Bench(preprocessor=FakePreprocessor()) as other:
        error = await other.refusal("\x01", [MediaReference(URL, bounds=TWO)])
        assert (error.code, error.status) == ("pixel_bounds_not_taken", 400)
        assert "Remedy: leave min_pixels and max_pixels" in error.message


async def test_picture_processes_know_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)
    arena = Arena.create(ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=1, row_bytes=1))
    settings = MediaConfig(prepare_s=PATIENCE_S)  # imports take long on a busy machine
    store = PixelStore(arena.pixels, arena.fd)
    async with Bench(settings, BoundedPreprocessor(), store=store) as bench:
        prepared = await bench.prepare("\x01a\x01", [MediaReference(URL, bounds=TWO), URL])
        assert [item.tokens for item in prepared.items] == [2, 8]
    arena.close()
