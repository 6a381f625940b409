"""Images on the generic path: planned without pixels, and processed in another process if large."""

from __future__ import annotations

import asyncio
import io
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.parity.vision_checkpoints import ON_PILLOW, make_vision_checkpoint
from tests.unit.media.fakes import data_url
from tests.workers.driver import drawn_image
from vsched.config import MediaConfig
from vsched.media import MediaPipeline, PixelStore
from vsched.media.pictures import processes
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout
from vsched.worker.contract import view_arrays
from vsched_workers.checkpoint.facts import inspect_checkpoint
from vsched_workers.checkpoint.images import BLANK_PIXELS_MAX, ImageProcessor
from vsched_workers.checkpoint.preprocess import AnyPreprocessor, load_preprocessor
from vsched_workers.checkpoint.preprocess.generic import GenericImages, image_processing
from vsched_workers.families.generic import pack_metadata

SIZES = ((1, 1), (30, 90), (200, 210), (333, 333), (640, 60), (59, 641))
LARGE = (6000, 4000)


def load(path: Path, *, item_tokens_max: int = 0) -> AnyPreprocessor:
    info = inspect_checkpoint(str(path), dtype="auto", item_tokens_max=item_tokens_max)
    made = load_preprocessor(info)
    assert isinstance(made, AnyPreprocessor)
    return made


@pytest.fixture(scope="module", params=ON_PILLOW)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the preprocessor of a checkpoint of each architecture."""
    path = tmp_path_factory.mktemp(request.param)
    make_vision_checkpoint(request.param, path, weights=False)
    return load(path)


def shape_or_error(processor: ImageProcessor, size: tuple[int, int]) -> tuple[object, ...]:
    try:
        found = processor.shape(*size)
    except (ValueError, ArithmeticError) as error:
        return (type(error),)
    return found.arrays, pack_metadata(found.small), found.text


def test_shape_without_pixels_is_that_of_a_blank_image(
    loaded: AnyPreprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = loaded.processor
    assert processor._hollow is not None
    without = [shape_or_error(processor, size) for size in SIZES]
    monkeypatch.setattr(processor, "_hollow", None)
    assert without == [shape_or_error(processor, size) for size in SIZES]


def test_planning_takes_no_memory_for_the_pixels(loaded: AnyPreprocessor) -> None:
    """An image of 24 megapixels, whose arrays are small here."""
    loaded.plan_image(60, 40)
    tracemalloc.start()
    try:
        plan = loaded.plan_image(*LARGE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * sum(spec.nbytes for spec in plan.arrays) + 300_000


def test_processor_that_needs_pixels_gets_no_more_than_allowed(tmp_path: Path) -> None:
    """A larger image is shrunk, consistently in the plan and in processing."""
    make_vision_checkpoint("mistral3", tmp_path, weights=False)
    preprocessor = load(tmp_path)
    processor = preprocessor.processor
    assert processor.pixels_max is None
    processor._hollow, processor.pixels_max = None, 3000
    images = GenericImages(processor, preprocessor.info)
    size = images.fitting(100, 60)
    assert images.shape.cache_info().misses == 1, "nothing larger was asked for"
    assert 0.8 * 3000 < size[0] * size[1] <= 3000
    assert abs(size[0] / size[1] - 100 / 60) < 0.03
    made = images.process_image(drawn_image(1, 100, 60))
    wanted = processor.process(drawn_image(1, 100, 60).resize(size, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(made["pixel_values"], wanted["pixel_values"])


def test_processor_that_resizes_by_itself_is_asked_with_blank_images(tmp_path: Path) -> None:
    make_vision_checkpoint("mistral3", tmp_path, weights=False)
    processor = load(tmp_path).processor
    own = processor._processor.image_processor

    def resize(image: Any, size: Any, **_: object) -> Any:
        return np.resize(image, (3, size.height, size.width))

    own.resize = resize
    again = ImageProcessor(processor._processor, processor.placeholder)
    assert again._hollow is None
    assert again.pixels_max == BLANK_PIXELS_MAX


def test_recipe_builds_the_image_processor(loaded: AnyPreprocessor) -> None:
    made = image_processing(loaded.image_recipe().settings)
    for size in ((200, 210), (900, 350)):
        image = drawn_image(2, *size)
        wanted = loaded.process_image(image)
        found = made.process_image(image)
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])


async def test_large_image_is_processed_elsewhere_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a token budget, for which the image is shrunk: the other process computes the size again."""
    make_vision_checkpoint("mistral3", tmp_path, weights=False)
    preprocessor = load(tmp_path, item_tokens_max=6)
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    layout = ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=1, row_bytes=1)
    arena = Arena.create(layout)
    pipeline = MediaPipeline(
        preprocessor, PixelStore(arena.pixels, arena.fd), MediaConfig(prepare_s=60.0)
    )
    try:
        image, encoded = drawn_image(1, 210, 200), io.BytesIO()
        image.save(encoded, "PNG")
        prepared = await pipeline.prepare("[IMG]", [data_url(encoded.getvalue())])
        (item,) = prepared.items
        assert item.extent is not None
        raw = np.frombuffer(arena.pixels, np.uint8, item.extent.size, item.extent.offset)
        wanted = preprocessor.process_image(image)
        for name, found in view_arrays(item.arrays, raw).items():
            np.testing.assert_array_equal(found, wanted[name])
        assert pipeline._pictures is not None
        server = pipeline._pictures.pid
        maps = await asyncio.to_thread(Path(f"/proc/{server}/maps").read_text)
        assert "libtorch" not in maps
        assert "numpy" in maps
        threads = await asyncio.to_thread(os.listdir, f"/proc/{server}/task")
        assert len(threads) == 1, "it forks"
        prepared.lease.release()
        del raw, found
    finally:
        pipeline.close()
        arena.close()
