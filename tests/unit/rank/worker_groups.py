"""Worker groups and shells of ranks that run the fake plug-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.patience import NEVER_S, patience
from tests.unit.rank.fake_plugin import KV_BYTES, LAYOUT, NAME, Behaviour, model_info
from vsched.aio.kv_sizing import Sizing
from vsched.aio.launcher import Launcher, LocalLauncher
from vsched.aio.shell import Shell, start_shell
from vsched.aio.streams import ChoiceInputs, TokenStream
from vsched.aio.worker_groups import WorkerGroup, WorkerGroupEvents
from vsched.config.sections import DeadlinesConfig
from vsched.kernel import SchedulerLimits
from vsched.policy import MemoryPolicy, MemoryView
from vsched.testing import default_policies
from vsched.transport.arena import Arena
from vsched.types import Request, SamplingParams, stage_of
from vsched.wire import EncodeResult, GenerateResult
from vsched.worker.contract import WorkerSettings
from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec, StepLimits
from vsched_policies.memory import Pinned

LIMITS = DeadlinesConfig(ready_s=NEVER_S, step_s=NEVER_S, heartbeat_s=0.2, rank_timeout_s=60)
"""Tests of a deadline set their own."""
KV_TOKENS = 512


def limits(**changes: float) -> DeadlinesConfig:
    return msgspec.structs.replace(LIMITS, **changes)


class Received:
    """Events of a worker group."""

    def __init__(self) -> None:
        self.results: list[tuple[str, GenerateResult | EncodeResult]] = []
        self.lost: list[tuple[list[str], str]] = []
        self.progress: list[tuple[str, str, float]] = []
        self.changed = asyncio.Event()

    @property
    def events(self) -> WorkerGroupEvents:
        return WorkerGroupEvents(
            on_result=lambda group, result: self._add(self.results, (group, result)),
            on_lost=lambda groups, failure: self._add(self.lost, (list(groups), str(failure))),
            on_progress=lambda *said: self._add(self.progress, said),
        )

    def _add(self, where: list, what: object) -> None:  # type: ignore[type-arg]
        where.append(what)
        self.changed.set()

    async def wait_until(self, condition: Callable[[], object]) -> None:
        async with patience():
            while not condition():
                self.changed.clear()
                await self.changed.wait()


ENCODE = EncodeRole(
    address="", plugin=NAME, settings=WorkerSettings(), items=4, tokens=0, pixels_max=0
)
LOAD = StepLimits(slots=4, batch_tokens=64, chunk_tokens=16, context_tokens=400, block_size=4)


def make_sizing(
    worker_groups: Sequence[Sequence[str]],
    *,
    policy: MemoryPolicy | None = None,
    ranks: int = 1,
    pausing: bool = True,
) -> Sizing:
    """Return the KV cache sizing for worker groups of these groups, each with this number of ranks."""
    encoders = [
        group for groups in worker_groups for group in groups if stage_of(group) == "encode"
    ]
    encoder_of = {
        groups[-1]: groups[0] if len(groups) == 2 else ""
        for groups in worker_groups
        if stage_of(groups[-1]) == "generate"
    }
    return Sizing(
        policy or Pinned(tokens=KV_TOKENS),
        MemoryView(
            bytes_per_token=KV_BYTES,
            block_size=LOAD.block_size,
            context_tokens=LOAD.context_tokens,
            batch_tokens=LOAD.batch_tokens,
            slots=LOAD.slots,
        ),
        encode=dict.fromkeys(encoders, ranks),
        generate=encoder_of,
        pausing=pausing,
        host_free=lambda: 1 << 60,
    )


class Place:
    """The place of ranks: an arena, a directory for sockets, a launcher."""

    def __init__(self, run_dir: Path, launcher: Launcher | None = None) -> None:
        self.run_dir = run_dir
        self.arena = Arena.create(LAYOUT)
        self.launcher = launcher or LocalLauncher(str(run_dir))

    def worker_group(
        self,
        events: WorkerGroupEvents,
        *,
        groups: Sequence[str] = ("generate",),
        behaviour: Behaviour | None = None,
        ranks: int = 1,
        limits: DeadlinesConfig = LIMITS,
        sizing: Sizing | None = None,
        memory_limit_bytes: int = 0,
    ) -> WorkerGroup:
        """Return a worker group of these groups; all of its ranks behave alike."""
        generate = GenerateRole(address="", plugin=NAME, settings=WorkerSettings(), limits=LOAD)
        template = RankSpec(
            groups=tuple(groups),
            ranks=ranks,
            layout=LAYOUT,
            info=model_info(behaviour),
            timeout_s=limits.rank_timeout_s,
            memory_limit_bytes=memory_limit_bytes,
            encode=ENCODE if stage_of(groups[0]) == "encode" else None,
            generate=generate if stage_of(groups[-1]) == "generate" else None,
        )
        return WorkerGroup(
            template,
            self.launcher,
            self.arena,
            deadlines=limits,
            events=events,
            sizing=sizing or make_sizing([groups], ranks=ranks),
        )

    def close(self) -> None:
        self.launcher.close()
        self.arena.close()


@asynccontextmanager
async def started(place: Place, **options: Any) -> AsyncIterator[tuple[WorkerGroup, Received]]:
    """Yield a worker group that has started, and its events."""
    received = Received()
    worker_group = place.worker_group(received.events, **options)
    async with patience():
        await worker_group.start()
    try:
        yield worker_group, received
    finally:
        await worker_group.stop(grace_s=0)


def limits_for(worker_groups: Sequence[Sequence[str]]) -> Callable[[int], SchedulerLimits]:
    """Return a function from a number of blocks to the kernel's limits for worker groups of these groups."""
    stages = [stage_of(group) for groups in worker_groups for group in groups]

    def limits(blocks: int) -> SchedulerLimits:
        return SchedulerLimits(
            block_size=4,
            blocks=blocks,
            slots=4,
            batch_tokens=64,
            chunk_tokens=16,
            context_tokens=400,
            page_rows=LAYOUT.page_rows,
            pages=LAYOUT.pages,
            encode_items=4,
            waiting=20,
            encoders=stages.count("encode"),
            generators=stages.count("generate"),
        )

    return limits


async def start_groups(
    place: Place,
    groups: Sequence[Sequence[str]],
    *,
    behaviour: Behaviour | None = None,
    limits: DeadlinesConfig = LIMITS,
    ranks: int = 1,
    drain_s: float = 30.0,
) -> Shell:
    """Start a shell of one worker group for each tuple of groups."""
    sizing = make_sizing(groups, ranks=ranks)

    def worker_groups(events: WorkerGroupEvents) -> list[WorkerGroup]:
        made = {"behaviour": behaviour, "ranks": ranks, "limits": limits, "sizing": sizing}
        return [place.worker_group(events, groups=names, **made) for names in groups]  # type: ignore[arg-type]

    return await start_shell(
        worker_groups,
        limits=limits_for(groups),
        policies=default_policies(),
        on_progress=lambda *_: None,
        drain_s=drain_s,
    )


SEPARATE = (("encode",), ("generate",))


@asynccontextmanager
async def shell_of(
    place: Place, *, groups: Sequence[Sequence[str]] = SEPARATE, **options: Any
) -> AsyncIterator[Shell]:
    """Yield a started shell."""
    shell = await start_groups(place, groups, **options)
    try:
        yield shell
    finally:
        await shell.stop()


class Text:
    """A detokenizer that raises after this many tokens, or at the end."""

    def __init__(self, *, push_at: int = 0, flush: Exception | None = None) -> None:
        self._push_at = push_at
        self._flush = flush
        self._taken = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._taken += len(token_ids)
        if self._taken == self._push_at:
            raise ValueError("no such token")
        return "." * len(token_ids)

    def flush(self) -> str:
        if self._flush is not None:
            raise self._flush
        return ""


def generate(
    shell: Shell,
    request: Request,
    *,
    max_tokens: int,
    text: Text | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> TokenStream:
    """Submit a request to this shell and return its stream."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    inputs = ChoiceInputs(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        on_stop=shell.end_request,
        on_end=on_end,
    )
    generation = TokenStream(inputs, lambda **_: text or Text())
    shell.submit(msgspec.structs.replace(request, sampling=sampling), (), generation)
    return generation


async def read(generation: TokenStream, *, at_least: int | None = None) -> list[int]:
    """Read the tokens of a stream, all of them or at least this number."""
    tokens: list[int] = []
    async with patience():
        async for delta in generation:
            tokens += delta.token_ids
            if at_least is not None and len(tokens) >= at_least:
                break
    return tokens


def is_running(pid: int) -> bool:
    """Return True if a process still runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
