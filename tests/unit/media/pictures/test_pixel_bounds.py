"""Requests with bounds of the pixels to which an image is resized."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE_S
from tests.unit.media.fakes import (
    BoundedPreprocessor,
    FakePreprocessor,
    data_url,
    embedded,
    embedding_file,
    image_bytes,
)
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import ImageReference, MediaPipeline, MediaReference
from vsched.media.pictures import processes
from vsched.media.pixels import PixelStore
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, MediaItem
from vsched.worker.contract import PixelBounds

URL = data_url(image_bytes(64, 8))
"""A picture of eight tokens."""
TWO = PixelBounds(max_pixels=128)
"""Bounds that leave two of them."""


def pipeline(preprocessor: FakePreprocessor, settings: MediaConfig) -> MediaPipeline:
    return MediaPipeline(preprocessor, PixelStore(memoryview(bytearray(1 << 20))), settings)


@pytest.fixture
def media() -> Iterator[MediaPipeline]:
    made = pipeline(BoundedPreprocessor(), MediaConfig(allow_embeddings=True))
    yield made
    made.close()


async def items(media: MediaPipeline, *images: ImageReference) -> tuple[MediaItem, ...]:
    prepared = await media.prepare("\x01" + "a\x01" * (len(images) - 1), images)
    prepared.lease.release()
    return prepared.items


async def test_two_sizes_of_one_picture_are_two_items(media: MediaPipeline) -> None:
    plain, small, again = await items(
        media, URL, MediaReference(URL, bounds=TWO), MediaReference(URL, bounds=TWO)
    )
    assert [item.tokens for item in (plain, small, again)] == [8, 2, 2]
    assert small.key == again.key != plain.key
    assert media.statistics().processed == 2
    assert sum(spec.shape[0] for spec in small.arrays) == 8  # two tokens of four patches


async def test_bounds_of_the_checkpoint_keep_the_image_key(media: MediaPipeline) -> None:
    plain, same = await items(
        media, URL, MediaReference(URL, bounds=PixelBounds(max_pixels=64 * 64))
    )
    assert plain.key == same.key


async def test_a_name_is_of_an_image_of_one_size(media: MediaPipeline) -> None:
    (sent,) = await items(media, MediaReference(URL, uuid="cat", bounds=TWO))
    (found,) = await items(media, MediaReference(uuid="cat", bounds=TWO))
    assert found.key == sent.key
    with pytest.raises(RequestRefused, match="image 0: no image is kept"):
        await items(media, MediaReference(uuid="cat"))


async def test_an_embedding_has_its_size(media: MediaPipeline) -> None:
    (item,) = await items(media, embedded(embedding_file()))
    assert item.encoded


async def test_settings_out_of_bounds_are_refused() -> None:
    media = pipeline(BoundedPreprocessor(), MediaConfig(image_pixels_max=1000))
    with pytest.raises(RequestRefused, match="image 1: above") as refused:
        await items(media, URL, MediaReference(URL, bounds=PixelBounds(max_pixels=1001)))
    assert refused.value.code == "pixel_bounds_invalid"
    media.close()


async def test_a_model_without_bounds_refuses_them() -> None:
    media = pipeline(FakePreprocessor(), MediaConfig())
    with pytest.raises(RequestRefused, match="Remedy: leave min_pixels and max_pixels") as refused:
        await items(media, MediaReference(URL, bounds=TWO))
    assert (refused.value.code, refused.value.status) == ("pixel_bounds_not_taken", 400)
    media.close()


async def test_picture_processes_know_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)
    arena = Arena.create(ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=1, row_bytes=1))
    media = MediaPipeline(
        BoundedPreprocessor(),
        PixelStore(arena.pixels, arena.fd),
        MediaConfig(prepare_s=PATIENCE_S),  # imports take long on a busy machine
    )
    assert [item.tokens for item in await items(media, MediaReference(URL, bounds=TWO), URL)] == [
        2,
        8,
    ]
    media.close()
    arena.close()
