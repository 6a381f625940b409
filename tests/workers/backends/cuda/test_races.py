"""All accesses to memory on a GPU are ordered, whatever is delayed; missing waits are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.backends.cuda.races import CapturingBackend, Event, Machine, RaceError, Stream
from tests.workers.batching.test_kv_cache import NOTHING, blocks_of, make_cache, pairs, same
from tests.workers.driver import BLOCK_SIZE, BLOCKS, Checkpoints, Driver, Question, Stage, outputs
from tests.workers.properties import thorough
from tests.workers.test_language import mixed_questions
from vsched.types import SamplingParams
from vsched_workers import language, vision
from vsched_workers.backends.cuda import graphs
from vsched_workers.backends.cuda.backend import CudaBackend
from vsched_workers.backends.cuda.device import CudaSwapArea, RowCopies
from vsched_workers.backends.cuda.graphs import CudaGraphStream
from vsched_workers.batching.kv_cache import KvCache, SwapArea

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    made.stand_in(monkeypatch)
    monkeypatch.setattr(vision, "fetched", lambda rows: rows.cpu())
    with torch.inference_mode(), made:
        yield made


def nothing(*_: object, **__: object) -> None:
    """Replace a wait."""


# --- copies of rows, swapping ---


def fetch_rows(machine: Machine) -> None:
    """Fetch rows repeatedly, fewer and more in the same buffers, and compute with them."""
    copies, rows = RowCopies("cpu"), np.arange(480, dtype=np.uint16).view(np.uint8).reshape(40, 24)
    wanted = [*[list(range(40))] * 3, [3], [39, 0, 7, 7], [1, 2], [5]]
    found = [copies.fetch(rows, np.array(each, dtype=np.int64)).clone() for each in wanted]
    machine.current.synchronize()
    for each, taken in zip(found, wanted, strict=True):
        assert np.array_equal(each.numpy(), rows[taken])


def swap_blocks(machine: Machine) -> None:
    """Swap blocks out, then others back, as the host would, while steps write to every layer of the cache."""
    ours, theirs = make_cache(), make_cache()
    machine.own([*ours.keys, *ours.values])
    areas = CudaSwapArea(ours, 4, device="cpu"), SwapArea(theirs, 4)
    rng = np.random.default_rng(0)
    for _ in range(20):
        blocks, places = rng.permutation(9), rng.permutation(4)
        out = pairs(*zip(blocks[:3].tolist(), places[:3].tolist(), strict=True))
        back = pairs(*zip(places[1:3].tolist(), blocks[4:6].tolist(), strict=True))
        for area, cache in zip(areas, (ours, theirs), strict=True):
            cache.keys[0].add_(1)
            area.copy(out, back)
            cache.values[1].add_(1)
    machine.current.synchronize()
    assert all(same(blocks_of(ours, one), blocks_of(theirs, one)) for one in range(9))


@pytest.mark.parametrize(
    ("subject", "kind", "wait"),
    [
        (fetch_rows, Stream, ""),
        (swap_blocks, Stream, ""),
        (fetch_rows, Stream, "wait_event"),
        (fetch_rows, Event, "synchronize"),
        (fetch_rows, Event, "record"),
        (swap_blocks, Stream, "wait_event"),
        (swap_blocks, Event, "record"),
    ],
)
def test_copies_are_right_and_without_a_wait_a_race(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, subject: Any, kind: type, wait: str
) -> None:
    if wait:
        monkeypatch.setattr(kind, wait, nothing)
    with pytest.raises(RaceError) if wait else nullcontext():
        subject(machine)


def test_swap_area_pins_no_more_than_its_memory(machine: Machine) -> None:
    """And no longer; torch's allocator of pinned memory takes 32 GiB for 20."""
    cache = make_cache()
    area = CudaSwapArea(cache, 5, device="cpu")
    assert [*machine.pinned.values()] == [
        sum(each.nbytes for each in cache.keys + cache.values) // 9 * 5
    ]
    del area
    assert not machine.pinned


def test_host_does_not_wait_for_swapping(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking copy of block numbers would wait for all steps before."""
    to = torch.Tensor.to

    def noted(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        if given and isinstance(given[0], torch.device):
            assert options.get("non_blocking")
        return to(tensor, *given, **options)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    swap_blocks(machine)


# --- captured steps that run ahead, with prefill and encoding ---


class GraphBackend(CapturingBackend):
    """A host with a GPU's graph stream and sampling."""

    argmax = CudaBackend.argmax
    draw = CudaBackend.draw

    def graph_stream(self) -> CudaGraphStream:
        return CudaGraphStream("cpu")

    def swap_area(self, cache: KvCache, blocks: int) -> SwapArea:
        return CudaSwapArea(cache, blocks, device="cpu")


def questions(sampling: SamplingParams) -> list[Question]:
    alone = Question("How many objects are there?", count=22, sampling=sampling)
    return [*mixed_questions(sampling)[:2], alone]


def own_all(machine: Machine, stage: Stage) -> None:
    """Build a KV cache, which belongs to the device like the weights."""
    worker: Any = stage.generator
    worker.build_kv(blocks=BLOCKS, block_size=BLOCK_SIZE)
    cache = worker._cache
    machine.own([*cache.keys, *cache.values, *worker.module.parameters()])
    if stage.vision is not None:
        machine.own(stage.encoder._tower.module.parameters())  # type: ignore[attr-defined]
    worker.prepare = machine.unseen(worker.prepare)


def run_ahead(machine: Machine, stage: Stage, sampling: SamplingParams) -> list[list[int]]:
    """Serve requests that begin and end at different times, and return their tokens."""
    own_all(machine, stage)
    return outputs(Driver(stage, chunk=48, seed=1).run(questions(sampling), arrivals=5))


@pytest.fixture(scope="module")
def stage(checkpoints: Checkpoints) -> Stage:
    """Return a stage with captured steps; `own_all` gives it the cache and the streams of a machine."""
    with pytest.MonkeyPatch.context() as patch:
        Machine().stand_in(patch)
        patch.setattr(
            language, "choose_backend", lambda settings, dtype, _: GraphBackend(settings, dtype)
        )
        return Stage.load(checkpoints("nano25"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [GREEDY, *thorough(SamplingParams(seed=3, temperature=0.8, top_p=0.9))]
)
def test_captured_steps_are_no_race(
    stage: Stage, stages: Callable[..., Stage], machine: Machine, sampling: SamplingParams
) -> None:
    """Steps run ahead, and are used or dropped; the tokens are those of eager steps."""
    found = run_ahead(machine, stage, sampling)
    plain = Driver(machine.unseen(stages)("nano25"), chunk=48, seed=1)
    assert found == outputs(machine.unseen(plain.run)(questions(sampling), arrivals=5))


NUMPY = "numpy of the host and aten.copy_"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "wait", "left_out", "message"),
    [
        (CudaGraphStream, "wait_for_others", nothing, "zeros"),
        (CudaGraphStream, "let_others_wait", nothing, "clone"),
        *thorough(
            (Event, "synchronize", nothing, NUMPY),
            (Event, "record", nothing, NUMPY),
            (graphs, "_HOST_BUFFERS", 1, NUMPY),
        ),
    ],
    ids=[
        "what steps are told before they read it",
        "steps before what reads their results",
        "what is sent before it is overwritten",
        "tokens before they are read",
        "tokens of a step before those of the next",
    ],
)
def test_captured_steps_without_a_wait_are_a_race(
    stage: Stage,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    wait: str,
    left_out: object,
    message: str,
) -> None:
    monkeypatch.setattr(owner, wait, left_out)
    with pytest.raises(RaceError, match=message):
        run_ahead(machine, stage, GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, *thorough(False)])
def test_blocks_are_swapped_in_after_a_step_that_was_started_ahead(
    stage: Stage, machine: Machine, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """It writes to the last block of each of its rows, which another request may have by now."""
    worker: Any = stage.generator
    own_all(machine, stage)
    worker.build_swap(2)
    driver = Driver(stage, chunk=48, seed=1)
    running = machine.unseen(driver.start)(0, Question("How many objects are there?", count=22))
    while worker._captured._in_flight is None:
        driver.step([running])
    if not waits:
        monkeypatch.setattr(CudaGraphStream, "let_others_wait", nothing)
    last = int(driver.tables[running.slot][running.computed // BLOCK_SIZE])
    with nullcontext() if waits else pytest.raises(RaceError):
        worker.swap(NOTHING, pairs((0, last)))


def test_capture_that_fails_leaves_stream_and_allocator_as_they_were(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch before 2.13 leaves its graph stream current, its allocator in the capture, and the pool in use."""
    before, ended = machine.current, []

    @contextmanager
    def failing(_: object, *, stream: Stream, **__: object) -> Iterator[None]:
        machine.current = stream
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    calls = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    for name in calls:
        monkeypatch.setattr(
            torch._C, name, lambda *given, name=name: ended.append((name, *given)), raising=False
        )
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphStream("cpu").capture(lambda: torch.zeros(1))
    assert machine.current is before
    assert ended == [(name, 1, torch.cuda.graph_pool_handle()) for name in calls]


@pytest.mark.usefixtures("machine")
def test_step_in_which_the_host_waits_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its first run may: it compiles kernels, and fills caches."""
    modes, runs = ["default"], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "graph", None)

    def run() -> torch.Tensor:
        runs.append(modes[-1])
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaGraphStream("cpu").capture(run)
    assert runs == ["default", "error"]
    assert modes[-1] == "default"
