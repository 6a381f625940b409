"""Images take their memory from the budget before they are decoded, in order, and give it back once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
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
from tests.unit.media.test_pipeline import Bench
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media.decode import inspect
from vsched.media.estimate import preprocess_bytes
from vsched.media.fills import Fills

PROCESS = Fills._process
SMALL = (16, 8)
LARGE = (1000, 8)
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
    return Bench(preprocessor, settings, items)


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


@contextlib.contextmanager
def closing(bench: Bench) -> Iterator[Bench]:
    try:
        yield bench
    finally:
        bench.preprocessor.gate.set()
        bench.pipeline.close()


def decoding(bench: Bench) -> tuple[int, int]:
    """Return the bytes taken, and the number of waiting images."""
    statistics = bench.pipeline.statistics().decode
    return statistics.bytes_used, statistics.waiting


def truncated() -> str:
    content = image_bytes(64, 64, kind="JPEG")
    return data_url(content[: len(content) - 200], "image/jpeg")


async def all_back(bench: Bench) -> None:
    """Wait for threads, then assert that nothing is held, counted or queued."""
    await until(lambda: not bench.pipeline._fills._fills)
    await until(lambda: bench.pipeline.statistics().preparing_bytes == 0)
    statistics = bench.pipeline.statistics()
    assert decoding(bench) == (0, 0)
    assert (statistics.preparing, statistics.preparing_bytes) == (0, 0)
    assert (statistics.pixels.bytes_held, statistics.pixels.waiting) == (0, 0)


async def test_images_are_served_in_order(seam: Seam) -> None:
    """A small image that would fit does not overtake a large one that waits."""
    small, large = work_bytes(), work_bytes(LARGE)
    assert small + 2 * SLACK < large
    with closing(bench_with(large + SLACK, items=300)) as bench:
        bench.preprocessor.gate.clear()
        tasks = []
        for index, size in enumerate([SMALL, LARGE, SMALL]):
            url = image_url(size, value=index)
            tasks.append(asyncio.ensure_future(bench.pipeline.prepare("\x01", [url])))
            await until(lambda: len(bench.pipeline._fills._fills) == len(tasks))
        assert bench.pipeline.statistics().decode.waiting == 2
        assert len(seam.order) == 1
        bench.preprocessor.gate.set()
        for prepared in await asyncio.gather(*tasks):
            prepared.lease.release()
        assert [size > small + SLACK for size in seam.order] == [False, True, False]
        await all_back(bench)


async def test_request_of_many_images_needs_the_memory_of_one(seam: Seam) -> None:
    """Grants are per image: a request never holds a part while it waits for the rest."""
    with closing(bench_with(work_bytes() + SLACK)) as bench:
        images = [image_url(value=value) for value in range(6)]
        (await bench.pipeline.prepare("\x01" * 6, images)).lease.release()
        assert seam.most <= work_bytes() + SLACK
        assert len(seam.order) == 6
        await all_back(bench)


@pytest.mark.parametrize("held_up", [False, True])
async def test_image_over_the_whole_budget_is_refused_at_once(*, held_up: bool) -> None:
    limit = work_bytes(LARGE) - 1
    with closing(bench_with(limit)) as bench:
        tasks = []
        if held_up:
            bench.preprocessor.gate.clear()
            tasks = [asyncio.ensure_future(bench.pipeline.prepare("\x01", [image_url()]))]
            await until(bench.preprocessor.entered.is_set)
        with pytest.raises(RequestRefused) as caught:
            await bench.pipeline.prepare("\x01\x01", [image_url(), image_url(LARGE)])
        assert caught.value.status == 413
        assert caught.value.message == (
            "image 1: the image takes too much memory to decode and process: "
            f"value up to {limit + 1} bytes, limit {limit} bytes. "
            "Remedy: send a smaller image or raise media.decode_bytes."
        )
        bench.preprocessor.gate.set()
        for prepared in await asyncio.gather(*tasks):
            prepared.lease.release()
        assert bench.preprocessor.processed == len(tasks)
        await all_back(bench)


async def test_embedding_takes_its_share(seam: Seam) -> None:
    with closing(bench_with(10**9, allow_embeddings=True)) as bench:
        prepared = await bench.pipeline.prepare("\x01", [embedded(embedding_file())])
        assert seam.order[0] > len(embedding_file())
        prepared.lease.release()
        await all_back(bench)
    with (
        closing(bench_with(1000, allow_embeddings=True)) as bench,
        pytest.raises(RequestRefused, match=r"limit 1000 bytes.*media\.decode_bytes"),
    ):
        await bench.pipeline.prepare("\x01", [embedded(embedding_file())])


async def give_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_while_waiting_leaves_the_queue(seam: Seam) -> None:
    """The next one takes its place at once, though the first is still being processed."""
    small, size = work_bytes(), (300, 100)
    with closing(bench_with(2 * small + SLACK, items=2000)) as bench:
        bench.preprocessor.gate.clear()
        first = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image_url()]))
        await until(lambda: len(seam.order) == 1)
        assert small + SLACK < work_bytes(size) <= 2 * small
        large = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image_url(size)]))
        await until(lambda: decoding(bench)[1] == 1)
        last = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image_url(value=2)]))
        await until(lambda: decoding(bench)[1] == 2)
        await give_up(large)
        assert decoding(bench) == (small + work_bytes(value=2), 0)
        bench.preprocessor.gate.set()
        for prepared in await asyncio.gather(first, last):
            prepared.lease.release()
        assert bench.preprocessor.processed == 2
        await all_back(bench)


async def test_cancelling_at_work_keeps_the_bytes_until_the_thread_is_done() -> None:
    with closing(bench_with(work_bytes() + SLACK)) as bench:
        bench.preprocessor.gate.clear()
        task = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image_url()]))
        await until(bench.preprocessor.entered.is_set)
        waiting = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image_url(value=1)]))
        await until(lambda: decoding(bench)[1] == 1)
        await give_up(task)
        assert decoding(bench) == (work_bytes(), 1)
        bench.preprocessor.gate.set()
        (await waiting).lease.release()
        await all_back(bench)


def fails_in_processing(bench: Bench) -> None:
    bench.preprocessor.error = OSError("out of luck")


def gives_the_wrong_shape(bench: Bench) -> None:
    bench.preprocessor.rows_missing = 1


@pytest.mark.parametrize("break_it", [None, fails_in_processing, gives_the_wrong_shape])
async def test_failing_image_gives_its_bytes_back(
    break_it: Callable[[Bench], None] | None,
) -> None:
    with closing(bench_with(work_bytes(SMALL) * 2)) as bench:
        if break_it is not None:
            break_it(bench)
        url = image_url() if break_it else truncated()
        for _ in range(3):
            with pytest.raises(Exception, match="image"):
                await bench.pipeline.prepare("\x01", [url])
            await all_back(bench)


async def test_failing_image_is_not_kept_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returned bytes are free: no traceback keeps half-processed pixels alive."""
    seen: list[weakref.ref[Image.Image]] = []

    def refuse(image: Image.Image) -> npt.NDArray[np.float32]:
        seen.append(weakref.ref(image))
        try:
            raise OSError
        except OSError:
            raise RequestRefused("the image is odd", code="odd") from None

    with closing(bench_with(10**9)) as bench:
        monkeypatch.setattr(bench.preprocessor, "process_image", refuse)
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(RequestRefused, match="is odd") as caught:
                await bench.pipeline.prepare("\x01", [image_url()])
            await all_back(bench)
            assert seen[0]() is None, caught
        finally:
            gc.enable()


async def test_closing_fails_what_waits_for_memory() -> None:
    """After the pool is closed, no request waits for it or keeps its bytes."""
    with closing(bench_with(work_bytes() + SLACK)) as bench:
        bench.preprocessor.gate.clear()
        tasks = []
        for value in range(3):
            url = image_url(value=value)
            tasks.append(asyncio.ensure_future(bench.pipeline.prepare("\x01", [url])))
            await until(lambda: len(bench.pipeline._fills._fills) == len(tasks))
        stop = asyncio.ensure_future(asyncio.to_thread(bench.pipeline.close))
        await until(lambda: bench.pipeline._executor._shutdown)  # type: ignore[attr-defined]
        bench.preprocessor.gate.set()
        first, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert not isinstance(first, BaseException)
        first.lease.release()
        assert [str(other) for other in others] == ["the server is stopping"] * 2
        await stop
        await all_back(bench)


@pytest.mark.parametrize("seed", range(6))
async def test_any_schedule_keeps_to_the_budget_and_gives_it_back(seed: int, seam: Seam) -> None:
    """Random arrivals, sizes, sharing, failures, cancellations and deadlines."""
    draw = random.Random(seed)
    sizes = [(16, 8), (200, 60), (300, 200), (640, 400)]
    budget = work_bytes(sizes[-1], 9) * draw.choice([2, 3, 5]) // 2
    threads, prepare_s = draw.randint(1, 4), draw.choice([0.005, 10.0])
    bench = bench_with(budget, threads=threads, items=6000, prepare_s=prepare_s)
    with closing(bench):
        urls = [image_url(draw.choice(sizes), value) for value in range(12)] + [truncated()]

        async def request() -> None:
            images = draw.sample(urls, draw.randint(1, 4))
            prepared = await bench.pipeline.prepare("a\x01" * len(images), images)
            try:
                await asyncio.sleep(0)
            finally:
                prepared.lease.release()

        tasks = []
        for _ in range(30):
            tasks.append(asyncio.ensure_future(request()))
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
            if draw.random() < 0.1:
                bench.pipeline.clear()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, RequestRefused | asyncio.CancelledError)
        await all_back(bench)
        assert seam.most <= budget
