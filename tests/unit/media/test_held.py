"""Encoded bytes that requests in preparation hold."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.media.fakes import FakePreprocessor, data_url, image_bytes
from tests.unit.media.test_fetch import server
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import MediaPipeline, PixelStore
from vsched.media.held import HeldBytes


def test_held_bytes_of_several_requests_are_limited() -> None:
    held = HeldBytes(100)
    first, second = held.open(), held.open()
    first.add(60)
    with pytest.raises(RequestRefused, match="value 101 bytes, limit 100 bytes") as caught:
        second.add(41)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    second.add(40)
    assert held.total == 100
    second.drop()
    assert held.total == 60
    first.add(80)
    assert held.total == 140, "a lone request has its own limits"


def pipeline_with(settings: MediaConfig) -> tuple[MediaPipeline, FakePreprocessor]:
    preprocessor = FakePreprocessor()
    store = PixelStore(memoryview(bytearray(1 << 20)))
    return MediaPipeline(preprocessor, store, settings), preprocessor


async def held_while_processing(settings: MediaConfig, image: str) -> int:
    pipeline, preprocessor = pipeline_with(settings)
    preprocessor.gate.clear()
    task = asyncio.ensure_future(pipeline.prepare("\x01", [image]))
    assert await asyncio.to_thread(preprocessor.entered.wait, PATIENCE_S)
    held = pipeline.statistics().preparing_bytes
    preprocessor.gate.set()
    (await task).lease.release()
    assert pipeline.statistics().preparing_bytes == 0
    pipeline.close()
    return held


async def test_data_url_counts_as_sent_and_as_read() -> None:
    url = data_url(image_bytes())
    held = await held_while_processing(MediaConfig(), url)
    assert len(url) + len(image_bytes()) <= held <= 1.75 * len(url)


async def test_file_counts_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(image_bytes())
    url = f"file://{path}"
    held = await held_while_processing(MediaConfig(directory=str(tmp_path)), url)
    assert held == len(url) + len(image_bytes())


async def test_fetched_image_counts_its_bytes() -> None:
    content = image_bytes()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    async with server(head, content[:20], content[20:]) as (host, _):
        settings = MediaConfig(hosts=(host,), private_hosts=(host,))
        held = await held_while_processing(settings, url := f"http://{host}/a.png")
    assert held == len(url) + len(content)


async def test_fetch_stops_where_the_bytes_end() -> None:
    """Streamed bytes are counted as they arrive: the body here never ends by itself."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    async with server(head, bytes(5000), pause=True) as (host, _):
        settings = MediaConfig(
            hosts=(host,), private_hosts=(host,), preparing_bytes_max=4000, fetch_s=5
        )
        pipeline, preprocessor = pipeline_with(settings)
        preprocessor.gate.clear()
        other = asyncio.ensure_future(pipeline.prepare("\x01", [data_url(image_bytes())]))
        assert await asyncio.to_thread(preprocessor.entered.wait, PATIENCE_S)
        before = pipeline.statistics().preparing_bytes
        with pytest.raises(RequestRefused, match="hold too many bytes.*limit 4000 bytes"):
            await pipeline.prepare("\x01", [f"http://{host}/a.png"])
        assert pipeline.statistics().preparing_bytes == before
        preprocessor.gate.set()
        (await other).lease.release()
    pipeline.close()


async def test_cancelled_read_holds_its_bytes_until_the_thread_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline, _ = pipeline_with(MediaConfig())
    entered, gate = threading.Event(), threading.Event()

    def read(*_: object) -> bytes:
        entered.set()
        assert gate.wait(PATIENCE_S)
        return image_bytes()

    monkeypatch.setattr("vsched.media.measure.read_local", read)
    task = asyncio.ensure_future(pipeline.prepare("\x01", [data_url(image_bytes())]))
    assert await asyncio.to_thread(entered.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pipeline.statistics().preparing == 0
    assert pipeline.statistics().preparing_bytes > 0
    gate.set()
    await asyncio.to_thread(pipeline.close)
    assert pipeline.statistics().preparing_bytes == 0
