"""Several ranks compared with one; failures of a rank: the others fail at once, and the next attempt works again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed

from tests.patience import NEVER_S, PATIENCE_S, wait_until
from tests.workers.driver import Checkpoints, Driver, Question, Stages, drawn_image
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks, make_four_heads, outcome
from tests.workers.properties import thorough
from tests.workers.test_vision import empty_pages, jobs_of
from vsched.errors import DeviceOutOfMemory
from vsched.types import SamplingParams
from vsched.wire import SizeKv
from vsched.worker.contract import WorkerSettings
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits
from vsched_workers import language
from vsched_workers.backends.reference.backend import GlooCollectives
from vsched_workers.families.qwen_image import image_plan
from vsched_workers.parallel.rank_group import RankGroup

pytestmark = pytest.mark.slow

T = TypeVar("T")

OUT_OF_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory")
QUESTION = [Question("What is in the image?", [drawn_image(1, 90, 60)], count=6)]


def failing_once(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    errors = [error]

    def call(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*arguments, **options)

    return call


Fault = tuple[Any, str, Exception]
"""The first call of an attribute of an object fails."""


def attempts_with(faults: Sequence[Fault], run: Callable[[], T], *, here: bool) -> list[T]:
    """Run once with each fault, if this rank has them, and once without it."""
    found = []
    for owner, name, error in faults:
        with pytest.MonkeyPatch.context() as patch:
            if here:
                patch.setattr(owner, name, failing_once(getattr(owner, name), error))
            found.append(run())
        found.append(run())
    return found


def sums(settings: WorkerSettings) -> tuple[list[float], list[float], list[bytes]]:
    group = RankGroup(settings, "generate", GlooCollectives())
    torch.manual_seed(settings.rank)
    numbers = [torch.rand(3, count) for count in (5, 1 << 17)]
    with group.together(), torch.inference_mode():
        found = [group.all_reduce(each.clone()) for each in numbers]
        ordered = group.all_gather(torch.full((2, 2), float(settings.rank)))
        few = group.all_reduce(torch.full((4,), float(1 + settings.rank)))
    return few.tolist(), ordered[0].tolist(), [each.numpy().tobytes() for each in found]


@pytest.mark.parametrize("size", [2, 4])
def test_group_adds_up_and_lays_side_by_side(ranks: Ranks, size: int) -> None:
    """Every rank has bit-identical results; a large tensor of four ranks uses gloo's sum."""
    found = ranks.run(sums, size=size)
    assert found[0][0] == [size * (size + 1) / 2] * 4
    assert found[0][1] == [float(rank) for rank in range(size) for _ in range(2)]
    assert all(each == found[0] for each in found)


class LateGroup:
    """A group as on GPUs, without peers: collectives are asynchronous, and an aborted one leaves arbitrary data."""

    exchanges = False
    wakes_peers = False

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def connect(self, _store: Any, _rank: int, _size: int, *, timeout_s: float) -> LateGroup:
        return self

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        if not self.aborted.is_set():
            tensors[0].mul_(2)
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def late(tmp_path: Path) -> tuple[RankGroup, LateGroup, Any]:
    """Return rank 0 of two, its connection, and the store as seen by rank 1."""
    distributed: Any = torch.distributed
    store: Any = distributed.FileStore(str(tmp_path / "group-generate-0"), 2)
    store.set("step/1", "0")
    settings = WorkerSettings(ranks=2, rank=0, rendezvous=str(tmp_path / "group"))
    connected = LateGroup()
    return RankGroup(settings, "generate", connected), connected, store


@pytest.mark.parametrize("broken", [True, False])
def test_error_of_an_aborted_collective_is_blamed_on_the_other_rank(
    late: tuple[RankGroup, LateGroup, Any], broken: bool
) -> None:
    """On GPUs a step continues with such data until an error or the vote; the reported reason is the first failure."""
    group, connected, store = late

    def step() -> None:
        with group.together():
            store.set("failed", "1 memory")
            assert connected.aborted.wait(PATIENCE_S)
            if broken:
                raise FloatingPointError("nothing to draw from")

    assert outcome(step).startswith(
        "DeviceOutOfMemory: another rank of the group, 1, ran out of memory"
    )
    assert store.get("failed") == b"1 memory"


def test_first_failure_of_this_rank_is_reported(late: tuple[RankGroup, LateGroup, Any]) -> None:
    group, _, store = late
    with pytest.raises(FloatingPointError), group.together():
        raise FloatingPointError("nothing to draw from")
    assert store.get("failed") == b"0 FloatingPointError"


def lose(settings: WorkerSettings, how: str) -> str:
    """Run one collective; then rank 1 is gone, or is silent until the other one's timeout."""
    timeout_s = 2.0 if how == "deaf" else NEVER_S  # suffices to connect if both are there
    on_rank.enter(RankGroup(settings, "both are there", GlooCollectives()))
    group = RankGroup(settings, "generate", GlooCollectives(), timeout_s=timeout_s)
    on_rank.enter(group)
    over = Path(f"{settings.rendezvous}-over")
    if settings.rank == 0:
        found = outcome(lambda: on_rank.enter(group))
        over.touch()
        return found
    if how == "gone":
        group._group = group._store = None
    wait_until(over.exists)
    return ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("gone", "connection to another rank of the group is gone"),
        ("deaf", "value over 2, limit 2. Remedy"),
    ],
)
def test_group_is_lost_with_a_rank_that_is_gone_or_silent(
    ranks: Ranks, how: str, message: str
) -> None:
    """Closed connections without a reason are not out-of-memory; the timeout of silence is in the message."""
    assert message in ranks.run(lose, how)[0]


def meet_at_another_step(settings: WorkerSettings) -> str:
    group = RankGroup(settings, "generate", GlooCollectives())
    group._agreed = settings.rank
    return outcome(lambda: on_rank.enter(group))


def test_group_meets_at_one_step_only(ranks: Ranks) -> None:
    """Ranks at different steps notice when they connect."""
    found = ranks.run(meet_at_another_step)
    assert found == ["RankDesync: the ranks of a group meet after [0, 1] steps"] * 2


def generate_with_faults(
    settings: WorkerSettings, path: str, failing: int
) -> tuple[list[str], list[int]]:
    """Fail at each point of a step, and run it again each time, until a request is complete."""
    stage = on_rank.load(settings, path)
    worker: Any = stage.generator
    driver = on_rank.driver_of(settings, stage, 16)
    running = driver.start(0, QUESTION[0])
    faults = [
        (language, "pack", OUT_OF_MEMORY),
        (worker.module.layers[1].mlp, "forward", OUT_OF_MEMORY),
        (worker, "_head", OUT_OF_MEMORY),
        (language, "choose_tokens", OUT_OF_MEMORY),
    ]
    here = settings.rank == failing
    seen = attempts_with(faults, lambda: outcome(lambda: driver.step([running])), here=here)
    while len(running.output) < running.budget:
        driver.step([running])
    return seen, running.output


@pytest.mark.parametrize("failing", [0, 1])
def test_step_fails_on_every_rank_and_can_be_run_again(
    ranks: Ranks, checkpoints: Checkpoints, stages: Stages, failing: int
) -> None:
    """Before the first collective, between two, and after the last; the tokens are unchanged."""
    found = ranks.run(generate_with_faults, str(checkpoints("nano25")), failing)
    wanted = Driver(stages("nano25"), chunk=16).run(QUESTION)[0].output
    for rank, (seen, tokens) in enumerate(found):
        assert tokens == wanted
        words = "memory ran out while running a step" if rank == failing else f"{failing}, ran out"
        assert seen[1::2] == [""] * 4
        assert all(each.startswith("DeviceOutOfMemory") and words in each for each in seen[::2])


def encode_with_faults(settings: WorkerSettings, path: str) -> tuple[list[str], Any]:
    stage = on_rank.load(settings, path)
    embeddings = empty_pages(stage.info)
    encoder: Any = stage.encoder
    faults: list[Fault] = [
        (encoder._tower.module.blocks[1], "forward", OUT_OF_MEMORY),
        (encoder._tower.module, "forward", ValueError("shape")),
    ]
    here = settings.rank == 1
    encode = functools.partial(encoder.encode, jobs_of(stage), embeddings)
    return attempts_with(faults, lambda: outcome(encode), here=here), embeddings


def test_encode_fails_on_every_rank_and_can_be_run_again(
    ranks: Ranks, checkpoints: Checkpoints, stages: Stages
) -> None:
    """The batch fails on all ranks; the next one is encoded, and only the first rank writes."""
    (seen, rows), (own, nothing) = ranks.run(encode_with_faults, str(checkpoints("nano3")))
    assert seen[0] == "DeviceOutOfMemory: another rank of the group, 1, ran out of memory."
    assert own[0].startswith("DeviceOutOfMemory: memory ran out while encoding images")
    assert seen[1:] == ["", "PeerFailed: another rank of the group, 1, failed: ValueError", ""]
    assert own[1:] == ["", "ValueError: shape", ""]
    stage = stages("nano3")
    wanted = empty_pages(stage.info)
    assert (nothing == wanted).all()
    stage.encoder.encode(jobs_of(stage), wanted)
    np.testing.assert_allclose(rows.view(np.float32), wanted.view(np.float32), rtol=1e-3, atol=1e-4)


def size_with_faults(settings: WorkerSettings, path: str) -> list[tuple[str, str]]:
    """Carry out orders as from the leader; rank 1 fails in three of them."""
    stage = on_rank.load(settings, path)
    load = StepLimits(slots=4, batch_tokens=64, chunk_tokens=32, context_tokens=128, block_size=4)
    worker: Any = stage.generator
    sizing = KvBuilder(
        worker, worker._info, load, image=image_plan((1, 4, 4), merge=2, patch=1, channels=1)
    )
    order = SizeKv(256, profile=True, headroom_bytes=1 << 16, probe=True)
    memory = worker.device_memory()._memory
    faults: list[Fault] = [
        (language, "require_available", DeviceOutOfMemory("no room")),
        (memory, "hold", DeviceOutOfMemory("no headroom")),
        (worker, "prepare", MemoryError()),
    ]
    found = attempts_with(faults, lambda: sizing.carry_out(order), here=settings.rank == 1)
    return [(sized.outcome, sized.message) for sized in found]


def test_sizing_fails_on_every_rank_and_goes_on(ranks: Ranks, checkpoints: Checkpoints) -> None:
    """Cache, headroom or profiling run: a failure of one rank fails all; frugal steps run in lockstep."""
    first, second = ranks.run(size_with_faults, str(checkpoints("nano3")))
    outcomes = ["out_of_memory", "fits"] * 3
    assert [each for each, _ in first] == [each for each, _ in second] == outcomes
    assert all("another rank of the group, 1, ran out" in words for _, words in first[::2])
    assert "no room" in second[0][1]
    assert "no headroom" in second[2][1]


QUESTIONS = [
    Question("What is in the image?", [drawn_image(1, 90, 60)]),
    Question("How many objects are there?", sampling=SamplingParams(seed=7, temperature=0.8)),
    Question("Compare.", [drawn_image(2, 64, 64), drawn_image(3, 200, 70)], count=8),
]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("four-heads")
    return functools.cache(lambda size: make_four_heads(root / size, size))


@pytest.mark.parametrize(
    ("size", "count"), [("nano25", 2), ("nano3", 4), *thorough(("nano3", 2), ("nano25", 4))]
)
def test_ranks_equal_one(
    ranks: Ranks, checkpoints: Checkpoints, four_heads: Checkpoints, size: str, count: int
) -> None:
    """Chunked prefill and decode in one step, images, deepstack, preemption, a seeded request: the same tokens."""
    path = (checkpoints if count == 2 else four_heads)(size)
    tokens, alone, _ = on_rank.answer(WorkerSettings(threads=1), str(path), QUESTIONS)
    for found, embeddings, _ in ranks.run(on_rank.answer, str(path), QUESTIONS, size=count):
        assert found == tokens
        np.testing.assert_allclose(
            embeddings.view(np.float32), alone.view(np.float32), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    ("size", "fails"),
    [("nano25", "early"), ("nano3", "at the end"), *thorough(("nano25", ""), ("nano3", ""))],
)
def test_ranks_pause_in_a_batch(
    ranks: Ranks, checkpoints: Checkpoints, size: str, fails: str
) -> None:
    """All ranks pause at the same layer, with steps in between; a failure of one fails all."""
    found = ranks.run(on_rank.encode_in_parts, str(checkpoints(size)), QUESTIONS[0], fails)
    errors = ["ValueError", "PeerFailed"] if fails else ["", ""]
    assert [error.partition(":")[0] for error, _ in found] == errors
    assert all(same for _, same in found)
