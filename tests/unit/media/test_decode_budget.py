"""Images take their memory from the budget before they are decoded, in order, and give it back once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.patience import until
from tests.unit.media.fakes import (
    FakePreprocessor,
    data_url,
    embedded,
    embedding_file,
    image_bytes,
    model_info,
)
from tests.unit.media.pipelines import Bench
from tests.workers.properties import thorough
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media.budget import ByteBudget, Grant
from vsched.media.decode import inspect
from vsched.media.estimate import preprocess_bytes
from vsched.media.fills import Fills
from vsched.media.items import MeasuredItem
from vsched.media.references import MediaReference

PROCESS = Fills._process
SMALL = (16, 8)
LARGE = (800, 200)
SLACK = 1000
"""Files of the same size in another colour differ by some bytes."""


def image_url(size: tuple[int, int] = SMALL, value: int = 0) -> str:
    return data_url(image_bytes(*size, value=value))


def work_bytes(size: tuple[int, int] = SMALL, value: int = 0) -> int:
    """Estimated bytes of an image."""
    preprocessor = FakePreprocessor()
    header = inspect(image_bytes(*size, value=value), 10**9)
    plan = preprocessor.plan_image(*size)
    return preprocess_bytes(*size, header.storage, plan)


def bench_with(decode_bytes: int, *, threads: int = 2, items: int = 512, **limits: Any) -> Bench:
    preprocessor = FakePreprocessor(model_info(item_tokens_max=10**4, context_tokens=10**6))
    settings = MediaConfig(
        decode_bytes=decode_bytes, threads=threads, preparing_max=10_000, **limits
    )
    return Bench(settings, preprocessor, items=items)


class Seam:
    """Wraps the work of the pipeline: counts the bytes of running work, and keeps the order."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, fills: Fills, image: Any, *arguments: Any) -> Any:
        with self._lock:
            self.order.append(image.work_bytes)
            self.running += image.work_bytes
            self.most = max(self.most, self.running)
        try:
            return PROCESS(fills, image, *arguments)
        finally:
            with self._lock:
                self.running -= image.work_bytes


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Seam:
    made = Seam()
    monkeypatch.setattr(Fills, "_process", lambda fills, *given: made(fills, *given))
    return made


def decoding(bench: Bench) -> tuple[int, int]:
    """Return the bytes taken, and the number of waiting images."""
    statistics = bench.pipeline.statistics().decode
    return statistics.bytes_used, statistics.waiting


async def test_images_are_served_in_order(seam: Seam) -> None:
    """A small image that would fit does not overtake a large one that waits."""
    small, large = work_bytes(), work_bytes(LARGE)
    assert 2 * small + 2 * SLACK < large
    async with bench_with(large + SLACK, items=1300) as bench:
        bench.preprocessor.gate.clear()
        tasks = []
        for index, size in enumerate([SMALL, LARGE, SMALL]):
            tasks.append(bench.start("\x01", [image_url(size, value=index)]))
            await until(lambda: len(bench.pipeline._fills._fills) == len(tasks))
        assert bench.pipeline.statistics().decode.waiting == 2
        assert len(seam.order) == 1
        bench.preprocessor.gate.set()
        await asyncio.gather(*tasks)
        assert [size > small + SLACK for size in seam.order] == [False, True, False]


async def test_request_of_many_images_needs_the_memory_of_one(seam: Seam) -> None:
    """Grants are per image: a request never holds a part while it waits for the rest."""
    async with bench_with(work_bytes() + SLACK) as bench:
        await bench.prepare("\x01" * 6, [image_url(value=value) for value in range(6)])
        assert seam.most <= work_bytes() + SLACK
        assert len(seam.order) == 6


async def test_image_over_the_whole_budget_is_refused_at_once() -> None:
    limit = work_bytes(LARGE) - 1
    async with bench_with(limit) as bench:
        other = await bench.stuck("\x01", [image_url()])
        with pytest.raises(RequestRefused) as caught:
            await bench.prepare("\x01\x01", [image_url(), image_url(LARGE)])
        assert caught.value.status == 413
        assert caught.value.message == (
            "image 1: the image takes too much memory to decode and process: "
            f"value up to {limit + 1} bytes, limit {limit} bytes. "
            "Remedy: send a smaller image or raise media.decode_bytes."
        )
        bench.preprocessor.gate.set()
        await other
        assert bench.preprocessor.processed == 1


async def test_embedding_takes_its_share(seam: Seam) -> None:
    async with bench_with(10**9, allow_embeddings=True) as bench:
        await bench.prepare("\x01", [embedded(embedding_file())])
        assert seam.order[0] > len(embedding_file())
    async with bench_with(1000, allow_embeddings=True) as bench:
        error = await bench.refusal("\x01", [embedded(embedding_file())])
        assert "limit 1000 bytes. Remedy: send a smaller" in error.message
        assert "media.decode_bytes" in error.message


async def give_up(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_releasing_while_beginning_does_not_nest() -> None:
    """A pool that is gone returns every grant at once, however many requests wait."""
    budget = ByteBudget(100)
    first = budget.ask(100, lambda _: None)
    for _ in range(5000):
        budget.ask(100, Grant.release)
    first.release()
    statistics = budget.statistics()
    assert (statistics.bytes_used, statistics.waiting) == (0, 0)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Returned bytes are free: no cycle keeps files and pixels until garbage is collected."""
    gc.collect()
    gc.disable()
    yield
    kinds = (MediaReference, MeasuredItem)
    kept = [one for one in gc.get_objects() if isinstance(one, kinds)]
    gc.enable()
    assert kept == []


@pytest.mark.usefixtures("uncollected")
async def test_cancelling_while_waiting_leaves_the_queue(seam: Seam) -> None:
    """The next one takes its place at once, though the first is still being processed."""
    small, size = work_bytes(), (300, 100)
    async with bench_with(2 * small + SLACK, items=2000) as bench:
        bench.preprocessor.gate.clear()
        first = bench.start("\x01", [image_url()])
        await until(lambda: len(seam.order) == 1)
        assert small + SLACK < work_bytes(size) <= 2 * small
        large = bench.start("\x01", [image_url(size)])
        await until(lambda: decoding(bench)[1] == 1)
        last = bench.start("\x01", [image_url(value=2)])
        await until(lambda: decoding(bench)[1] == 2)
        await give_up(large)
        assert decoding(bench) == (small + work_bytes(value=2), 0)
        bench.preprocessor.gate.set()
        await asyncio.gather(first, last)
        assert bench.preprocessor.processed == 2


async def test_cancelling_at_work_keeps_the_bytes_until_the_thread_is_done() -> None:
    async with bench_with(work_bytes() + SLACK) as bench:
        task = await bench.stuck("\x01", [image_url()])
        waiting = bench.start("\x01", [image_url(value=1)])
        await until(lambda: decoding(bench)[1] == 1)
        await give_up(task)
        assert decoding(bench) == (work_bytes(), 1)
        bench.preprocessor.gate.set()
        await waiting


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("content", [b"GIF89a", image_bytes(*SMALL)[:-40], image_bytes(*SMALL)])
async def test_prepared_or_refused_image_is_not_kept(content: bytes) -> None:
    async with bench_with(10**9) as bench:
        with contextlib.suppress(RequestRefused):
            await bench.prepare("\x01", [data_url(content)])


async def test_failing_image_is_not_kept_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returned bytes are free: no traceback keeps half-processed pixels alive."""
    seen: list[weakref.ref[Image.Image]] = []

    def refuse(image: Image.Image) -> npt.NDArray[np.float32]:
        seen.append(weakref.ref(image))
        try:
            raise OSError
        except OSError:
            raise RequestRefused("the image is odd", code="odd") from None

    async with bench_with(10**9) as bench:
        monkeypatch.setattr(bench.preprocessor, "process_image", refuse)
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(RequestRefused, match="is odd") as caught:
                await bench.prepare("\x01", [image_url()])
            await bench.all_back()
            assert seen[0]() is None, caught
        finally:
            gc.enable()


async def test_closing_fails_requests_that_wait_for_memory() -> None:
    """After the pool is closed, no request waits for it or keeps its bytes."""
    async with bench_with(work_bytes() + SLACK) as bench:
        bench.preprocessor.gate.clear()
        tasks = []
        for value in range(3):
            tasks.append(bench.start("\x01", [image_url(value=value)]))
            await until(lambda: len(bench.pipeline._fills._fills) == len(tasks))
        stop = asyncio.ensure_future(asyncio.to_thread(bench.pipeline.close))
        await until(lambda: bench.pipeline._executor._shutdown)  # type: ignore[attr-defined]
        bench.preprocessor.gate.set()
        first, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert [str(other) for other in others] == ["the server is stopping"] * 2
        await stop


@pytest.mark.parametrize("seed", [0, 1, *thorough(*range(2, 6))])
async def test_any_schedule_keeps_to_the_budget_and_gives_it_back(seed: int, seam: Seam) -> None:
    """Random arrivals, sizes, sharing, failures, cancellations and deadlines."""
    draw = random.Random(seed)
    sizes = [(16, 8), (200, 60), (300, 200), (640, 400)]
    budget = work_bytes(sizes[-1], 9) * draw.choice([2, 3, 5]) // 2
    threads, prepare_s = draw.randint(1, 4), draw.choice([0.005, 10.0])
    truncated = data_url(image_bytes(64, 64, kind="JPEG")[:-200], "image/jpeg")
    async with bench_with(budget, threads=threads, items=6000, prepare_s=prepare_s) as bench:
        urls = [image_url(draw.choice(sizes), value) for value in range(12)] + [truncated]
        tasks = []
        for _ in range(30):
            images = draw.sample(urls, draw.randint(1, 4))
            request = bench.prepare("a\x01" * len(images), images)
            tasks.append(asyncio.ensure_future(request))
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
            if draw.random() < 0.1:
                bench.pipeline.clear()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, RequestRefused | asyncio.CancelledError)
        await bench.all_back()
        assert seam.most <= budget
