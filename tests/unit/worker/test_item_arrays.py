"""Named arrays of an image, from a plug-in whose plans follow from the size alone, to the encoder and back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.unit.kernel.setups import make_limits
from tests.unit.media.fakes import (
    FakePreprocessor,
    data_url,
    embedded,
    image_bytes,
    rows_of,
    tensor_of,
    tensors_file,
)
from vsched.config import MediaConfig
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.media import MediaPipeline, MediaReference, PixelStore
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.testing import ModelCluster
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, ArraySpec, Request, SamplingParams
from vsched.wire import EncodeResult
from vsched.worker.contract import (
    Arrays,
    Companion,
    EncodeJob,
    EncodeWorker,
    ImagePlan,
    extent_bytes,
    view_arrays,
)
from vsched.worker.stage_rank import EncodeRank

TILE = 8
ROW_BYTES = 32
LAYOUT = ArenaLayout(pixel_bytes=1 << 16, pages=4, page_rows=8, row_bytes=ROW_BYTES)


class TiledPreprocessor(FakePreprocessor):
    """Cuts images into tiles of 8 x 8 bytes a channel, two tokens each; there is no grid, only the size."""

    companion = Companion("image_size", ("height", "width in pixels"))

    def plan_image(self, width: int, height: int) -> ImagePlan:
        if min(width, height) < 1:
            raise RequestRefused("the image has no pixels. Remedy: send some.", code="image_empty")
        tiles = -(-width // TILE) * -(-height // TILE)
        arrays = (
            ArraySpec("mask", "bool", (tiles, 5)),
            ArraySpec("tiles", "uint8", (tiles, 3, TILE, TILE)),
            ArraySpec("image_size", "int64", (2,)),
        )
        return ImagePlan(arrays, 2 * tiles, metadata=struct.pack("<2q", height, width))

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        height, width = companion
        return self.plan_image(width, height)

    def process_image(self, image: Image.Image) -> Arrays:
        mask, tiles, size = self.plan_image(*image.size).arrays
        value = np.asarray(image)[0, 0, 0]
        return {
            "tiles": np.full(tiles.shape, value, np.uint8),
            "image_size": np.array(image.size[::-1], np.int64).reshape(size.shape),
            "mask": np.arange(np.prod(mask.shape)).reshape(mask.shape) % 3 == 0,
        }


class TiledEncoder(EncodeWorker):
    """Writes its inputs: a row holds a value of the tiles, the image's size, and the set part of the mask."""

    weights_bytes = 0

    def __init__(self) -> None:
        self.jobs: list[EncodeJob] = []

    def device_memory(self) -> SimulatedMemory:
        return SimulatedMemory(1 << 30)

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        self.jobs += jobs
        for job in jobs:
            tiles, size, mask = (job.arrays[name] for name in ("tiles", "image_size", "mask"))
            assert struct.unpack("<2q", job.metadata) == tuple(size)
            row = np.array([tiles.max(), *size, mask.sum()], np.int64)
            embeddings[list(job.pages)] = row.view(np.uint8)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(LAYOUT)
    yield arena
    arena.close()


@pytest.fixture
def pipeline(arena: Arena) -> Iterator[MediaPipeline]:
    pipeline = MediaPipeline(
        TiledPreprocessor(), PixelStore(arena.pixels), MediaConfig(allow_embeddings=True)
    )
    yield pipeline
    pipeline.close()


def decided(prompt: list[int], *items: object) -> list[EncodeTask]:
    """Tasks that a kernel sends to an encode group for a request."""
    cluster = ModelCluster(make_limits())
    sampling = SamplingParams(max_tokens=1)
    cluster.submit(
        Request(request_id="r", prompt_token_ids=prompt, items=items, sampling=sampling)  # type: ignore[arg-type]
    )
    return cluster.encode_log[0].tasks


def test_arrays_lie_one_after_the_other_each_at_a_cache_line() -> None:
    specs = TiledPreprocessor().plan_image(20, 8).arrays
    assert [spec.nbytes for spec in specs] == [15, 576, 16]
    assert extent_bytes(specs) == 64 + 576 + 16
    extent = np.zeros(extent_bytes(specs), np.uint8)
    views = view_arrays(specs, extent)
    begins = [view.__array_interface__["data"][0] - extent.ctypes.data for view in views.values()]
    assert begins == [0, 64, 640]
    assert [(name, view.dtype.name, view.shape) for name, view in views.items()] == [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]
    views["image_size"][...] = (1, 2)
    assert extent[640:].view(np.int64).tolist() == [1, 2], "views, no copies"
    extent.flags.writeable = False
    assert not any(view.flags.writeable for view in view_arrays(specs, extent).values())
    with pytest.raises(ValueError, match="cannot reshape|size"):
        view_arrays(specs, extent[:-8])
    assert extent_bytes(()) == 0


async def test_arrays_of_an_image_reach_the_encoder(arena: Arena, pipeline: MediaPipeline) -> None:
    """From the thread that prepares it, through the arena and a decision of the kernel, to the rank."""
    urls = [data_url(image_bytes(20, 8, value=9)), data_url(image_bytes(8, 16, value=4))]
    prepared = await pipeline.prepare("a\x01b\x01", urls)
    assert [item.tokens for item in prepared.items] == [6, 4]
    tasks = decided(prepared.token_ids, *prepared.items)
    encoder = TiledEncoder()
    pages = [[0], [2]]
    tasks = [msgspec.structs.replace(one, pages=own) for one, own in zip(tasks, pages, strict=True)]
    decision = msgspec.msgpack.decode(
        msgspec.msgpack.encode(EncodeDecision(1, tasks)), type=EncodeDecision
    )
    rank = EncodeRank(encoder, arena.embeddings, arena.read)
    assert rank.apply(decision) == EncodeResult(1, None, 0)
    rows = arena.embeddings[[0, 2], 0].view(np.int64).tolist()
    assert rows == [[9, 8, 20, 5], [4, 16, 8, 4]]
    prepared.lease.release()


async def test_an_array_that_was_not_planned_fails_the_request(pipeline: MediaPipeline) -> None:
    """Another dtype is never converted."""
    front = pipeline._preprocessor
    right = front.process_image(Image.new("RGB", (8, 8)))
    wrong = [
        {**right, "tiles": right["tiles"].astype(np.int8)},
        {**right, "mask": right["mask"].reshape(-1)},
        {name: right[name] for name in ("tiles", "mask")},
        {**right, "more": right["mask"]},
    ]
    for index, arrays in enumerate(wrong):
        front.process_image = lambda _, made=arrays: made  # type: ignore[method-assign, misc]
        with pytest.raises(RequestFailed, match="but planned mask bool") as caught:
            await pipeline.prepare("\x01", [data_url(image_bytes(8, 8, value=index))])
        assert caught.value.code == "image_processing_failed"


def brought(size: tuple[int, ...], rows: int) -> MediaReference:
    tensors = {"embeds": tensor_of(rows_of(rows)), "image_size": tensor_of(np.array(size))}
    return embedded(tensors_file(tensors))


async def test_an_embedding_is_planned_by_the_size_of_its_image(
    arena: Arena, pipeline: MediaPipeline
) -> None:
    prepared = await pipeline.prepare("\x01", [brought((8, 20), 6)])
    (item,) = prepared.items
    assert (item.encoded, item.tokens, item.arrays) == (True, 6, ())
    assert struct.unpack("<2q", item.metadata) == (8, 20)
    (task,) = decided(prepared.token_ids, item)
    rank = EncodeRank(TiledEncoder(), arena.embeddings, arena.read)
    task = msgspec.structs.replace(task, pages=[3])
    assert rank.apply(EncodeDecision(1, [task])) == EncodeResult(1, None, 0)
    assert arena.embeddings[3, :6].tobytes() == rows_of(6).tobytes()
    prepared.lease.release()
    for size, rows, code in (
        ((8, 20, 1), 6, "image_size_shape"),
        ((8, 20), 5, "embeds_tokens"),
        ((8, -20), 6, "image_empty"),
    ):
        with pytest.raises(RequestRefused, match="Remedy: ") as caught:
            await pipeline.prepare("\x01", [brought(size, rows)])
        assert caught.value.code == code
