"""Large images are processed in separate processes, whose failures only affect their own request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from tests.patience import NEVER_S, patience, until
from tests.unit.media.fakes import (
    VIDEO_PLACEHOLDER,
    FakePreprocessor,
    FaultyPreprocessor,
    HangingPreprocessor,
    data_url,
    image_bytes,
    model_info,
)
from vsched.config import MediaConfig
from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.calls import CallCancellation
from vsched.media import MediaPipeline, MediaReference, PixelStore
from vsched.media.items import MeasuredItem
from vsched.media.measure import Measurer, RequestFiles
from vsched.media.pictures import filling, processes
from vsched.media.pictures.processes import LARGE_BYTES, LocalPictures, PictureProcesses
from vsched.media.video import VideoLimits
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, Extent

LIMITS = VideoLimits(1 << 20, 60.0, 60.0)
PIXEL_BYTES = 1 << 20
DIES = data_url(image_bytes(value=FaultyPreprocessor.DIES))
HANGS = data_url(image_bytes(value=FaultyPreprocessor.HANGS))


class ArenaBench:
    """A pipeline whose store is an arena, so that large images get processes."""

    def __init__(
        self, settings: MediaConfig, preprocessor: type[FaultyPreprocessor] = FaultyPreprocessor
    ) -> None:
        self.arena = Arena.create(
            ArenaLayout(pixel_bytes=PIXEL_BYTES, pages=0, page_rows=1, row_bytes=1)
        )
        self.store = PixelStore(self.arena.pixels, self.arena.fd)
        info = model_info(video_token_id=VIDEO_PLACEHOLDER)
        self.pipeline = MediaPipeline(preprocessor(info), self.store, settings)
        made = self.pipeline._processes
        assert made is not None
        self.pictures = made

    async def values(self, *urls: str) -> list[float]:
        """Prepare one request, and return the value that fills the pixels of each image."""
        prepared = await self.pipeline.prepare("\x01" + "a\x01" * (len(urls) - 1), urls)
        found = []
        for item in prepared.items:
            assert item.extent is not None
            pixels = np.frombuffer(self.store.view(item.extent), np.float32)
            found.append(float(pixels[0]))
            assert (pixels == pixels[0]).all()
        prepared.lease.release()
        return found

    def close(self) -> None:
        self.pipeline.close()
        self.arena.close()

    async def all_back(self) -> None:
        """Wait until all space and bytes have been returned."""
        await until(lambda: not self.pipeline.statistics().decode.bytes_used)
        assert self.store.statistics().bytes_held == 0


def measured(
    url: str, preprocessor: FakePreprocessor | None = None, settings: MediaConfig | None = None
) -> MeasuredItem:
    """Return the measured image of a URL."""
    preprocessor, settings = preprocessor or FaultyPreprocessor(), settings or MediaConfig()
    limits = VideoLimits(settings.image_pixels_max, 60.0, 60.0)
    local = LocalPictures(preprocessor, limits, PixelStore(memoryview(b"")).view)
    measurer = Measurer(preprocessor, settings, {}, {}, local)
    [found] = measurer.measure([MediaReference(url)], RequestFiles({}, ""))
    return found


async def fill(pictures: PictureProcesses, image: MeasuredItem) -> None:
    """Fill the start of the arena with an image."""
    [size] = image.extents.values()
    await asyncio.to_thread(pictures.fill, image, [Extent(0, size)], CallCancellation())


def make_bench(prepare_s: float) -> Iterator[ArenaBench]:
    bench = ArenaBench(MediaConfig(prepare_s=prepare_s))
    yield bench
    bench.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaBench]:
    """A bench where every image is large."""
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)
    yield from make_bench(30.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaBench]:
    """The same with a short deadline per image."""
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)
    yield from make_bench(0.2)


@pytest.fixture
def patient() -> Iterator[ArenaBench]:
    """A bench without a deadline."""
    yield from make_bench(NEVER_S)


async def test_large_images_are_not_processed_here(
    bench: ArenaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process writes to the arena, where an extent may begin within a page."""

    def fail(*_: object) -> NoReturn:
        raise AssertionError("decoded in the engine")

    monkeypatch.setattr(filling, "decode", fail)
    urls = [data_url(image_bytes(8 * n, 40, value=n)) for n in range(1, 12)]
    assert await bench.values(*urls) == [float(n) for n in range(1, 12)]
    assert bench.pipeline.statistics().processed == 11
    await bench.all_back()


async def test_small_images_share_a_process(
    bench: ArenaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one of them kills it."""
    monkeypatch.setattr(processes, "LARGE_BYTES", LARGE_BYTES)
    for value in (1, 2, 3):
        assert await bench.values(data_url(image_bytes(value=value))) == [float(value)]
    [kept] = children(bench.pictures.pid)
    with pytest.raises(RequestFailed, match="its process died"):
        await bench.values(DIES)
    assert await bench.values(data_url(image_bytes(value=4))) == [4.0]
    [other] = children(bench.pictures.pid)
    assert other != kept
    await bench.all_back()


async def test_headers_that_native_code_parses_are_read_in_a_process(
    bench: ArenaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("opened in the engine")

    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile._open", fail)
    kinds = ["PNG", "JPEG", "WEBP", "BMP", "GIF"]
    urls = [data_url(image_bytes(kind=kind), f"image/{kind.lower()}") for kind in kinds]
    assert len(await bench.values(*urls)) == len(kinds)
    with pytest.raises(RequestRefused, match="image 0: the image cannot be decoded"):
        await bench.values(data_url(b"RIFF" + bytes(60), "image/webp"))


async def test_undecodable_input_is_refused(bench: ArenaBench) -> None:
    """By the process itself, with the same limits as for the check of the header."""
    image = measured(data_url(image_bytes()))
    recipe = FaultyPreprocessor().image_recipe()
    assert recipe is not None
    made = PictureProcesses(
        recipe, LIMITS, takes_videos=False, arena_fd=bench.arena.fd, deadline_s=30.0
    )
    with contextlib.closing(made):
        for content, code in (
            (image_bytes(64, 64)[:-30], "image_invalid"),
            (image_bytes(2048, 2048), "image_too_large"),
            (b"\x89PNG" * 100, "image_invalid"),
        ):
            with pytest.raises(RequestRefused, match="Remedy: ") as caught:
                await fill(made, replace(image, content=content))
            assert caught.value.code == code


async def test_image_that_fails_fails_alone(bench: ArenaBench) -> None:
    """Its process dies, its processor raises, or it is damaged."""
    good = [data_url(image_bytes(value=n)) for n in range(1, 5)]
    found = await asyncio.gather(
        *(bench.values(url) for url in [*good, DIES]), return_exceptions=True
    )
    assert found[:4] == [[1.0], [2.0], [3.0], [4.0]]
    assert isinstance(found[4], RequestFailed)
    assert found[4].code == "image_processing_failed"
    assert "its process died (SIGKILL). Remedy: " in found[4].message
    await bench.all_back()
    with pytest.raises(RequestFailed, match="could not be processed"):
        await bench.values(data_url(image_bytes(value=FaultyPreprocessor.RAISES)))
    damaged = data_url(image_bytes(64, 64)[:-30])
    with pytest.raises(RequestRefused, match="image 1: the image cannot be decoded"):
        await bench.values(data_url(image_bytes()), damaged)
    await bench.all_back()
    assert await bench.values(data_url(image_bytes(value=9))) == [9.0]


async def test_process_that_hangs_is_killed(hasty: ArenaBench) -> None:
    """The request fails in time, and its space and bytes return, which a thread would hold for ever."""
    with pytest.raises(RequestRefused, match=r"media\.prepare_s") as caught:
        await hasty.values(HANGS)
    assert caught.value.code == "prepare_timeout"
    await hasty.all_back()


async def test_process_of_a_cancelled_video_is_killed(patient: ArenaBench) -> None:
    """At once, not at its deadline; another request for the video then starts a new one."""
    bench = patient
    video = MediaReference((data_url(image_bytes()), HANGS), is_video=True)
    first = asyncio.ensure_future(bench.pipeline.prepare("\x02", [video]))
    await until(lambda: bool(children(bench.pictures.pid)))
    [child] = children(bench.pictures.pid)
    first.cancel()
    second = asyncio.ensure_future(bench.pipeline.prepare("\x02", [video]))
    await until(lambda: children(bench.pictures.pid) not in ([], [child]))
    second.cancel()
    await bench.all_back()
    await until(lambda: not children(bench.pictures.pid))


async def test_inspection_of_a_cancelled_video_is_killed() -> None:
    bench = ArenaBench(MediaConfig(prepare_s=NEVER_S), HangingPreprocessor)
    file = MediaReference(data_url(b"any file", "video/mp4"), is_video=True)
    request = asyncio.ensure_future(bench.pipeline.prepare("\x02", [file]))
    await until(lambda: bool(children(bench.pictures.pid)))
    request.cancel()
    await until(lambda: not children(bench.pictures.pid))
    await until(lambda: not bench.pipeline.statistics().preparing_bytes)
    bench.close()


async def test_server_that_dies_is_replaced(bench: ArenaBench) -> None:
    assert await bench.values(data_url(image_bytes(value=1))) == [1.0]
    before = bench.pictures.pid
    os.kill(before, signal.SIGKILL)
    assert await bench.values(data_url(image_bytes(value=2))) == [2.0]
    assert bench.pictures.pid not in {0, before}


async def test_server_that_cannot_start_is_reported(
    bench: ArenaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.pictures._calls._forget()
    monkeypatch.setattr(bench.pictures._calls, "_command", ("/bin/false",))
    with pytest.raises(RequestFailed, match="could not be processed"):
        await bench.values(data_url(image_bytes()))
    await bench.all_back()


async def test_processes_end_with_their_server(bench: ArenaBench) -> None:
    """As after the engine's death, whatever they are doing."""
    task = asyncio.ensure_future(bench.values(HANGS))
    await until(lambda: bool(bench.pictures.pid and children(bench.pictures.pid)))
    server = bench.pictures.pid
    [child] = children(server)
    bench.pictures.close()
    async with patience():
        # The latter if the process was forked, but not handed over yet.
        with pytest.raises(RequestFailed, match="its process died|is stopping"):
            await task
    await until(lambda: not os.path.exists(f"/proc/{child}"))
    with pytest.raises(RequestFailed, match="is stopping"):
        await bench.values(data_url(image_bytes()))


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def test_text_alone_needs_no_image_server() -> None:
    """A server without encode ranks has an empty arena; without a recipe, threads process images."""
    arena = Arena.create(ArenaLayout(pixel_bytes=0, pages=0, page_rows=1, row_bytes=0))
    store = PixelStore(arena.pixels, arena.fd)
    pipeline = MediaPipeline(FaultyPreprocessor(), store, MediaConfig())
    assert pipeline._processes is None
    pipeline.close()
    arena.close()
