"""Image processors of many architectures, compared with transformers' own; plans without pixels; other processes."""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import json
import logging
import os
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.parity.vision_checkpoints import ON_PILLOW, PROCESSING, make_vision_checkpoint
from tests.unit.media.fakes import data_url
from tests.workers.driver import drawn_image, inspect
from tests.workers.edited import Copy, copy_of, write
from tests.workers.properties import usually
from vsched.config import MediaConfig
from vsched.errors import CheckpointError, ConfigError, RequestRefused
from vsched.media import MediaPipeline, PixelStore
from vsched.media.pictures import processes
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout
from vsched.worker.contract import PixelBounds, view_arrays
from vsched_workers.checkpoint import images as image_processor
from vsched_workers.checkpoint.preprocess import AnyPreprocessor, load_preprocessor
from vsched_workers.checkpoint.preprocess.generic import GenericImages, image_processing
from vsched_workers.families.generic import unpack_metadata

NAMES = [name for name in sorted(PROCESSING) if not name.endswith("_moe")]
"""Those with experts process images as those without."""
SIZES = ((30, 90), (200, 210), (640, 70))


def load(path: Path, *, item_tokens_max: int = 0) -> AnyPreprocessor:
    made = load_preprocessor(inspect(path, item_tokens_max=item_tokens_max))
    assert isinstance(made, AnyPreprocessor)
    return made


Front = Callable[..., AnyPreprocessor]
FEW = ("gemma3", "idefics3", "llava", "paligemma", "qwen2_vl")
"""Fixed sizes, crops, one row per patch, a template that knows no images, an area."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Return the folder of a checkpoint of an architecture, without weights."""

    @functools.cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        make_vision_checkpoint(name, path, weights=False)
        return path

    return make


@pytest.fixture(scope="module")
def front(made: Copy) -> Front:
    """Return the preprocessor of an architecture, which limits the tokens of an image if given."""
    return functools.cache(lambda name, limit=0: load(made(name), item_tokens_max=limit))


@pytest.fixture
def copied(made: Copy, tmp_path: Path) -> Copy:
    return lambda name: copy_of(made(name), tmp_path)


@pytest.fixture(params=usually(*FEW, of=NAMES))
def loaded(request: pytest.FixtureRequest, front: Front) -> Any:
    """Return the name of an architecture and its preprocessor."""
    if PROCESSING[request.param].torchvision and not image_processor.has_torchvision():
        pytest.skip("torchvision is not installed")
    return request.param, front(request.param)


def requested(preprocessor: AnyPreprocessor, count: int) -> str:
    images = [{"type": "image"} for _ in range(count)]
    text = {"type": "text", "text": "what is it?"}
    return preprocessor.render([{"role": "user", "content": [*images, text]}])


def check_equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert set(found) == set(wanted)
    for name, array in found.items():
        np.testing.assert_array_equal(array, np.asarray(wanted[name]))


@pytest.mark.parametrize("size", SIZES)
def test_arrays_and_prompt_are_those_of_the_processor(loaded: Any, size: tuple[int, int]) -> None:
    """The whole processor tokenizes, too; its inputs are the template's text and the image.

    The recipe for other processes yields the same arrays.
    """
    name, preprocessor = loaded
    image = drawn_image(3, *size)
    plan = preprocessor.plan_image(*size)
    whole = preprocessor.processor._processor
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = whole.tokenizer.apply_chat_template(
        [{"role": "user", "content": "<image>\nwhat is it?" if name == "paligemma" else parts}],
        tokenize=False,
        add_generation_prompt=True,
    )
    tensors = "pt" if PROCESSING[name].torchvision else "np"
    prepared, texts, *_ = whole.prepare_inputs_layout(images=[image], text=[text])
    options = {"return_tensors": tensors, **_defaults(whole)}
    if name == "lfm2_vl":
        options["use_image_special_tokens"] = True  # its default
    made, replacements = whole._process_images(prepared, **options)
    (expanded,), _ = whole.get_text_with_replacements(list(texts), replacements)
    ids, (spans,) = preprocessor.expand(preprocessor.tokenize(requested(preprocessor, 1)), [plan])
    wanted = whole.tokenizer(expanded, add_special_tokens=False)["input_ids"]
    if name == "paligemma":  # its processor adds a BOS token after the images, and an end
        wanted = [token for token in wanted if token != 1][:-1]
    assert ids == wanted
    placeholders = [i for i, token in enumerate(ids) if token == preprocessor.info.placeholder]
    assert [i for start, stop in spans for i in range(start, stop)] == placeholders
    assert len(placeholders) == plan.tokens > 0
    arrays = preprocessor.process_image(image)
    assert {spec.name: (spec.dtype, spec.shape) for spec in plan.arrays} == {
        name: (array.dtype.name, array.shape) for name, array in arrays.items()
    }
    if name in ON_PILLOW:
        elsewhere = image_processing(preprocessor.image_recipe().settings).process_image(image)
        check_equal(elsewhere, arrays)
    check_equal(arrays | unpack_metadata(plan.metadata), made)


@pytest.mark.parametrize("size", SIZES[:2])
def test_bounds_of_a_request_are_given_to_the_processor(loaded: Any, size: tuple[int, int]) -> None:
    """Processors that resize to an area plan and process accordingly; the others refuse bounds."""
    name, preprocessor = loaded
    if preprocessor.processor.area is None:
        with pytest.raises(RequestRefused, match="Remedy: leave min_pixels") as refused:
            preprocessor.bounded(PixelBounds(max_pixels=5000), pixels_max=1 << 40)
        assert refused.value.code == "pixel_bounds_not_taken"
        assert name not in {"glm4v", "qwen2_vl"}
        return
    limits, _ = preprocessor.processor.area
    most = max(limits.minimum, min(limits.maximum, 200 * 210) // 2)
    bounds = PixelBounds(limits.minimum, most)
    bounded = preprocessor.bounded(bounds, pixels_max=1 << 40)
    assert bounded is preprocessor.bounded(bounds, pixels_max=1 << 40)
    assert bounded.settings_digest != preprocessor.settings_digest
    plan, image = bounded.plan_image(*size), drawn_image(3, *size)
    assert plan.tokens != preprocessor.plan_image(*size).tokens or size == SIZES[0]
    whole = preprocessor.processor._processor
    requested = {"shortest_edge": bounds.min_pixels, "longest_edge": bounds.max_pixels}
    options = {**_defaults(whole), "return_tensors": "np", "size": requested}
    made, _ = whole._process_images([image], **options)
    other = preprocessor._images.bounded(
        bounds, pixels_max=1 << 40
    )  # as in an isolated image process
    for arrays in (bounded.process_image(image), other.process_image(image)):
        check_equal(arrays | unpack_metadata(plan.metadata), made)
    same = preprocessor.bounded(PixelBounds(max_pixels=limits.maximum), pixels_max=1 << 40)
    assert same is preprocessor
    with pytest.raises(RequestRefused, match="max_pixels of an image is out of bounds"):
        preprocessor.bounded(PixelBounds(max_pixels=2 * limits.maximum), pixels_max=1 << 40)


def _defaults(processor: Any) -> dict[str, Any]:
    """Return the default options that a processor passes to its image processor."""
    merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
    return {key: value for key, value in merged["images_kwargs"].items() if key != "return_tensors"}


def test_most_tokens_are_found(loaded: Any) -> None:
    """Without transformers' warning for each image of three rows on the way."""
    _, preprocessor = loaded
    assert not logging.getLogger("transformers.image_utils").isEnabledFor(logging.WARNING)
    sides = (14, 28, 31, 56, 84, 90, 112, 200, 300)
    found = []
    for width in sides:
        for height in sides:
            try:
                found.append(preprocessor.processor.tokens(width, height))
            except ValueError:
                assert max(width, height) > 10 * min(width, height)
    assert max(found) <= preprocessor.info.item_tokens_max


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak of memory that Python allocates during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [(60, 40), (1200, 900)])
def test_processing_takes_no_more_than_its_plan_says(loaded: Any, size: tuple[int, int]) -> None:
    """Without Pillow's memory, which is counted as four bytes per pixel for each of two images."""
    _, preprocessor = loaded
    plan = preprocessor.plan_image(*size)
    image = drawn_image(1, *size)
    preprocessor.process_image(image)
    peak = peak_bytes(lambda: preprocessor.process_image(image))
    small_bytes = 200_000  # independent of the size: texts, tables, objects
    assert peak <= plan.work_bytes - 4 * size[0] * size[1] + small_bytes


def test_an_image_of_too_many_tokens_is_made_smaller(front: Front, made: Copy) -> None:
    free, bound = front("internvl"), front("internvl", 12)
    assert (free.info.item_tokens_max, bound.info.item_tokens_max) == (28, 12)
    assert free.plan_image(200, 200).tokens == 20
    plan = bound.plan_image(200, 200)
    assert 1 < plan.tokens <= 12
    arrays = bound.process_image(drawn_image(1, 200, 200))
    assert [array.shape for array in arrays.values()] == [spec.shape for spec in plan.arrays]
    assert bound.plan_image(28, 28) == free.plan_image(28, 28)
    assert bound.settings_digest != free.settings_digest
    with pytest.raises(ConfigError, match=r"value 15.*limit 16"):
        load(made("llava"), item_tokens_max=15)


def test_an_image_that_the_processor_does_not_take_is_refused(front: Front) -> None:
    with pytest.raises(RequestRefused, match="1 x 500 pixels cannot be processed"):
        front("qwen2_vl").plan_image(1, 500)
    with pytest.raises(RequestRefused, match="side is empty"):
        front("qwen2_vl").plan_image(0, 5)


def test_images_side_by_side_are_refused_if_positions_follow_from_them(front: Front) -> None:
    qwen, llava = front("qwen2_vl"), front("llava")
    with pytest.raises(RequestRefused, match="side by side"):
        qwen.expand([qwen.info.placeholder] * 2, [qwen.plan_image(60, 40)] * 2)
    _, spans = llava.expand([llava.info.placeholder] * 2, [llava.plan_image(60, 40)] * 2)
    assert spans == [((0, 16),), ((16, 32),)]


def test_a_marker_in_the_text_of_a_client_is_text(front: Front) -> None:
    preprocessor = front("llava")
    text = preprocessor.render([{"role": "user", "content": "an <image> of what?"}])
    assert preprocessor.info.placeholder not in preprocessor.tokenize(text)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llava", {"size": 28, "crop_size": 28}),
        ("llava", {"image_processor_type": None, "feature_extractor_type": "CLIPFeatureExtractor"}),
        ("llava", {"image_processor_type": "CLIPImageProcessorFast"}),
        ("llava", "processor_config.json"),
        ("paligemma", "preprocessor_config.json"),
    ],
)
def test_settings_of_older_and_newer_layouts_are_read(
    front: Front, copied: Copy, name: str, changes: dict[str, Any] | str
) -> None:
    """Sizes as one number, former names of classes, classes of other libraries; the processor in one file."""
    path = copied(name)
    own, whole = path / "preprocessor_config.json", path / "processor_config.json"
    if isinstance(changes, dict):
        write(own, changes)
    elif changes == whole.name:
        write(whole, {"image_processor": json.loads(own.read_text())})
        own.unlink()
    else:
        write(own, json.loads(whole.read_text()))
        whole.unlink()
    after, image = load(path), drawn_image(1, 50, 40)
    assert after.plan_image(50, 40) == front(name).plan_image(50, 40)
    found, wanted = (each.process_image(image)["pixel_values"] for each in (after, front(name)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("named", ["Kimi_K25ImageProcessor", "Lfm2VlImageProcessor"])
def test_an_image_processor_that_needs_torchvision_is_refused_without_it(
    copied: Copy, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(image_processor, "has_torchvision", lambda: False)
    path = copied("llava")
    write(path / "preprocessor_config.json", {"image_processor_type": named})
    with pytest.raises(
        CheckpointError, match=r"torchvision alone.* pip install 'vsched\[torchvision\]'"
    ):
        load(path)


@pytest.mark.parametrize(("name", "hidden"), [("llava", True), ("lfm2_vl", False)])
@pytest.mark.parametrize("installed", [True, False])
def test_torch_is_hidden_unless_torchvision_processes_images(
    made: Copy, monkeypatch: pytest.MonkeyPatch, name: str, *, hidden: bool, installed: bool
) -> None:
    monkeypatch.setattr(image_processor, "has_torchvision", lambda: installed)
    import torch

    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    # The import inside finds the loaded module: nothing is imported twice.
    modules = {key: module for key, module in sys.modules.items() if key != "torch"}
    monkeypatch.setattr(sys, "modules", modules)
    image_processor.forgo_torch(made(name))
    is_hidden = "torch" in modules and modules["torch"] is None
    assert is_hidden == (hidden or not installed)
    assert threads == ([] if is_hidden else [1])


def test_a_marker_that_is_no_token_is_refused(copied: Copy) -> None:
    path = copied("llava")
    tokens = path / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"<image>"', '"<picture>"'))
    write(path / "tokenizer_config.json", b'{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="a prompt has '<image>', which is no token"):
        load(path)


def test_planning_takes_no_memory_for_the_pixels(loaded: Any) -> None:
    """An image of 24 megapixels, whose arrays are small here."""
    name, preprocessor = loaded
    preprocessor.plan_image(60, 40)
    peak = peak_bytes(lambda: preprocessor.plan_image(6000, 4000))
    if name in ON_PILLOW:
        plan = preprocessor.plan_image(6000, 4000)
        assert peak < 5 * sum(spec.nbytes for spec in plan.arrays) + 300_000


def test_processor_that_needs_pixels_gets_no_more_than_allowed(front: Front) -> None:
    """A larger image is shrunk, consistently in the plan and in processing."""
    preprocessor = front("internvl")
    processor = copy.copy(preprocessor.processor)
    assert processor.pixels_max is None
    processor._hollow, processor.pixels_max = None, 3000
    images = GenericImages(processor, preprocessor.info)
    size = images.fitting(100, 60)
    assert images.shape.cache_info().misses == 1, "nothing larger was asked for"
    assert 0.8 * 3000 < size[0] * size[1] <= 3000
    assert abs(size[0] / size[1] - 100 / 60) < 0.03
    found = images.process_image(drawn_image(1, 100, 60))
    wanted = processor.process(drawn_image(1, 100, 60).resize(size, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found["pixel_values"], wanted["pixel_values"])


async def test_large_image_is_processed_elsewhere_without_torch(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a token budget, for which the image is shrunk: the other process computes the size again."""
    preprocessor = front("internvl", 12)
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    arena = Arena.create(ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=1, row_bytes=1))
    pipeline = MediaPipeline(
        preprocessor, PixelStore(arena.pixels, arena.fd), MediaConfig(prepare_s=60.0)
    )
    try:
        image, encoded = drawn_image(1, 210, 200), io.BytesIO()
        image.save(encoded, "PNG")
        prepared = await pipeline.prepare("<IMG_CONTEXT>", [data_url(encoded.getvalue())])
        (item,) = prepared.items
        assert item.extent is not None
        raw = np.frombuffer(arena.pixels, np.uint8, item.extent.size, item.extent.offset)
        wanted = preprocessor.process_image(image)
        for name, found in view_arrays(item.arrays, raw).items():
            np.testing.assert_array_equal(found, wanted[name])
        assert pipeline._processes is not None
        server = pipeline._processes.pid
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
