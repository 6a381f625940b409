"""The engine: a checkpoint and a configuration in, generations out.

It owns the arena, the media pipeline and the replicas, and is all that the HTTP layer and the command line know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import msgspec
import zmq

from vsched.aio.crew import Crew, CrewEvents
from vsched.aio.leader import Deadlines
from vsched.aio.replica import Replica
from vsched.aio.stream import Generation
from vsched.config import Config, ConfiguredPolicies, resolve_policies
from vsched.errors import ConfigError, RequestRefused, limit_message
from vsched.kernel import KernelPolicies, Sizes
from vsched.media.pipeline import MediaPipeline, Prepared
from vsched.media.pixels import PixelStore
from vsched.media.settings import MediaSettings
from vsched.plugins import load_worker
from vsched.policy import ReplicaView, RoutingView
from vsched.transport.arena import Arena
from vsched.types import ArenaLayout, FinishReason, ModelInfo, Request, SamplingParams
from vsched.worker.contract import Preprocessor, WorkerSettings
from vsched.worker.slots import STOP_TOKENS_MAX
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec

logger = logging.getLogger(__name__)
PAGE_ROWS = 64
"""Embedding rows of an arena page: small enough to waste little, large enough to keep page lists short."""
RECENT_MAX = 64
Progress = Callable[[str, str, float], None]
"""Called while loading: the group, what it does, and the fraction done."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in milliseconds."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    encoded_items: int
    preemptions: int
    preprocess_ms: float
    encode_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    finish_reason: str


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
        self.info = plugin.inspect(
            config.model.path,
            dtype=config.model.dtype,
            item_tokens_max=self._policies.item_tokens_max or 0,
        )
        try:
            await self._start_parts(plugin.load_preprocessor)
        except BaseException:
            await self.stop()
            raise
        self._state = "ready"

    async def _start_parts(self, load_preprocessor: Callable[[ModelInfo], Preprocessor]) -> None:
        layout = arena_layout(self.config, self.info)
        self._arena = Arena.create(layout)
        self._run_dir = tempfile.mkdtemp(prefix="vsched-")  # mkdtemp makes it 0700
        self._context = zmq.Context()
        replica = Replica(
            self._crews,
            size=self._sizes,
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
            self.preprocessor, PixelStore(self._arena.pixels), self._media_settings()
        )

    async def drain(self) -> None:
        """Accept nothing more, and wait for the live requests.

        Blocks: up to `deadlines.drain_s`.
        """
        self._state = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.deadlines.drain_s):
                await asyncio.gather(*(replica.wait_idle() for replica in self._replicas))

    async def stop(self) -> None:
        """End every request, stop every rank and give everything back; may be called twice."""
        self._state = "stopped"
        replicas, self._replicas = self._replicas, []
        await asyncio.gather(*(replica.stop() for replica in replicas))
        if self._media is not None:
            self._media.close()
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
        images: Sequence[str] = (),
        sampling: SamplingParams | None = None,
        request_id: str,
        priority: int = 0,
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
        cache_salt: str,
        preprocess_ms: float,
    ) -> Generation:
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
            cache_salt=cache_salt,
        )

        def on_end() -> None:
            prepared.lease.release()
            self._recent.append(_timeline(generation, preprocess_ms))

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
        """One of `loading`, `ready`, `degraded`, `draining`, `stopped`."""
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

    def statistics(self) -> dict[str, Any]:
        """Return counters, gauges and memory; `recent` holds the timelines of the last requests."""
        replicas = [replica.statistics() for replica in self._replicas]
        first = replicas[0] if replicas else {}
        return {
            "state": self.state,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            **first,
            "media": msgspec.to_builtins(self._media.statistics()) if self._media else {},
            "memory": self._memory(),
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

    # --- how the parts are made ---

    def _crews(self, events: CrewEvents) -> list[Crew]:
        config = self.config
        assert self._arena is not None
        assert self._context is not None
        encode = EncodeRole(
            address="",
            plugin=config.encode.plugin,
            settings=WorkerSettings(
                device=config.encode.device, threads=config.encode.threads_used
            ),
        )
        generate = GenerateRole(
            address="",
            plugin=config.generate.plugin,
            settings=WorkerSettings(
                device=config.generate.device,
                threads=config.generate.threads_used,
                attention=config.generate.attention,
            ),
            memory=config.generate.memory,
            slots=config.generate.slots,
            block_size=config.generate.block_size,
            context_tokens=self._context_tokens,
            tokens_min=config.generate.block_size,
        )
        roles: list[tuple[EncodeRole | None, GenerateRole | None]] = [
            (encode, None),
            (None, generate),
        ]
        if config.placement == "together":
            roles = [(encode, generate)]
        limits = config.deadlines
        return [
            Crew(
                RankSpec(
                    rank=0,
                    secret="",
                    run_dir=self._run_dir,
                    arena_fd=self._arena.fd,
                    layout=self._arena.layout,
                    info=self.info,
                    timeout_s=limits.rank_timeout_s,
                    encode=encode_role,
                    generate=generate_role,
                ),
                self._context,
                ranks=1,
                threads=max(
                    config.encode.threads_used if encode_role else 1,
                    config.generate.threads_used if generate_role else 1,
                ),
                deadlines=Deadlines(
                    ready_s=limits.ready_s,
                    step_s=limits.step_s,
                    heartbeat_s=limits.heartbeat_s,
                    rank_timeout_s=limits.rank_timeout_s,
                ),
                events=events,
            )
            for encode_role, generate_role in roles
        ]

    @property
    def _context_tokens(self) -> int:
        return self.config.generate.context_tokens or self.info.context_tokens

    def _sizes(self, blocks: int) -> Sizes:
        generate = self.config.generate
        assert self._arena is not None
        return Sizes(
            block_size=generate.block_size,
            blocks=blocks,
            slots=generate.slots,
            batch_tokens=generate.max_batch_tokens,
            chunk_tokens=generate.chunk_tokens,
            context_tokens=self._context_tokens,
            page_rows=PAGE_ROWS,
            pages=self._arena.layout.pages,
            encode_items=self._policies.encode_items_max,
            waiting=generate.max_waiting,
            prefix_cache=generate.prefix_cache,
        )

    def _media_settings(self) -> MediaSettings:
        media = self.config.media
        return MediaSettings(
            image_bytes_max=media.bytes_max,
            image_pixels_max=media.pixels_max,
            images_max=max(media.images_max, 1),
            directory=media.allow_local_dir,
            hosts=media.allow_http_hosts,
            fetch_s=media.timeout_s,
            threads=media.threads,
        )


def kernel_policies(policies: ConfiguredPolicies) -> KernelPolicies:
    """Return the policies that the kernel consults."""
    return KernelPolicies(
        encode_admission=policies.encode_admission,
        generate_admission=policies.generate_admission,
        encoding=policies.encoding,
        embedding_eviction=policies.encode_eviction,
        prefix_eviction=policies.generate_eviction,
        preemption=policies.preemption,
    )


def arena_layout(config: Config, info: ModelInfo) -> ArenaLayout:
    """Return the arena's layout for a checkpoint.

    Raises:
        ConfigError: When the embedding region is smaller than one page.
    """
    page_bytes = PAGE_ROWS * info.embedding_row_bytes
    pages = config.arena.embedding_bytes // page_bytes
    if pages < 1:
        raise ConfigError(
            limit_message(
                "arena.embedding_bytes: smaller than one page",
                value=config.arena.embedding_bytes,
                limit=f"at least {page_bytes} bytes for this checkpoint",
                remedy="raise arena.embedding_bytes",
            )
        )
    return ArenaLayout(
        pixel_bytes=config.arena.pixel_bytes,
        pages=pages,
        page_rows=PAGE_ROWS,
        row_bytes=info.embedding_row_bytes,
    )


def _timeline(generation: Generation, preprocess_ms: float) -> Timeline:
    times = generation.times

    def span_ms(start_ns: int, end_ns: int) -> float:
        return round((end_ns - start_ns) / 1e6, 3) if start_ns and end_ns else 0.0

    return Timeline(
        request_id=generation.request_id,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=times.cached_tokens,
        output_tokens=generation.output_tokens,
        encoded_items=times.encoded_items,
        preemptions=times.preemptions,
        preprocess_ms=round(preprocess_ms, 3),
        encode_ms=span_ms(times.submitted_ns, times.items_ready_ns),
        queue_ms=span_ms(times.items_ready_ns, times.admitted_ns),
        prefill_ms=span_ms(times.admitted_ns, times.first_token_ns),
        decode_ms=span_ms(times.first_token_ns, times.finished_ns),
        finish_reason=(generation.reason or FinishReason.ERROR).value,
    )
