"""Simulated threads and network of the media pipeline: the work runs on the loop after its virtual duration."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, ParamSpec, TypeVar

from vsched.config import MediaConfig
from vsched.engine import MakeMedia
from vsched.errors import RequestRefused
from vsched.media import MediaPipeline, PixelStore
from vsched.media.fetch import Reserve
from vsched.media.formats import IMAGE, MediaKind
from vsched.media.pruning import Pruning
from vsched.media.sources import ReadRemote
from vsched.sim.faults import DecodeError, FetchStall
from vsched.sim.workload.images import encoded, image_at
from vsched.sim.world import World
from vsched.worker.contract import Preprocessor

P = ParamSpec("P")
T = TypeVar("T")


class _Work(NamedTuple):
    outcome: Future[Any]
    call: Callable[[], Any]


class SimulatedThreads(Executor):
    """A simulated thread pool: at most `threads` calls at a time, each executed at the end of its virtual duration."""

    def __init__(self, world: World, threads: int) -> None:
        self._loop = world.loop
        self._process_ns = world.delays.process_ns
        self._rng = world.generator("media")
        self._idle = threads
        self._waiting: deque[_Work] = deque()
        self._running: dict[int, _Work] = {}
        self._started = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call on the next free thread."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        outcome: Future[T] = Future()
        self._waiting.append(_Work(outcome, lambda: fn(*args, **kwargs)))
        self._start_calls()
        return outcome

    def _start_calls(self) -> None:
        while self._idle and self._waiting:
            work = self._waiting.popleft()
            if work.outcome.set_running_or_notify_cancel():
                self._idle -= 1
                self._started += 1
                self._running[self._started] = work
                duration_ns = int(self._process_ns * (0.5 + self._rng.random()))
                due_ns = self._loop.now_ns() + duration_ns
                self._loop.call_at_ns(due_ns, self._finish_call, self._started)

    def _finish_call(self, number: int) -> None:
        work = self._running.pop(number, None)
        if work is not None:
            self._idle += 1
            _call(work)
            self._start_calls()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; with `wait`, finish the running ones now."""
        self._closed = True
        if cancel_futures:
            while self._waiting:
                self._waiting.popleft().outcome.cancel()
        while wait and self._running:
            _call(self._running.pop(min(self._running)))


def _call(work: _Work) -> None:
    try:
        result = work.call()
    except BaseException as error:  # noqa: BLE001 - as threads do
        work.outcome.set_exception(error)
    else:
        work.outcome.set_result(result)


def _fetch(world: World) -> ReadRemote:
    """Return a simulated fetcher for the images that `remote_url` names."""

    async def fetch(
        reference: str, settings: MediaConfig, reserve: Reserve, kind: MediaKind
    ) -> bytes:
        assert kind is IMAGE, "simulated videos are sent as frames"
        try:
            async with asyncio.timeout(settings.fetch_s):
                await asyncio.sleep(world.delays.fetch_ns / 1e9)
                stall = world.injector.take_fault(FetchStall)
                if stall is not None:
                    await asyncio.sleep(stall.duration_ns / 1e9)
        except TimeoutError:
            message = "the image could not be fetched in time"
            raise RequestRefused(message, code="image_fetch_failed") from None
        content = encoded(image_at(reference))
        reserve(len(content))
        return content

    return fetch


def media_of(world: World) -> MakeMedia:
    """Return a factory of the production media pipeline, on simulated threads and a simulated network."""

    def damaged(_: DecodeError) -> RequestRefused:
        return RequestRefused("injected: the image cannot be decoded", code="image_invalid")

    world.injector.raise_at("media.decode", DecodeError, damaged)

    def make(
        preprocessor: Preprocessor,
        store: PixelStore,
        settings: MediaConfig,
        pruning: Pruning | None,
    ) -> MediaPipeline:
        del pruning  # simulated models do not support it
        return MediaPipeline(
            preprocessor,
            store,
            settings,
            executor=SimulatedThreads(world, settings.threads),
            read_remote=_fetch(world),
        )

    return make
