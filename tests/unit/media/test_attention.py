"""Attention spans of images in requests."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.media.fakes import FakePreprocessor, data_url, image_bytes, model_info
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.kernel.request import chain_hashes, int32
from vsched.media import ImageReference, MediaPipeline, MediaReference, PixelStore
from vsched.media.references import as_reference, place_attention
from vsched.types import MediaItem, Spans

RUNS = ((10, 14), (15, 19))
"""An image of two rows."""
IMAGE = data_url(image_bytes(16, 16))


@each_case(
    ("spans", "placed"),
    [
        ((), ()),
        (((0, 4), (4, 8)), RUNS),
        (((1, 3),), ((11, 13),)),
        (((2, 4), (5, 6), (6, 8)), ((12, 14), (16, 17), (17, 19))),
    ],
)
def test_spans_are_placed_in_the_prompt(spans: Spans, placed: Spans) -> None:
    assert place_attention(spans, RUNS) == placed


@each_case("span", [(3, 5), (0, 0), (2, 1), (7, 9), (8, 9), (0, 1 << 31)])
def test_spans_out_of_bounds_are_refused(span: tuple[int, int]) -> None:
    for spans in ((span,), ((0, 1), span)):
        with pytest.raises(
            RequestRefused, match=r"limit ascending .* 8 tokens.* Remedy: "
        ) as caught:
            place_attention(spans, RUNS)
        assert caught.value.code == "attention_spans_invalid"
    with pytest.raises(RequestRefused):
        place_attention(((0, 3), (2, 4)), RUNS)


async def prepared(*images: ImageReference, **info: bool | int) -> tuple[MediaItem, ...]:
    facts = msgspec.structs.replace(model_info(video_token_id=2), **info)
    store = PixelStore(memoryview(bytearray(1 << 16)))
    pipeline = MediaPipeline(FakePreprocessor(facts), store, MediaConfig())
    prompt = "a" + "".join("\x02" if as_reference(each).is_video else "\x01" for each in images)
    try:
        request = await pipeline.prepare(prompt, images)
        request.lease.release()
        return request.items
    finally:
        pipeline.close()


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
        (
            {"item_atomic": True},
            MediaReference((IMAGE,), is_video=True),
            "video 0: .*frames of videos",
        ),
    ],
)
async def test_spans_that_no_worker_honours_are_refused(
    info: dict[str, bool], image: str, text: str
) -> None:
    with pytest.raises(RequestRefused, match=text) as caught:
        await prepared(replace(as_reference(image), attention=((0, 1),)), **info)
    assert (caught.value.code, caught.value.status) == ("attention_spans_not_taken", 400)


def test_prefixes_with_other_spans_are_not_shared() -> None:
    item = MediaItem(key=b"k" * 32, tokens=4, offset=2)
    kinds: list[Spans | None] = [None, (), ((2, 6),), ((3, 6),), ((2, 4), (4, 6))]
    hashes = {
        chain_hashes(
            int32(range(16)),
            (msgspec.structs.replace(item, attention=each),),
            block_size=8,
            parent=b"root",
            start_block=0,
        )[0]
        for each in kinds
    }
    assert len(hashes) == len(kinds)
