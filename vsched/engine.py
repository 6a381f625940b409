"""The engine: a checkpoint and a configuration in, generations out.

It owns the arena, the media pipeline and the replicas, and is all that the HTTP layer and the command line know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import msgspec
import zmq

from vsched.aio.bounds import check_numbers
from vsched.aio.crew import STOP_GRACE_S, Crew, CrewEvents
from vsched.aio.replica import Replica
from vsched.aio.sizing import Sizing
from vsched.aio.stream import Generation
from vsched.aio.timeline import Timeline, timeline_of
from vsched.assembly import (
    arena_layout,
    context_tokens,
    kernel_policies,
    kernel_sizes,
    kv_sizing,
    leader_deadlines,
    media_settings,
    memory_in_use,
    rank_specs,
)
from vsched.config import Config, resolve_policies
from vsched.errors import RequestRefused, limit_message
from vsched.media import ImageReference
from vsched.media.pipeline import MediaPipeline, Prepared
from vsched.media.pixels import PixelStore
from vsched.memory import Ledger
from vsched.plugins import load_worker
from vsched.policy import ReplicaView, RoutingView
from vsched.transport.arena import Arena
from vsched.transport.zmq_link import make_socket_folder
from vsched.types import ModelInfo, Request, SamplingParams
from vsched.worker.contract import Preprocessor
from vsched.worker.slots import STOP_TOKENS_MAX

logger = logging.getLogger(__name__)
RECENT_MAX = 64
Progress = Callable[[str, str, float], None]
"""Called while loading: the group, what it does, and the fraction done."""


class Engine:
    """Serves one checkpoint.

    Use it as `async with Engine(config) as engine:`, or call `start` and `stop`.
    """

    def __init__(self, config: Config, *, on_progress: Progress | None = None) -> None:
        self.config = config
        self._policies = resolve_policies(config)
        self._on_progress = on_progress or (lambda _group, _what, _fraction: None)
        self._state = "loading"
        self._recent: deque[Timeline] = deque(maxlen=RECENT_MAX)
        self._routed = 0
        self._replicas: list[Replica] = []
        self._media: MediaPipeline | None = None
        self._arena: Arena | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sizing: Sizing | None = None
        self._run_dir = ""
        self._started_s = time.monotonic()
        self.info: ModelInfo
        self.preprocessor: Preprocessor

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load everything; ranks and preprocessor in parallel.

        Blocks: up to `deadlines.ready_s`.

        Raises:
            CheckpointError, ConfigError, DeviceOutOfMemory, GroupLost: When it cannot serve; nothing is left behind.
        """
        config = self.config
        plugin = load_worker(config.generate.plugin, path="generate.plugin")
        try:
            info = plugin.inspect(
                config.model.path,
                dtype=config.model.dtype,
                item_tokens_max=self._policies.item_tokens_max or 0,
            )
            # What is configured is what everybody is told and checks against.
            limit = context_tokens(config, info)
            self.info = msgspec.structs.replace(info, context_tokens=limit)
            await self._start_parts(plugin.load_preprocessor)
        except BaseException:
            await self.stop()
            raise
        self._state = "ready"

    async def _start_parts(self, load_preprocessor: Callable[[ModelInfo], Preprocessor]) -> None:
        layout = arena_layout(self.config, self.info)
        self._arena = Arena.create(layout)
        self._run_dir = make_socket_folder()
        self._context = zmq.Context()
        replica = Replica(
            self._crews,
            size=lambda blocks: kernel_sizes(self.config, self.info, self._policies, blocks=blocks),
            policies=kernel_policies(self._policies),
            on_progress=self._on_progress,
        )
        self._replicas = [replica]
        loading = asyncio.get_running_loop().run_in_executor(None, load_preprocessor, self.info)
        outcomes = await asyncio.gather(replica.start(), loading, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        self.preprocessor = outcomes[1]  # type: ignore[assignment]
        self._media = MediaPipeline(
            self.preprocessor, PixelStore(self._arena.pixels), media_settings(self.config)
        )

    async def drain(self) -> None:
        """Accept nothing more, and wait for the live requests.

        Blocks: up to `deadlines.drain_s`.
        """
        self._state = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.deadlines.drain_s):
                await asyncio.gather(*(replica.wait_idle() for replica in self._replicas))

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End every request, stop every rank and give everything back; may be called twice.

        Blocks: at most the grace, after which ranks are killed, and what threads are busy with.
        """
        self._state = "stopped"
        replicas, self._replicas = self._replicas, []
        try:
            await asyncio.gather(*(replica.stop(grace_s=grace_s) for replica in replicas))
        finally:
            await self._give_back()

    async def _give_back(self) -> None:
        """Give back threads, sockets and memory; every rank has ended."""
        if self._media is not None:
            # It waits for the images being processed: in a thread, so that the loop goes on.
            await asyncio.to_thread(self._media.close)
            self._media = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = ""

    # --- requests ---

    async def generate(
        self,
        *,
        prompt: str | list[int],
        images: Sequence[ImageReference] = (),
        sampling: SamplingParams | None = None,
        request_id: str,
        priority: int = 0,
        ttft_target_ms: int | None = None,
        cache_salt: str = "",
    ) -> Generation:
        """Prepare the images, submit the request, and return once it is accepted.

        `max_tokens` of 0 means as many as the context leaves after the prompt. Cancelling this call undoes everything.

        Raises:
            RequestRefused: When the request cannot be accepted.
        """
        self._check_serving()
        assert self._media is not None
        received_s = time.perf_counter()
        prepared = await self._media.prepare(prompt, images, cache_salt)
        try:
            self._check_serving()
            return self._submit(
                prepared,
                sampling or SamplingParams(max_tokens=0),
                request_id=request_id,
                priority=priority,
                ttft_target_ms=ttft_target_ms,
                cache_salt=cache_salt,
                preprocess_ms=(time.perf_counter() - received_s) * 1e3,
            )
        except BaseException:
            prepared.lease.release()
            raise

    def _submit(
        self,
        prepared: Prepared,
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int,
        ttft_target_ms: int | None,
        cache_salt: str,
        preprocess_ms: float,
    ) -> Generation:
        check_numbers(prepared.token_ids, sampling, vocab_size=self.info.vocab_size)
        replica = self._route(prepared)
        prompt_tokens = len(prepared.token_ids)
        if not sampling.max_tokens:
            sizes = replica.sizes
            room = min(sizes.context_tokens, sizes.blocks * sizes.block_size) - prompt_tokens
            sampling = msgspec.structs.replace(sampling, max_tokens=max(room, 1))
        stop_token_ids = self._stop_tokens(sampling)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prepared.token_ids,
            items=prepared.items,
            sampling=sampling,
            priority=priority,
            ttft_target_ms=ttft_target_ms,
            cache_salt=cache_salt,
        )

        def on_end() -> None:
            prepared.lease.release()
            self._recent.append(timeline_of(generation, preprocess_ms))

        generation = Generation(
            request_id,
            prompt_tokens=prompt_tokens,
            detokenizer=self.preprocessor.detokenizer(),
            stop=sampling.stop,
            stop_token_ids=frozenset(stop_token_ids),
            logprobs=sampling.logprobs is not None,
            on_stop=replica.end,
            on_end=on_end,
        )
        replica.submit(request, stop_token_ids, generation)
        return generation

    async def stream(self, **request: Any) -> AsyncIterator[str]:
        """Yield the text of one request as it comes; takes what `generate` takes."""
        generation = await self.generate(**request)
        try:
            async for delta in generation:
                yield delta.text
        finally:
            generation.abort()

    def _stop_tokens(self, sampling: SamplingParams) -> tuple[int, ...]:
        own = () if sampling.ignore_eos else self.info.stop_token_ids
        stops = tuple(sorted({*sampling.stop_token_ids, *own}))
        if len(stops) > STOP_TOKENS_MAX:
            message = limit_message(
                "too many stop tokens, the checkpoint's own included",
                value=len(stops),
                limit=STOP_TOKENS_MAX,
                remedy="send fewer stop_token_ids",
            )
            raise RequestRefused(message, code="too_many_stop_tokens")
        return stops

    def _route(self, prepared: Prepared) -> Replica:
        views = [
            ReplicaView(index=index, load_tokens=replica.load_tokens(), healthy=replica.healthy)
            for index, replica in enumerate(self._replicas)
        ]
        view = RoutingView(
            replicas=views,
            prompt_tokens=len(prepared.token_ids),
            item_keys=[item.key for item in prepared.items],
            routed=self._routed,
        )
        try:
            index = self._policies.routing.choose(view)
            replica = self._replicas[range(len(views))[index]]
        except Exception:
            logger.exception("the routing policy failed; the first replica takes the request")
            replica = self._replicas[0]
        self._routed += 1
        return replica

    def _check_serving(self) -> None:
        if self.state in ("ready", "degraded"):
            return
        remedy = "try again later" if self.state == "loading" else "use another server"
        raise RequestRefused(
            f"the server is {self.state}. Remedy: {remedy}.",
            code=self.state,
            status=503,
            retry_after_s=5,
        )

    async def clear(self) -> dict[str, int]:
        """Interrupt every running and waiting request, and forget cached pixels (E20)."""
        for replica in self._replicas:
            replica.clear()
        if self._media is not None:
            self._media.clear()
        statistics = [replica.statistics() for replica in self._replicas]
        return {
            name: sum(one.get(name, 0) for one in statistics) for name in ("running", "waiting")
        }

    # --- views ---

    @property
    def state(self) -> str:
        """One of `loading`, `ready`, `degraded`, `failed`, `draining`, `stopped`."""
        if self._state == "ready" and all(replica.given_up for replica in self._replicas):
            return "failed"
        if self._state == "ready" and not all(replica.healthy for replica in self._replicas):
            return "degraded"
        return self._state

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.config.model.served_name

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [pid for replica in self._replicas for pid in replica.pids]

    def explain(self, request_id: str) -> str:
        """Return where a request is and why, in words; empty when it is not here."""
        return next(filter(None, (one.explain(request_id) for one in self._replicas)), "")

    @property
    def ledger(self) -> Ledger | None:
        """Where the memory went, at the peak of the last attempt to size the KV cache; None before there was one."""
        return self._sizing.ledger if self._sizing is not None else None

    def statistics(self) -> dict[str, Any]:
        """Return counters, gauges and memory; `recent` holds the timelines of the last requests."""
        replicas = [replica.statistics() for replica in self._replicas]
        first = replicas[0] if replicas else {}
        media = self._media.statistics() if self._media else None
        used = memory_in_use(replicas, media, self.config, self.info) if replicas else {}
        return {
            "state": self.state,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            **first,
            "media": msgspec.to_builtins(media) if media else {},
            "memory": self._memory(),
            "ledger": {**self.ledger.as_dict(), "in_use": used} if self.ledger else {},
            "recent": [msgspec.to_builtins(timeline) for timeline in self._recent],
        }

    def _memory(self) -> dict[str, int]:
        if self._arena is None:
            return {}
        layout = self._arena.layout
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "engine_resident": resident,
            "arena_pixels": layout.pixel_bytes,
            "arena_embeddings": layout.embedding_bytes,
        }

    def _crews(self, events: CrewEvents) -> list[Crew]:
        assert self._arena is not None
        assert self._context is not None
        self._sizing = kv_sizing(self.config, self.info, self._policies)
        templates = rank_specs(
            self.config, self.info, self._policies, arena=self._arena, run_dir=self._run_dir
        )
        return [
            Crew(
                template,
                self._context,
                ranks=1,
                deadlines=leader_deadlines(self.config),
                events=events,
                sizing=self._sizing,
            )
            for template in templates
        ]
