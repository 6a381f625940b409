"""The engine: generates text from a checkpoint and a configuration.

It owns the arena, the media pipeline and the shell with its ranks. The HTTP layer and the command line use only this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from vsched.aio.adapters import AdapterHold, AdapterTable, with_adapter
from vsched.aio.arrivals import (
    PendingArrival,
    RequestIds,
    check_numbers,
    check_prompt_values,
    check_stop_tokens,
    checked_argument,
    checked_images,
    checked_prompt,
    final_length,
    further_choices,
    prompt_logprobs_unavailable,
    refusal_error,
    request_of,
)
from vsched.aio.grammar_checks import GrammarChecker, GrammarChecks, grammar_processes
from vsched.aio.hosts.remote import placed
from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Launcher, LocalLauncher, Modules
from vsched.aio.live import COUNTERS, LiveState, live_policies, served_state
from vsched.aio.shell import EventRecorder, Shell, start_shell
from vsched.aio.streams import (
    ChoiceInputs,
    ChoiceSink,
    Generation,
    PromptReport,
    StopScope,
    TokenStream,
    interrupt_all,
)
from vsched.aio.timelines import FinishedRequests, timeline_of
from vsched.aio.worker_groups import STOP_GRACE_S, WorkerGroup, WorkerGroupEvents
from vsched.assembly import (
    FrontEnd,
    adapter_table,
    arena_layout,
    as_served,
    create_sizing,
    engine_memory,
    inspect_checkpoint,
    load_front_end,
    make_worker_groups,
    memory_in_use,
    scheduler_limits,
    verifies_drafts,
)
from vsched.config import Config, MediaConfig, plain_config, resolve_policies
from vsched.config.checks import check_combinations
from vsched.config.devices import settle
from vsched.config.policies import check_replacement, policy_tables
from vsched.devices import log_devices, resolve_devices
from vsched.errors import ConfigError, PolicyError, RequestRefused, described, reraise_interrupt
from vsched.fork_server import ForkServer
from vsched.kernel import Scheduler
from vsched.kernel.commands import RefusalCode, Refuse
from vsched.kernel.events import Arrived, PolicyReplaced
from vsched.media import ImageReference, MediaPipeline, PixelStore, Prompt
from vsched.media.pipeline import PreparedRequest
from vsched.media.pruning import Pruning, make_pruning
from vsched.memory import Ledger
from vsched.notebook import Statistics
from vsched.plugins import resolve_policy
from vsched.policy import POLICY_TABLES, SEVERAL, Policy, seats_in, without_seats
from vsched.policy_host.call_times import QueueClock
from vsched.record.journal import PartialOutput
from vsched.record.recorder import check_record_path, open_recorder
from vsched.transport.arena import Arena
from vsched.types import ModelInfo, Request, SamplingParams
from vsched.worker.contract import Preprocessor
from vsched.worker.registry import load_worker

MakeMedia = Callable[[Preprocessor, PixelStore, MediaConfig, Pruning | None], MediaPipeline]


def make_launcher(
    config: Config, *, started: Mapping[Modules, ForkServer] | None = None
) -> Launcher:
    """Return a launcher for the configured hosts; for `started` see `LocalLauncher`.

    Raises:
        ConfigError: When the key file of other hosts cannot be read, or Ray cannot be reached.
    """
    own = LocalLauncher(started=started)
    try:
        return placed(config, own) if config.cluster.elsewhere else own
    except BaseException:
        own.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of an engine; the defaults are for a server, and a simulation passes its own.

    Attributes:
        make_launcher: Called once; returns the launcher of all worker groups.
        make_grammar_checker: Returns the grammar checker; None if the plug-in has no grammars.
        make_media: Returns the pipeline that prepares requests, with its threads and network.
        open_record: Returns the record of a kernel, or None to keep none.
        now_ns: The kernel's clock.
        make_queue_clock: Called once on the event loop's thread; returns the clock of its waits for a core, in ns.
        interrupts_policies: Whether policy calls that do not return are interrupted: on a slow machine, this would
            change a simulation.
    """

    make_launcher: Callable[[Config], Launcher] = make_launcher
    make_grammar_checker: Callable[[Config, ModelInfo], GrammarChecker | None] = grammar_processes
    make_media: MakeMedia = MediaPipeline
    open_record: Callable[[Config, Scheduler], EventRecorder | None] = open_recorder
    now_ns: Callable[[], int] = time.monotonic_ns
    make_queue_clock: Callable[[], Callable[[], int]] = QueueClock
    interrupts_policies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningParts:
    """The parts of an engine between its start and its stop.

    Attributes:
        computes_prompt_logprobs: Whether ranks can report the log-probabilities of prompt tokens.
    """

    arena: Arena
    launcher: Launcher
    shell: Shell
    media: MediaPipeline
    grammars: GrammarChecks
    computes_prompt_logprobs: bool
    adapters: AdapterTable

    async def prepare(
        self,
        prompt: Prompt,
        images: Sequence[ImageReference],
        cache_salt: str,
        sampling: SamplingParams,
    ) -> PreparedRequest:
        """Check prompt log-probabilities and grammar of a request, then prepare its prompt and images.

        Raises:
            RequestRefused: When one of these is not acceptable.
        """
        if sampling.prompt_logprobs is not None and not self.computes_prompt_logprobs:
            raise prompt_logprobs_unavailable()
        if sampling.grammar:
            await self.grammars.check_request(sampling)
        return await self.media.prepare(prompt, images, cache_salt)

    async def stop(self, *, grace_s: float) -> None:
        """End all requests and ranks, then release threads, sockets and memory.

        Blocks: at most the grace period, after which ranks are killed, and until busy threads are done.
        """
        self.adapters.close()
        try:
            await self.shell.stop(grace_s=grace_s)
        finally:
            try:
                # In a thread, because it waits for images that are being processed.
                closing = asyncio.get_running_loop().run_in_executor(None, self.media.close)
            except RuntimeError:  # the interpreter exits, and its executors take nothing more
                self.media.close()
            else:
                await closing
            self.grammars.close()
            self.launcher.close()
            self.arena.close()


async def _abandon(starting: asyncio.Future[Shell]) -> None:
    """Stop a shell that has started, or that is starting."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().stop()


logger = logging.getLogger(__name__)
Sink = TypeVar("Sink", bound=ChoiceSink)
Progress = Callable[[str, str, float], None]
"""Called while loading: the group, its current activity, and the fraction done."""


class Engine:
    """Serves one checkpoint.

    Use it as `async with Engine(config) as engine:`, or call `start` and `stop`.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_progress: Progress | None = None,
        environment: Environment | None = None,
        seed: int | None = None,
    ) -> None:
        """Create an engine; `seed` determines the seeds of requests without one, which are random by default."""
        self._seeds = random.Random(seed)  # noqa: S311 - draws of tokens, not secrets
        self.config, self._devices = settle(plain_config(config), os.environ)
        self._environment = environment or Environment()
        self._policies = resolve_policies(self.config)
        self._replacing: Mapping[str, dict[str, Any]] = {}  # by table, while they are installed
        self._on_progress = on_progress or (lambda _group, _what, _fraction: None)
        self._state = "loading"
        self._finished = FinishedRequests()
        self._running: RunningParts | None = None
        self._sizing: Sizing | None = None
        self._started_s = time.monotonic()
        self.info: ModelInfo
        self.preprocessor: Preprocessor

    # --- lifecycle ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load everything; ranks and preprocessor in parallel.

        Blocks: up to `deadlines.ready_s`.

        Raises:
            CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: If the start fails; all resources are
                released.
        """
        check_record_path(self.config)
        if self._devices is None or self.config.generate.on_cuda or self.config.encode.on_cuda:
            self.config, choice = await asyncio.to_thread(resolve_devices, self.config, os.environ)
            if self._devices is None:
                log_devices(choice)
            check_combinations(self.config)
            self._policies = resolve_policies(self.config)
        config = self.config
        plugin = load_worker(config.generate.plugin, path="generate.plugin")
        try:
            info = inspect_checkpoint(config, self._policies)
            self.config, self.info = as_served(config, info)
            ranks = self.config.generate.tensor_parallel
            front_end = partial(load_front_end, plugin, ranks=ranks)
            self._running = await self._start_parts(front_end)
            for name, path in self.config.adapters.load.items():
                try:
                    await self._running.adapters.load_adapter(name, path)
                except RequestRefused as error:
                    raise ConfigError(f"adapters.load.{name}: {error.message}") from error
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self._state = "ready"

    async def _start_parts(self, load_front_end: Callable[[ModelInfo], FrontEnd]) -> RunningParts:
        config, info, environment = self.config, self.info, self._environment
        drafts = verifies_drafts(config, info, self._policies)
        self._sizing = create_sizing(config, info, self._policies)
        async with contextlib.AsyncExitStack() as started:
            arena = Arena.create(arena_layout(config, info))
            started.callback(arena.close)
            launcher = environment.make_launcher(config)
            started.callback(launcher.close)
            shell_start = start_shell(
                partial(self._worker_groups, arena, launcher, self._sizing),
                limits=lambda blocks: scheduler_limits(
                    config, info, self._policies, blocks=blocks, drafts=drafts
                ),
                policies=msgspec.structs.replace(
                    self._policies.for_kernel(), build=self._build_policy
                ),
                on_progress=self._on_progress,
                drain_s=config.deadlines.drain_s,
                call_budget_ms=config.policies.call_budget_ms,
                slow_calls_max=config.policies.slow_calls_max,
                # Ranks stop after a longer silence of the engine.
                call_limit_s=environment.interrupts_policies
                * min(config.policies.call_limit_s, config.deadlines.rank_timeout_s / 3),
                record=partial(environment.open_record, config),
                now_ns=environment.now_ns,
                queued_ns=environment.make_queue_clock(),
            )
            starting = asyncio.ensure_future(shell_start)
            started.push_async_callback(_abandon, starting)
            # A wrong tokenizer or chat template ends the start before the weights are loaded.
            front_end, shell = await asyncio.gather(
                asyncio.to_thread(load_front_end, info), starting
            )
            self.preprocessor, computes_prompt_logprobs = front_end
            # Last: their processes should not load at the same time as the ranks.
            checker = environment.make_grammar_checker(config, info)
            grammars = GrammarChecks(checker, deadline_s=config.media.prepare_s)
            started.callback(grammars.close)
            store = PixelStore(arena.pixels, arena.fd)
            pruning = make_pruning(self._policies.pruning, config.policies)
            media = environment.make_media(self.preprocessor, store, config.media, pruning)
            started.pop_all()
        adapters = adapter_table(config, info, shell.groups, run_dir=launcher.run_dir)
        shell.restore_adapters = adapters.restore_adapters
        return RunningParts(
            arena=arena,
            launcher=launcher,
            shell=shell,
            media=media,
            grammars=grammars,
            computes_prompt_logprobs=computes_prompt_logprobs,
            adapters=adapters,
        )

    async def drain(self) -> None:
        """Accept no new requests, and wait for the running ones.

        Blocks: up to `deadlines.drain_s`.
        """
        self._state = "draining"
        if self._running is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.deadlines.drain_s):
                    await self._running.shell.wait_idle()

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Abort all requests, stop all ranks and release all resources; may be called twice.

        Blocks: at most the grace period, after which ranks are killed, and until running threads finish.
        """
        self._state = "stopped"
        running, self._running = self._running, None
        if running is not None:
            await running.stop(grace_s=grace_s)

    # --- requests ---

    async def generate(
        self,
        *,
        prompt: Prompt,
        images: Sequence[ImageReference] = (),
        sampling: SamplingParams | None = None,
        request_id: str,
        priority: int = 0,
        ttft_target_ms: int | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: str = "",
        adapter: str = "",
    ) -> Generation:
        """Like `generate_choices`, for a single choice.

        The request is aborted if its reader stops reading; see `Generation`.
        """
        (generation,) = await self.generate_choices(
            prompt=prompt,
            images=images,
            sampling=sampling,
            request_ids=(request_id,),
            priority=priority,
            ttft_target_ms=ttft_target_ms,
            cache_salt=cache_salt,
            tenant=tenant,
            session=session,
            adapter=adapter,
        )
        return generation

    async def generate_choices(
        self,
        *,
        prompt: Prompt,
        images: Sequence[ImageReference] = (),
        sampling: SamplingParams | None = None,
        request_ids: Sequence[str],
        priority: int = 0,
        ttft_target_ms: int | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: str = "",
        adapter: str = "",
        started: PartialOutput | None = None,
        make_stop_scope: Callable[[], StopScope] | None = None,
    ) -> list[Generation]:
        """Prepare the images, submit a request with one choice per id, and return once it is accepted.

        The choices share the prompt, which is computed once, and differ in their seeds; the first has the seed of
        `sampling`, or a drawn one. Either all are accepted or none. `max_tokens` of 0 means up to the end of the
        context. Without `sampling`, `max_tokens` is 0 and the rest comes from the checkpoint's defaults. `adapter` is
        the name of a loaded adapter, empty for the base model; `started` is the part of an answer that an earlier
        engine process had generated before it died. `make_stop_scope` returns a `StopScope`, which limits stop strings
        to parts of the text; by default they apply everywhere. Cancelling undoes everything.

        Arguments are first converted to the declared types (`vsched.plain_values`): `temperature=0` to 0.0, numpy
        numbers and arrays to numbers and lists.

        Raises:
            RequestRefused: If the request cannot be accepted, or an argument has the wrong type.
            RequestFailed: If it was interrupted during preparation.
        """
        self._serving()
        names = checked_argument("request_ids", request_ids, RequestIds)
        if len(set(names)) < len(names):
            raise refusal_error(Refuse(names[0], RefusalCode.DUPLICATE_ID))
        adapter = checked_argument("adapter", adapter, str)
        prompt = checked_prompt(prompt)
        images = checked_images(images)
        requested = request_of(
            names[0],
            {
                "sampling": self.default_sampling() if sampling is None else sampling,
                "priority": priority,
                "ttft_target_ms": ttft_target_ms,
                "cache_salt": cache_salt,
                "tenant": tenant,
                "session": session,
            },
        )
        streams = await self.accept(
            requested,
            names,
            adapter=adapter,
            images=len(images),
            prepare=lambda parts: parts.prepare(
                prompt, images, requested.cache_salt, requested.sampling
            ),
            make_answer=partial(
                TokenStream,
                make_detokenizer=self.preprocessor.detokenizer,
                make_stop_scope=make_stop_scope,
            ),
            started=started,
        )
        return [Generation(stream) for stream in streams]

    async def accept(
        self,
        requested: Request,
        request_ids: Sequence[str],
        *,
        adapter: str,
        images: int,
        prepare: Callable[[RunningParts], Awaitable[PreparedRequest]],
        make_answer: Callable[[ChoiceInputs], Sink],
        started: PartialOutput | None = None,
    ) -> list[Sink]:
        """Admit a request, prepare it, submit it, and return the sinks of its choices.

        `requested` is the request without prompt and images, and `images` the number of its images; `prepare` is called
        once the request is admitted. Seeds are drawn in the order of the calls. Cancelling undoes everything.

        Raises:
            RequestRefused, RequestFailed: As in `generate_choices`.
        """
        parts = self._serving()
        if requested.sampling.seed is None:
            sampling = msgspec.structs.replace(requested.sampling, seed=self._seeds.getrandbits(63))
            requested = msgspec.structs.replace(requested, sampling=sampling)
        received_s = time.perf_counter()
        given = contextlib.ExitStack()
        try:
            hold = parts.adapters.hold_adapter(adapter) if adapter else None
            if hold is not None:
                given.callback(hold.release)
            with parts.shell.arrivals.track_arrival(request_ids[0]) as arrival:
                await arrival.admit(
                    Arrived(
                        arrival.arrival_id,
                        requested.tenant,
                        requested.priority,
                        requested.ttft_target_ms,
                        images=images,
                        choices=len(request_ids),
                        outputs_max=requested.sampling.max_tokens,
                        session=requested.session,
                    )
                )
                prepared = await prepare(parts)
                given.callback(prepared.lease.release)
                # Accepted before a drain, it is served: the engine's state is not checked again.
                return self._submit(
                    parts.shell,
                    msgspec.structs.replace(
                        requested, prompt_token_ids=prepared.token_ids, items=prepared.items
                    ),
                    request_ids,
                    arrival,
                    make_answer,
                    hold=hold,
                    give_back=given.close,
                    preprocess_ms=(time.perf_counter() - received_s) * 1e3,
                    started=started,
                )
        except BaseException:
            given.close()
            raise

    def _submit(
        self,
        shell: Shell,
        request: Request,
        request_ids: Sequence[str],
        arrival: PendingArrival,
        make_answer: Callable[[ChoiceInputs], Sink],
        *,
        hold: AdapterHold | None,
        give_back: Callable[[], None],
        preprocess_ms: float,
        started: PartialOutput | None,
    ) -> list[Sink]:
        """Submit a request with a choice for each id; after the end of the last one, `give_back` frees its resources.

        The first choice continues one that was `started`; its stream has all of it.

        Raises:
            RequestRefused: If one of its numbers is out of bounds, or its prompt is not the one that was begun.
        """
        if hold is not None:
            request = with_adapter(request, hold)
        emitted = () if started is None else started.continued(request)
        token_ids, sampling = request.prompt_token_ids, request.sampling
        check_numbers(
            [*token_ids, *emitted] if emitted else token_ids,
            sampling,
            vocab_size=self.info.vocab_size,
        )
        report = None
        if sampling.prompt_logprobs is not None:
            report = PromptReport(token_ids, sampling.prompt_logprobs)
            check_prompt_values(report.values, self.config.server.prompt_logprobs_max)
        sampling = final_length(sampling, shell.limits, len(token_ids))
        own = () if sampling.ignore_eos else self.info.stop_token_ids
        stop_token_ids = check_stop_tokens(sampling.stop_token_ids, own)
        request = msgspec.structs.replace(request, sampling=sampling)
        generations: list[Sink] = []
        running = len(request_ids)

        def end_choice(index: int) -> None:
            nonlocal running
            running -= 1
            if not running:
                give_back()
            self._finished.add(timeline_of(generations[index], preprocess_ms))

        for index, request_id in enumerate(request_ids):
            inputs = ChoiceInputs(
                request_id=request_id,
                prompt_token_ids=token_ids,
                sampling=sampling,
                stop_token_ids=frozenset(stop_token_ids),
                report=report,
                on_stop=shell.end_request,
                on_end=partial(end_choice, index),
            )
            generations.append(make_answer(inputs))
        if hold is not None:
            hold.mark_running(partial(interrupt_all, generations))
        further = further_choices(request_ids, sampling.seed or 0)
        shell.submit(
            request,
            stop_token_ids,
            generations[0],
            dict(zip(further, generations[1:], strict=True)),
            arrival=arrival,
            emitted=emitted,
        )
        for token_id in emitted:  # after acceptance: a stop string among them ends the choice
            generations[0].push_token(token_id, None)
        return generations

    def default_sampling(self) -> SamplingParams:
        """Return the checkpoint's sampling parameters, up to the end of the context."""
        return SamplingParams(max_tokens=0, **msgspec.structs.asdict(self.info.sampling))

    async def tokenize(self, prompt: Prompt, images: Sequence[ImageReference] = ()) -> list[int]:
        """Return the token ids of a prompt, including those of its images, subject to all limits.

        Images are fetched and prepared as for generation, because their token counts depend on their sizes; a following
        request with the same images finds them in the cache.

        Blocks: up to `media.prepare_s`.

        Raises:
            RequestRefused: If `generate` would refuse it.
        """
        parts = self._serving()
        with parts.shell.arrivals.track_arrival("tokenize"):
            prepared = await parts.media.prepare(checked_prompt(prompt), checked_images(images))
        prepared.lease.release()
        return prepared.token_ids

    async def stream(self, **request: Any) -> AsyncGenerator[str, None]:
        """Yield the text of one request as it is generated; takes the arguments of `generate`.

        The request is aborted when this iterator is closed or garbage-collected.
        """
        generation = await self.generate(**request)
        try:
            async for delta in generation:
                yield delta.text
        finally:
            generation.abort()

    async def clear(self) -> dict[str, int]:
        """Abort all requests, including those in preparation, and clear the pixel cache."""
        statistics: dict[str, Any] = {}
        if self._running is not None:
            self._running.shell.clear()
            self._running.media.clear()
            statistics = self._running.shell.statistics()
        return {name: statistics.get(name, 0) for name in ("running", "waiting")}

    # --- adapters ---

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder below `adapters.directory`; afterwards requests may use it.

        Blocks: until its files are copied, then up to `adapters.load_s`.

        Raises:
            RequestRefused: If it cannot be loaded; nothing of it remains.
        """
        table = self._serving().adapters
        await table.load_adapter(name, table.path_of(path))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it may finish first, within `deadlines.drain_s`.

        Blocks: until then, and until the ranks have unloaded it.

        Raises:
            RequestRefused: If there is no adapter of this name, or it is being loaded or unloaded already.
        """
        await self._serving().adapters.unload(name)

    def adapters(self) -> list[dict[str, Any]]:
        """Return all adapters: name, state, rank, number of running requests, number of requests so far."""
        return self._running.adapters.rows() if self._running is not None else []

    # --- administration of single groups ---

    async def drain_group(self, group: str) -> bool:
        """Stop giving requests to a group, and wait until it is idle; return True if that happened in time.

        Blocks: up to `deadlines.drain_s`; the group continues to drain afterwards.

        Raises:
            RequestRefused: If there is no such group, it is down, or it is the last of its stage that is up.
        """
        return await self._serving().shell.groups.drain(group)

    async def restart_group(self, group: str) -> bool:
        """Drain a group and replace its ranks; return True if it is up again.

        Blocks: up to `deadlines.drain_s`, then until the ranks have loaded.

        Raises:
            RequestRefused: If there is no such group, or it is down.
        """
        return await self._serving().shell.groups.restart(group)

    def resume_group(self, group: str) -> None:
        """Give requests to a drained group again.

        Raises:
            RequestRefused: If there is no such group, or it was not drained.
        """
        self._serving().shell.groups.resume(group)

    def replace_policy(self, table: str, policy: Policy | dict[str, Any]) -> None:
        """Let another policy decide at the seats of a configuration table, while requests run; see `replace_policies`.

        Args:
            table: Path of the table, such as `generate.step`; `policy` for one policy at several seats.
            policy: A policy of a class that can be imported, or its configuration table `{"use": ..., **fields}`.
        """
        self.replace_policies({table: policy})

    def replace_policies(self, tables: Mapping[str, Policy | dict[str, Any]]) -> None:
        """Replace the policies of several tables at once, or none of them.

        New policies begin with a fresh state. An eviction order gets the entries of the one before, in the order of
        their release. The change is recorded, and lasts until the engine stops.

        Raises:
            RequestRefused: If the engine does not serve, or a policy is not valid or needs a restart; a memory policy
                does. Nothing is changed.
        """
        running = self._serving()
        try:
            checked, policies = check_replacement(self.config, self._policies, tables)
            verifies_drafts(self.config, self.info, policies)
        except (ConfigError, PolicyError) as error:
            raise RequestRefused(str(error), code="invalid_policy") from error
        except BaseException as error:  # a user's module or class may raise anything
            reraise_interrupt(error)
            raise RequestRefused(
                f"{', '.join(tables)}: {described(error)}. Remedy: correct the policy",
                code="invalid_policy",
            ) from error
        self._policies, self._replacing = policies, checked
        try:
            running.shell.handle(PolicyReplaced(tables=checked))
        finally:
            self._replacing = {}

    def _build_policy(self, decision: str, table: Mapping[str, Any]) -> Policy:
        """Return the policy that was checked for this table: building another may fail, when nothing may fail."""
        for path, one in self._replacing.items():
            own = SEVERAL if path == SEVERAL else POLICY_TABLES[path]
            fields = without_seats(one) if path == SEVERAL else one
            if own == decision and fields == table:
                return self._policies.by_table[seats_in(path, one)[0]]
        return resolve_policy(decision, table)

    def policies(self) -> dict[str, dict[str, Any]]:
        """Return the configuration table of the policy that now decides for each policy table."""
        installed = self.statistics().get("policy_tables", {})
        return policy_tables(self.config, self._policies, installed)

    def groups(self) -> list[dict[str, Any]]:
        """Return all groups: name, stage, state, ranks, running and waiting requests, restarts, last loss."""
        return self._running.shell.group_rows() if self._running is not None else []

    def _serving(self) -> RunningParts:
        """Return the running parts.

        Raises:
            RequestRefused: If the engine does not serve requests now.
        """
        state = self.state
        if self._running is not None and state in ("ready", "degraded"):
            return self._running
        remedy = "try again later" if state == "loading" else "use another server"
        raise RequestRefused(
            f"the server is {state}. Remedy: {remedy}.", code=state, status=503, retry_after_s=5
        )

    # --- properties ---

    @property
    def state(self) -> str:
        """One of `loading`, `ready`, `degraded`, `failed`, `draining`, `stopped`."""
        if self._state == "ready" and self._running is not None:
            if self._running.shell.given_up:
                return "failed"
            return "ready" if self._running.shell.healthy else "degraded"
        return self._state

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.config.model.served_name

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of all ranks."""
        return self._running.shell.pids if self._running is not None else []

    def explain(self, request_id: str) -> str:
        """Explain the state of a request in words; empty if it is unknown."""
        return self._running.shell.explain(request_id) if self._running is not None else ""

    @property
    def ledger(self) -> Ledger | None:
        """Memory ledger at the peaks of the last KV cache sizing attempts; None before the first."""
        return self._sizing.ledger if self._sizing is not None else None

    def statistics(self) -> dict[str, Any]:
        """Return counters, gauges and memory; `recent` has the timelines of the last requests.

        A notebook shows it as a table.
        """
        running = self._running
        served = running.shell.statistics() if running is not None else {}
        media = running.media.statistics() if running is not None else None
        used = memory_in_use(served, media, self.config, self.info) if served else {}
        if running is not None and running.media.pruning is not None:
            for name, figures in running.media.pruning.figures().items():
                served[name] = {**served[name], **figures}
        ledger = self.ledger
        found = {
            "state": self.state,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            **served,
            "media": msgspec.to_builtins(media) if media else {},
            "memory": {}
            if running is None
            else engine_memory(
                running.arena.layout,
                images=running.media.server_pid,
                grammars=running.grammars.server_pid,
            ),
            "ledger": {**ledger.as_dict(), "in_use": used} if ledger else {},
            "histograms": self._finished.histograms(),
            "recent": [msgspec.to_builtins(one) for one in self._finished.recent],
        }
        return Statistics(found)

    def __repr__(self) -> str:
        counts = self._running.shell.statistics() if self._running is not None else {}
        load = "".join(
            f", {counts[name]:,} {name}" for name in ("running", "waiting") if name in counts
        )
        return f"<Engine of {self.model_name}: {self.state}{load}>"

    def live(self) -> LiveState:
        """Return the state at this moment, for operators."""
        statistics, running = self.statistics(), self._running
        state = LiveState(
            now_ns=self._environment.now_ns(),
            state=statistics["state"],
            model=self.model_name,
            uptime_s=statistics["uptime_s"],
        )
        if running is None:
            return state
        shell, ledger = running.shell, statistics["ledger"]
        tables = policy_tables(self.config, self._policies, statistics["policy_tables"])
        counters = {name: statistics[name] for name in COUNTERS}
        failures = dict(shell.kernel.policy_failure_counts)
        if running.media.pruning is not None:
            failures |= running.media.pruning.failed
        generate = {
            name: value for name, value in statistics["generate"].items() if name != "groups"
        }
        return msgspec.structs.replace(
            state,
            **served_state(shell),
            groups=shell.group_rows(),
            ended=list(self._finished.recent),
            policies=live_policies(
                tables,
                self._policies.by_table,
                statistics,
                failures,
            ),
            counters={**counters, "generate": generate, "encode": statistics["encode"]},
            memory={
                "pools": ledger.get("pools", []),
                "in_use": ledger.get("in_use", {}),
                "processes": statistics["memory"],
                "ranks": statistics["ranks"],
            },
        )

    def _worker_groups(
        self, arena: Arena, launcher: Launcher, sizing: Sizing, events: WorkerGroupEvents
    ) -> list[WorkerGroup]:
        """Create the worker groups; the engine of a calibration overrides it to observe their results."""
        return make_worker_groups(
            self.config,
            self.info,
            self._policies,
            launcher=launcher,
            arena=arena,
            events=events,
            sizing=sizing,
        )
