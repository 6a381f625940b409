"""Every image returns its bytes to the budget, once, and not before they are free."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.patience import until
from tests.unit.media.test_decode_budget import (
    SLACK,
    SMALL,
    all_back,
    bench_with,
    closing,
    decoding,
    give_up,
    image_url,
    truncated,
    work_bytes,
)
from tests.unit.media.test_pipeline import Bench
from vsched.errors import RequestRefused


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


async def test_deadline_while_waiting_gives_everything_back() -> None:
    """Both requests get a 503; the image being processed is not interrupted."""
    with closing(bench_with(work_bytes() + SLACK, prepare_s=0.02)) as bench:
        bench.preprocessor.gate.clear()
        urls = [image_url(), image_url(value=1)]
        results = await asyncio.gather(
            *(bench.pipeline.prepare("\x01", [url]) for url in urls), return_exceptions=True
        )
        for result in results:
            assert isinstance(result, RequestRefused)
            assert (result.code, result.status) == ("prepare_timeout", 503)
        used, waiting = decoding(bench)
        assert (used > 0, waiting) == (True, 0)
        bench.preprocessor.gate.set()
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
