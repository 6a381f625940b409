"""Requests in preparation are accepted requests: counted, waited for, and ended like all others."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import patience
from tests.unit.aio.ranks import ShellHarness, Text
from vsched.aio.arrivals import PendingArrivals
from vsched.aio.streams import Generation
from vsched.engine import Engine
from vsched.errors import RequestFailed
from vsched.kernel.events import Cleared, Event
from vsched.types import SamplingParams


class SlowMedia:
    """Prepares prompts when a test allows it, and counts prompts given out and returned."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.leases = 0
        self.started: asyncio.Queue[None] = asyncio.Queue()

    async def prepare(self, prompt: list[int], images: object, cache_salt: str = "") -> Any:
        del images, cache_salt
        self.started.put_nowait(None)
        await self.ready.wait()
        self.leases += 1
        return SimpleNamespace(token_ids=prompt, items=(), lease=self)

    def release(self) -> None:
        self.leases -= 1

    def clear(self) -> None:
        pass


def engine_with(played: ShellHarness, media: SlowMedia) -> Engine:
    engine = played.engine()
    assert engine._running is not None
    engine._running = dataclasses.replace(engine._running, media=cast("Any", media))
    engine.info = cast("Any", SimpleNamespace(vocab_size=1000, stop_token_ids=()))
    engine.preprocessor = cast("Any", SimpleNamespace(detokenizer=lambda **_: Text()))
    return engine


async def begin(engine: Engine, media: SlowMedia, count: int) -> list[asyncio.Task[Generation]]:
    """Start requests, and return once all of them are being prepared."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    tasks = [
        asyncio.create_task(
            engine.generate(prompt=[1, 2, 3], sampling=sampling, request_id=f"r{number}")
        )
        for number in range(count)
    ]
    async with patience():
        for _ in tasks:
            await media.started.get()
    return tasks


async def errors_of(tasks: list[asyncio.Task[Generation]]) -> list[tuple[str, int, int | None]]:
    """Errors of the requests: all of them failed."""
    async with patience():
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, RequestFailed) for one in outcomes), outcomes
    return [(one.code, one.status, one.retry_after_s) for one in cast("Any", outcomes)]


async def test_requests_in_preparation_wait(played: ShellHarness) -> None:
    """Statistics count them, with their state."""
    media = SlowMedia()
    engine = engine_with(played, media)
    tasks = await begin(engine, media, 6)
    now = played.shell.statistics()
    assert (now["running"], now["waiting"]) == (0, 6)
    assert [one["request_id"] for one in now["live"]] == [f"r{number}" for number in range(6)]
    assert "its prompt and images are being prepared" in engine.explain("r3")
    assert engine.explain("another") == ""
    media.ready.set()
    await asyncio.gather(*tasks)
    now = played.shell.statistics()
    assert now["running"] + now["waiting"] == 6
    assert "prepared" not in engine.explain("r3")


@pytest.mark.parametrize("is_ready", [False, True], ids=["at work", "just ready"])
async def test_clear_interrupts_requests_in_preparation(
    played: ShellHarness, *, is_ready: bool
) -> None:
    """Like a request waiting in the kernel, even if its preparation has just ended."""
    media = SlowMedia()
    engine = engine_with(played, media)
    tasks = await begin(engine, media, 6)
    if is_ready:
        media.ready.set()
    assert await engine.clear() == {"running": 0, "waiting": 0}
    assert await errors_of(tasks) == [("cleared", 503, 5)] * 6
    assert media.leases == 0
    media.ready.set()
    (again,) = await begin(engine, media, 1)
    assert (await again).request_id == "r0"


async def test_stop_ends_requests_in_preparation_with_a_reply(played: ShellHarness) -> None:
    media = SlowMedia()
    engine = engine_with(played, media)
    tasks = await begin(engine, media, 3)
    await played.shell.stop()
    assert await errors_of(tasks) == [("stopping", 503, 5)] * 3


async def test_a_scheduler_that_fails_ends_requests_in_preparation(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = SlowMedia()
    engine = engine_with(played, media)
    tasks = await begin(engine, media, 3)

    def fail(event: Event, now_ns: int) -> Any:
        raise AssertionError((event, now_ns))

    monkeypatch.setattr(played.shell._kernel, "handle", fail)
    played.shell.handle(Cleared())
    assert await errors_of(tasks) == [("given_up", 503, 5)] * 3


async def test_drain_serves_requests_in_preparation(played: ShellHarness) -> None:
    """They were accepted: a drain refuses only later requests, and ends once all of these have."""
    media = SlowMedia()
    engine = engine_with(played, media)
    tasks = await begin(engine, media, 2)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    assert engine.state == "draining"
    assert not draining.done()
    media.ready.set()
    streams = [await task for task in tasks]
    assert not draining.done()
    async with patience():
        while not draining.done():
            played.ranks.run(1)
            await asyncio.sleep(0)
    assert [stream.output_tokens for stream in streams] == [3, 3]


async def test_a_client_that_leaves_as_all_are_interrupted_is_gone() -> None:
    """An interruption at the same time does not swallow the task's own cancellation."""
    arrivals = PendingArrivals()

    async def prepare() -> None:
        with arrivals.begin("r"):
            await asyncio.Event().wait()

    task = asyncio.create_task(prepare())
    await asyncio.sleep(0)
    arrivals.interrupt(RequestFailed("cleared", code="cleared", status=503))
    assert len(arrivals) == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await arrivals.wait_idle()


async def test_an_interrupted_caller_can_go_on() -> None:
    """Only the preparation was interrupted, not the task that asked for it."""
    arrivals = PendingArrivals()

    async def caller() -> int:
        with pytest.raises(RequestFailed), arrivals.begin("r"):
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)
        return task.cancelling()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    arrivals.interrupt(RequestFailed("cleared", code="cleared", status=503))
    assert await task == 0
