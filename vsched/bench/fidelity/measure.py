"""The same requests, real and simulated: the error of a simulation.

A real engine serves a workload in real time, with the arrivals, images and lengths of the
simulation; both report client latencies. First all requests are sent at once, which measures the
engine's capacity and its prediction. Then the same kinds of requests are sent at shares of that
capacity.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from random import Random
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Launcher
from vsched.aio.shell import EventRecorder
from vsched.aio.worker_groups import WorkerGroup, WorkerGroupEvents
from vsched.bench.load.generator import draw_picture, draw_text
from vsched.bench.machine import OtherLoad
from vsched.config import Config, MediaConfig
from vsched.engine import Engine, Environment, Progress
from vsched.errors import ConfigError, GroupLostError, RequestFailed, RequestRefused
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, Decide
from vsched.kernel.decisions import Decision, EncodeDecision
from vsched.kernel.events import Event, GroupLost
from vsched.media import MediaPipeline, PixelStore
from vsched.media.pruning import Pruning
from vsched.sim.cost.calibration import (
    Observation,
    ObservedJob,
    ObservedRequest,
    ObservedStep,
    encode_sample,
    generate_sample,
    slower,
    slowness,
)
from vsched.sim.cost.model import CostModel, EncodeSample, GenerateSample
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.fast.simulation import LEFT, simulate
from vsched.sim.workload.generators import independent, poisson
from vsched.sim.workload.requests import (
    Arrival,
    Image,
    PromptPart,
    Text,
    Video,
    Workload,
    workload_of,
)
from vsched.transport.arena import Arena
from vsched.types import SamplingParams
from vsched.wire import EncodeResult, GenerateResult
from vsched.worker.contract import ImagePlan, Preprocessor, extent_bytes

WORDS = 4000
"""Number of random words to tokenize when collecting ordinary tokens."""
SPACE = Text(0, 1)
"""Separates two images, which must not be adjacent."""
UNIT_MAX = 256
"""Maximum pixels per token, as the side of a square."""


class RequestTexts:
    """Creates real prompts and pictures for a checkpoint.

    Attributes:
        pixels_per_token: Pixels per image token.
        bytes_per_token: Encoder input bytes per image token.
    """

    def __init__(self, preprocessor: Preprocessor, *, words: str = "") -> None:
        """Prepare for a checkpoint; prompts use the tokens of `words`, by default random ones."""
        self._preprocessor = preprocessor
        rng = Random(0)  # noqa: S311 - a load, not a secret
        # Word by word, because all together might exceed the context.
        tokens = {
            token
            for word in (words or draw_text(rng, WORDS)).split()
            for token in preprocessor.tokenize(f" {word}")
        }
        self._ordinary = sorted(tokens - {preprocessor.info.image_token_id})
        self._unit, plan = self._find_unit()
        self.pixels_per_token = self._unit**2
        self.bytes_per_token = -(-extent_bytes(plan.arrays) // plan.tokens)

    def _find_unit(self) -> tuple[int, ImagePlan]:
        """Return the side of the pixel square that becomes a token, and the plan of a large picture of such squares.

        Processors round sizes, so only a picture with many tokens determines it exactly. No square may have as many as
        the largest picture: a long strip can exceed the processor's own limit.
        """
        plan_image = self._preprocessor.plan_image
        most = max(math.isqrt(self._preprocessor.info.item_tokens_max), 1)
        for rows, side in itertools.product(range(most, 0, -1), range(UNIT_MAX, 0, -1)):
            half = max(rows // 2, 1)
            plan = plan_image(rows * side, rows * side)
            smaller = plan_image(half * side, rows * side)
            if (plan.tokens, smaller.tokens) == (rows * rows, half * rows):
                return side, plan
        raise ConfigError(
            f"no square picture has up to {most} x {most} tokens. Remedy: check the image processor of the checkpoint"
        )

    def size_of(self, tokens: int) -> tuple[int, int]:
        """Return width and height of a picture with about `tokens` tokens, within the image limit."""
        tokens = min(tokens, self._preprocessor.info.item_tokens_max)
        rows = max(math.isqrt(tokens), 1)
        return tokens // rows * self._unit, rows * self._unit

    def pixels_of(self, tokens: int) -> int:
        """Return the pixels of a picture with as close to `tokens` tokens as possible."""
        width, height = self.size_of(self.tokens_of(tokens))
        return width * height

    def tokens_of(self, tokens: int) -> int:
        """Return the exact token count of the picture closest to `tokens`."""
        return self._preprocessor.plan_image(*self.size_of(tokens)).tokens

    def text(self, content: int, tokens: int) -> list[int]:
        """Return ordinary tokens; of two texts with the same content, one is a prefix of the other."""
        rng = Random(content)  # noqa: S311 - a load, not a secret
        return rng.choices(self._ordinary, k=tokens)

    def picture(self, key: str, tokens: int) -> str:
        """Return the picture of a key with about `tokens` tokens, as a `data:` URL."""
        seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
        return draw_picture(seed, *self.size_of(tokens), "JPEG", quality=85)

    def fit(self, workload: Workload) -> Workload:
        """Return the workload with the sizes of real requests close to it, materialized."""
        arrivals = [self.fit_arrival(arrival) for arrival in workload]
        return Workload(workload.name, lambda: iter(arrivals), len(arrivals), workload.notes)

    def fit_arrival(self, arrival: Arrival) -> Arrival:
        """Return an arrival with the real sizes of its pictures, and a token between adjacent ones.

        Raises:
            ConfigError: If it has a video.
        """
        prompt: list[PromptPart] = []
        for part in arrival.prompt:
            if type(part) is Image:
                if prompt and type(prompt[-1]) is Image:
                    prompt.append(SPACE)
                prompt.append(Image(part.key, self.tokens_of(part.tokens)))
            elif type(part) is Video:
                raise ConfigError(
                    f"{arrival.request_id}: no videos can be sent. Remedy: a trace of texts and images"
                )
            else:
                prompt.append(part)
        return msgspec.structs.replace(arrival, prompt=tuple(prompt))

    def pictures(self, arrival: Arrival) -> list[str]:
        """Return the pictures of an arrival, in order."""
        return [self.picture(arrival.key_of(image), image.tokens) for image in arrival.images]

    def call(
        self, arrival: Arrival, pictures: list[str], replies: Sequence[Sequence[int]] = ()
    ) -> dict[str, Any]:
        """Return the arguments of `Engine.generate` for a fitted arrival; see `prompt` and `pictures`."""
        return {
            "prompt": self.prompt(arrival, replies),
            "images": pictures,
            "sampling": SamplingParams(
                max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True
            ),
            "request_id": arrival.request_id,
            "priority": arrival.priority,
            "ttft_target_ms": arrival.ttft_target_ms,
            "cache_salt": arrival.salt,
            "tenant": arrival.tenant,
            "session": arrival.conversation,
            "adapter": arrival.adapter,
        }

    def prompt(self, arrival: Arrival, replies: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the prompt of an arrival with one placeholder per image.

        `replies` are the outputs of earlier turns.
        """
        ids: list[int] = []
        left = list(replies)
        for part in arrival.prompt:
            if type(part) is Text:
                ids += self.text(part.content, part.tokens)
            elif type(part) is Image:
                ids.append(self._preprocessor.info.placeholder)
            else:
                # Without the turn in the trace, any text is as good.
                reply = left.pop(0) if left else self.text(0, part.tokens)
                ids += reply[: part.tokens]
        return ids


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class EngineObservations:
    """Records the events in an engine.

    Attributes:
        jobs: Busy periods of threads that prepare requests.
        recorder: The engine's recorder, if any; gets all events as well.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self.jobs: list[ObservedJob] = []
        self.recorder: EventRecorder | None = None
        self._decided: dict[str, list[tuple[int, Decision]]] = {}
        self._results: dict[str, list[tuple[int, GenerateResult | EncodeResult]]] = {}
        self._lost = ""

    def record_event(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        """Record decisions; part of the recorder interface."""
        if isinstance(event, GroupLost):
            self._lost = str(event.failure)
        for command in commands:
            if type(command) is Decide:
                self._decided.setdefault(command.group, []).append((now_ns, command.decision))
        if self.recorder is not None:
            self.recorder.record_event(event, now_ns, commands)

    def close(self) -> None:
        """Close the recorder."""
        if self.recorder is not None:
            self.recorder.close()

    def note_result(self, group: str, result: GenerateResult | EncodeResult) -> None:
        """Record a result at its arrival."""
        self._results.setdefault(group, []).append((self.now_ns(), result))

    def observation(self, rounds_ns: list[int], requests: list[ObservedRequest]) -> Observation:
        """Return the observation since the start of the first round, including the observed requests of clients.

        Raises:
            GroupLostError: When a group was lost meanwhile, since the work of its ranks is then
                unknown.
        """
        if self._lost:
            raise GroupLostError(f"ranks were lost while they were measured: {self._lost}")
        steps = [
            step for group, results in self._results.items() for step in self._read(group, results)
        ]
        since_ns = rounds_ns[0]
        return Observation(
            rounds_ns=rounds_ns,
            steps=[step for step in steps if step.decided_ns >= since_ns],
            jobs=[job for job in self.jobs if job.start_ns >= since_ns],
            requests=[request for request in requests if request.received_ns >= since_ns],
        )

    def _read(
        self, group: str, results: Sequence[tuple[int, GenerateResult | EncodeResult]]
    ) -> list[ObservedStep]:
        steps: list[ObservedStep] = []
        lengths: dict[int, int] = {}
        # The last decisions may have no result yet.
        for (decided_ns, decision), (ended_ns, result) in zip(
            self._decided[group], results, strict=False
        ):
            if isinstance(decision, EncodeDecision):
                sample: EncodeSample | GenerateSample = encode_sample(decision, result.busy_ns)
                paused = 0 < decision.time_slice_ns < result.busy_ns
            else:
                assert isinstance(result, GenerateResult)
                yielded = np.flatnonzero(np.frombuffer(result.tokens, np.int32) >= 0).tolist()
                sample = generate_sample(decision, yielded, lengths, result.busy_ns)
                paused = False
            steps.append(
                ObservedStep(
                    group=group,
                    sample=sample,
                    decided_ns=decided_ns,
                    ended_ns=ended_ns,
                    paused=paused,
                )
            )
        return steps


class ObservedThreads(ThreadPoolExecutor):
    """A thread pool that records its busy periods."""

    def __init__(self, threads: int, watch: EngineObservations) -> None:
        super().__init__(threads, thread_name_prefix="media")
        self._watch = watch

    def submit(
        self,
        fn: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Submit a call."""

        def run() -> Result:
            start_ns = self._watch.now_ns()
            try:
                return fn(*args, **kwargs)
            finally:
                self._watch.jobs.append(ObservedJob(start_ns, self._watch.now_ns()))

        return super().submit(run)


class ObservedEngine(Engine):
    """An `Engine` with observations of its ranks and threads in `watch`."""

    def __init__(
        self,
        config: Config,
        *,
        on_progress: Progress | None = None,
        environment: Environment | None = None,
    ) -> None:
        around = environment or Environment()
        watch = self.watch = EngineObservations(around.now_ns)

        def open_record(config: Config, kernel: Scheduler) -> EventRecorder:
            watch.recorder = around.open_record(config, kernel)
            return watch

        def make_media(
            preprocessor: Preprocessor,
            store: PixelStore,
            settings: MediaConfig,
            pruning: Pruning | None,
        ) -> MediaPipeline:
            threads = ObservedThreads(settings.threads, watch)
            return MediaPipeline(preprocessor, store, settings, pruning, executor=threads)

        watched = dataclasses.replace(around, open_record=open_record)
        if environment is None:
            watched = dataclasses.replace(watched, make_media=make_media)
        super().__init__(config, on_progress=on_progress, environment=watched)

    def _worker_groups(
        self, arena: Arena, launcher: Launcher, sizing: Sizing, events: WorkerGroupEvents
    ) -> list[WorkerGroup]:
        def on_result(group: str, result: GenerateResult | EncodeResult) -> None:
            self.watch.note_result(group, result)
            events.on_result(group, result)

        observed = msgspec.structs.replace(events, on_result=on_result)
        return super()._worker_groups(arena, launcher, sizing, observed)


FLOOD = -1.0
"""Load of a run in which all requests are sent at once."""
FLOOD_PROBE = 64
FLOOD_MOST = 400
"""Maximum number of requests in preparation, with a margin."""
WARM_UP = 3
SMALL = "small"
"""Name of the default workload."""
SMALL_OUTPUTS = 32
FIRST_TEXT = 1 << 41
"""First text number, not used by other workloads."""


class FidelityRun(msgspec.Struct, frozen=True, kw_only=True):
    """Client latencies, real or simulated, in milliseconds, and requests per second."""

    finished: int
    failed: dict[str, int]
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    requests_s: float


LIMITS = {"ttft_p50": 0.1, "ttft_p95": 0.2, "tpot_p50": 0.1, "tpot_p95": 0.2, "requests_s": 0.05}
"""Accepted error of each figure, as a share of the real one."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load, real and simulated.

    Attributes:
        load: Share of the capacity, or `FLOOD` for its measurement.
        rate: Requests sent per second.
        slowness: By stage, the ratio of step times in the real run to the cost model, for steps
            that ran alone: the change of the machine since calibration.
        adjusted: A simulation with a cost model slowed down by this ratio: shows the simulation's
            own error.
        others: Cores kept busy by other programs during the real run, which are not simulated.
        late_ms: Maximum delay between planned and actual sending of a request.
    """

    load: float
    rate: float
    requests: int
    real: FidelityRun
    simulated: FidelityRun
    slowness: dict[str, float]
    adjusted: FidelityRun
    others: float
    late_ms: float

    @property
    def is_flood(self) -> bool:
        """Whether all requests were sent at once."""
        return self.load == FLOOD

    def errors(self, side: FidelityRun) -> dict[str, float]:
        """Return the relative errors of a simulation: -0.1 for 10 % too low."""
        real = {name: getattr(self.real, name) for name in LIMITS}
        return {name: getattr(side, name) / one - 1 if one else 0.0 for name, one in real.items()}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Client view of a request: nanoseconds from the start of the workload, and output tokens."""

    planned_ns: int
    sent_ns: int
    first_ns: int
    last_ns: int
    outputs: int


class TraceClient:
    """Sends a workload to an engine in real time."""

    def __init__(self, engine: Engine, now_ns: Callable[[], int]) -> None:
        self.seen: list[Seen] = []
        self.failed: dict[str, int] = defaultdict(int)
        self._engine = engine
        self._now_ns = now_ns
        self._began_ns = 0

    async def send_workload(
        self, texts: RequestTexts, workload: Workload, advanced: Callable[[], None]
    ) -> None:
        """Send all requests and read the outputs; the turns of a conversation run one after another."""
        talks: dict[str, list[Arrival]] = {}
        for arrival in workload:
            talks.setdefault(arrival.conversation or arrival.request_id, []).append(arrival)
        pictures = {
            arrival.request_id: texts.pictures(arrival)
            for turns in talks.values()
            for arrival in turns
        }
        self._began_ns = self._now_ns()
        async with asyncio.TaskGroup() as group:
            for turns in talks.values():
                group.create_task(self._talk(texts, turns, pictures, advanced))

    async def _talk(
        self,
        texts: RequestTexts,
        turns: Sequence[Arrival],
        pictures: dict[str, list[str]],
        advanced: Callable[[], None],
    ) -> None:
        replies: list[list[int]] = []
        ended_ns = 0
        for arrival in turns:
            due_ns = arrival.at_ns
            if replies:
                due_ns = max(due_ns, ended_ns + arrival.think_ns)
            await asyncio.sleep((due_ns - self._since_ns()) / 1e9)
            call = texts.call(arrival, pictures[arrival.request_id], replies)
            replies.append(await self._ask(call, due_ns, arrival.leaves_ns))
            ended_ns = self._since_ns()
            advanced()

    def _since_ns(self) -> int:
        return self._now_ns() - self._began_ns

    async def _ask(self, call: dict[str, Any], due_ns: int, leaves_ns: int | None) -> list[int]:
        sent_ns, first_ns, token_ids = self._since_ns(), 0, list[int]()
        try:
            async with asyncio.timeout(None if leaves_ns is None else leaves_ns / 1e9):
                async for delta in await self._engine.generate(**call):
                    token_ids += delta.token_ids
                    first_ns = first_ns or self._since_ns()
        except (RequestRefused, RequestFailed, TimeoutError) as error:
            self.failed[LEFT if isinstance(error, TimeoutError) else error.code] += 1
            return token_ids
        self.seen.append(
            Seen(
                planned_ns=due_ns,
                sent_ns=sent_ns,
                first_ns=first_ns,
                last_ns=self._since_ns(),
                outputs=len(token_ids),
            )
        )
        return token_ids

    def side(self) -> FidelityRun:
        """Return the figures.

        Raises:
            ConfigError: If no request was served.
        """
        if not (seen := self.seen):
            raise ConfigError(
                f"no request was served: {dict(self.failed)}. Remedy: requests that the configuration can serve"
            )
        ttft = [(one.first_ns - one.planned_ns) / 1e6 for one in seen]
        tpot = [
            (one.last_ns - one.first_ns) / 1e6 / (one.outputs - 1)
            for one in seen
            if one.outputs > 1
        ]
        first_ns = min(one.planned_ns for one in seen)
        return FidelityRun(
            finished=len(seen),
            failed=dict(self.failed),
            ttft_p50=_share(ttft, 50),
            ttft_p95=_share(ttft, 95),
            tpot_p50=_share(tpot, 50),
            tpot_p95=_share(tpot, 95),
            requests_s=len(seen) / ((max(one.last_ns for one in seen) - first_ns) / 1e9),
        )


def _share(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


def side_of(outcome: SimulationOutcome) -> FidelityRun:
    """Return the figures of a simulation."""
    figures = outcome.figures
    return FidelityRun(
        finished=figures.finished,
        failed=figures.failed,
        ttft_p50=figures.ttft_ms.p50,
        ttft_p95=figures.ttft_ms.p95,
        tpot_p50=figures.tpot_ms.p50,
        tpot_p95=figures.tpot_ms.p95,
        requests_s=figures.requests_s,
    )


class Comparison:
    """Runs workloads on a started engine and in simulations of it."""

    def __init__(
        self,
        engine: ObservedEngine,
        cost: CostModel,
        *,
        seed: int = 0,
        texts: RequestTexts | None = None,
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._seed = seed
        self._now_ns = engine.watch.now_ns
        self._dresser = texts or RequestTexts(engine.preprocessor)
        blocks: int = engine.statistics()["generate"]["blocks_total"]
        self._kv_tokens = blocks * engine.config.generate.block_size
        self._runs = 0

    async def warm_up(self, workload: Workload) -> None:
        """Send the first requests of a workload once, one after another."""
        client = TraceClient(self._engine, self._now_ns)
        for arrival in self._own(workload.first(WARM_UP)):
            await client.send_workload(self._dresser, workload_of("", [arrival]), lambda: None)

    def _own(self, workload: Workload) -> list[Arrival]:
        """Return arrivals with a new cache salt, so that caches hold nothing of an earlier run."""
        self._runs += 1
        return [
            msgspec.structs.replace(one, cache_salt=f"run {self._runs} {one.salt}")
            for one in self._dresser.fit(workload)
        ]

    def simulate(self, workload: Workload, cost: CostModel | None = None) -> SimulationOutcome:
        """Simulate a workload on a model of the engine, with its cost model or another."""
        return simulate(
            self._engine.config,
            workload,
            cost=cost or self._cost,
            seed=self._seed,
            info=self._engine.info,
            kv_tokens=self._kv_tokens,
        )

    def flood_of(self, workload: Workload, seconds: float) -> Workload:
        """Return the first requests of a workload, all at once: as many as should take `seconds`."""
        most = max(int(self.capacity_of(workload) * seconds), 1)
        return _at_once(workload.first(min(most, FLOOD_MOST)))

    def capacity_of(self, workload: Workload) -> float:
        """Return the engine's capacity in requests per second, by simulation of the first requests."""
        probe = self._dresser.fit(_at_once(workload.first(FLOOD_PROBE)))
        return self.simulate(probe).figures.requests_s

    async def compare_workload(
        self, workload: Workload, load: float, advanced: Callable[[], None] = lambda: None
    ) -> Run:
        """Run a workload on the engine, then simulate it."""
        own = self._own(workload)
        fitted = workload_of(workload.name, own)
        client, others = (
            TraceClient(self._engine, self._now_ns),
            OtherLoad(lambda: self._engine.rank_pids),
        )
        began_ns = self._now_ns()
        await client.send_workload(self._dresser, fitted, advanced)
        busy = others.cores()
        slow = slowness(self._cost, self._engine.watch.observation([began_ns], []))
        span_s = max(max(one.at_ns for one in own) / 1e9, 1e-9)
        return Run(
            load=load,
            rate=0.0 if load == FLOOD else len(own) / span_s,
            requests=len(own),
            real=client.side(),
            simulated=side_of(self.simulate(fitted)),
            slowness=slow,
            adjusted=side_of(self.simulate(fitted, slower(self._cost, **slow))),
            others=busy,
            late_ms=max((one.sent_ns - one.planned_ns) / 1e6 for one in client.seen),
        )


def _at_once(workload: Workload) -> Workload:
    return workload_of(
        "flood", [msgspec.structs.replace(one, at_ns=0, think_ns=0) for one in workload]
    )


def small_requests(seed: int, requests: int) -> Workload:
    """Return requests that even a small machine serves many of: a third texts, the others with one or two images."""

    def prompt(rng: Random, number: int) -> tuple[PromptPart, ...]:
        images = [
            Image(f"{number}/{index}", rng.randint(32, 256))
            for index in range(rng.choice((0, 1, 1, 2, 1, 0)))
        ]
        return (*images, Text(FIRST_TEXT + number, rng.randint(16, 256)))

    return independent(
        SMALL,
        seed=seed,
        requests=requests,
        gaps=poisson(1.0),
        prompt=prompt,
        output_tokens=SMALL_OUTPUTS,
    )


def at_rate(workload: Workload, rate: float, seconds: float) -> Workload:
    """Return the first requests of a workload at a given rate, enough for `seconds` if it has that many."""
    arrivals = list(workload.first(max(int(rate * seconds), 2)))
    first_ns = arrivals[0].at_ns
    wanted_ns = (len(arrivals) - 1) / rate * 1e9
    factor = wanted_ns / max(arrivals[-1].at_ns - first_ns, 1)
    return workload_of(
        workload.name,
        [
            msgspec.structs.replace(one, at_ns=int((one.at_ns - first_ns) * factor))
            for one in arrivals
        ],
    )
