"""An engine that records the decisions sent to its ranks, and the duration and time of each step.

Nothing is added to the protocol: results include the busy time of ranks, and the contents of a step
follow from the decisions. Both are only stored while the engine serves, and evaluated afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np

from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Launcher
from vsched.aio.shell import EventRecorder
from vsched.aio.worker_groups import WorkerGroup, WorkerGroupEvents
from vsched.config import Config, MediaConfig
from vsched.engine import Engine, Environment, Progress
from vsched.errors import GroupLostError
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, Decide
from vsched.kernel.decisions import Decision, EncodeDecision
from vsched.kernel.events import Event, GroupLost
from vsched.media import MediaPipeline, PixelStore
from vsched.media.pruning import Pruning
from vsched.sim.cost.model import EncodeSample, GenerateSample
from vsched.sim.cost.observations import (
    Observation,
    ObservedJob,
    ObservedRequest,
    ObservedStep,
    encode_sample,
    generate_sample,
)
from vsched.transport.arena import Arena
from vsched.wire import EncodeResult, GenerateResult
from vsched.worker.contract import Preprocessor

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

    def note(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        """Record decisions; part of the recorder interface."""
        if isinstance(event, GroupLost):
            self._lost = str(event.failure)
        for command in commands:
            if type(command) is Decide:
                self._decided.setdefault(command.group, []).append((now_ns, command.decision))
        if self.recorder is not None:
            self.recorder.note(event, now_ns, commands)

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
