"""Large images are processed in separate processes, whose failures only affect their own request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import Mock

import numpy as np
import pytest

from tests.patience import NEVER_S, patience, until
from tests.unit.media.fakes import (
    VIDEO_PLACEHOLDER,
    FaultyPreprocessor,
    HangingPreprocessor,
    data_url,
    image_bytes,
    model_info,
)
from tests.unit.media.pipelines import Bench
from vsched.config import MediaConfig
from vsched.errors import RequestFailed, RequestRefused
from vsched.media import MediaReference, PixelStore
from vsched.media.pictures import filling, processes
from vsched.media.pictures.processes import LARGE_BYTES
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout

DIES = data_url(image_bytes(value=FaultyPreprocessor.DIES))
HANGS = data_url(image_bytes(value=FaultyPreprocessor.HANGS))


class ArenaBench(Bench):
    """A pipeline whose store is an arena, so that large images get processes."""

    def __init__(
        self, prepare_s: float, preprocessor: type[FaultyPreprocessor] = FaultyPreprocessor
    ) -> None:
        layout = ArenaLayout(pixel_bytes=1 << 20, pages=0, page_rows=1, row_bytes=1)
        self.arena = Arena.create(layout)
        info = model_info(video_token_id=VIDEO_PLACEHOLDER)
        store = PixelStore(self.arena.pixels, self.arena.fd)
        super().__init__(MediaConfig(prepare_s=prepare_s), preprocessor(info), store=store)
        assert self.pipeline._processes is not None
        self.pictures = self.pipeline._processes

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self.arena.close()

    async def values(self, *urls: str) -> list[float]:
        """Prepare one request, and return the value that fills the pixels of each image."""
        prepared = await self.prepare("\x01" + "a\x01" * (len(urls) - 1), urls)
        found = []
        for item in prepared.items:
            (value,) = set(self.pixels(item).view(np.float32).tolist())
            found.append(value)
        return found


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each image a process of its own, as for large ones."""
    monkeypatch.setattr(processes, "LARGE_BYTES", 0)


@pytest.fixture
async def bench(all_large: None) -> AsyncIterator[ArenaBench]:
    async with ArenaBench(30.0) as bench:
        yield bench


async def test_large_images_run_outside(bench: ArenaBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process writes to the arena, where an extent may begin within a page."""
    fails = Mock(side_effect=AssertionError("decoded in the engine"))
    monkeypatch.setattr(filling, "decode", fails)
    urls = [data_url(image_bytes(8 * n, 40, value=n)) for n in range(1, 12)]
    assert await bench.values(*urls) == [float(n) for n in range(1, 12)]
    assert bench.pipeline.statistics().processed == 11


async def test_small_ones_share_process(bench: ArenaBench, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_headers_that_native_code_parses_are_read_in_a_process(
    bench: ArenaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Mock(side_effect=AssertionError("opened in the engine"))
    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile._open", fails)
    kinds = ["PNG", "JPEG", "WEBP", "BMP", "GIF"]
    urls = [data_url(image_bytes(kind=kind), f"image/{kind.lower()}") for kind in kinds]
    assert len(await bench.values(*urls)) == len(kinds)
    with pytest.raises(RequestRefused, match="image 0: the image cannot be decoded"):
        await bench.values(data_url(b"RIFF" + bytes(60), "image/webp"))


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


@pytest.mark.usefixtures("all_large")
async def test_process_that_hangs_is_killed() -> None:
    """The request fails in time, and its space and bytes return, which a thread would hold for ever."""
    async with ArenaBench(0.2) as hasty:
        with pytest.raises(RequestRefused, match=r"media\.prepare_s") as caught:
            await hasty.values(HANGS)
        assert caught.value.code == "prepare_timeout"
        await hasty.all_back()


async def test_closing_does_not_wait_for_a_process_that_hangs() -> None:
    """A second Ctrl-C stops a server at once."""
    async with ArenaBench(NEVER_S) as bench:
        request = bench.start("\x01", [HANGS])
        await until(lambda: bool(children(bench.pictures.pid)))
        async with patience():
            await asyncio.to_thread(bench.pipeline.close)
        with pytest.raises(RequestFailed, match="stopping"):
            await request


@pytest.mark.parametrize(
    ("source", "preprocessor"),
    [
        ((data_url(image_bytes()), HANGS), FaultyPreprocessor),
        (data_url(b"any file", "video/mp4"), HangingPreprocessor),
    ],
)
async def test_process_of_a_cancelled_video_is_killed(
    source: str | tuple[str, ...], preprocessor: type[FaultyPreprocessor]
) -> None:
    """At once, not at its deadline, while it decodes and while it inspects; a later request starts a new one."""
    video = MediaReference(source, is_video=True)
    async with ArenaBench(NEVER_S, preprocessor) as bench:
        first = bench.start("\x02", [video])
        await until(lambda: bool(children(bench.pictures.pid)))
        [child] = children(bench.pictures.pid)
        first.cancel()
        second = bench.start("\x02", [video])
        await until(lambda: children(bench.pictures.pid) not in ([], [child]))
        second.cancel()
        await bench.all_back()
        await until(lambda: not children(bench.pictures.pid))


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


async def test_text_alone_needs_no_image_server() -> None:
    """A server without encode ranks has an empty arena; without a recipe, threads process images."""
    arena = Arena.create(ArenaLayout(pixel_bytes=0, pages=0, page_rows=1, row_bytes=0))
    store = PixelStore(arena.pixels, arena.fd)
    async with Bench(preprocessor=FaultyPreprocessor(), store=store) as bench:
        assert bench.pipeline._processes is None
    arena.close()
