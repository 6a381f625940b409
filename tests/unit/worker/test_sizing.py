"""Orders for the KV cache, carried out on simulated memory, and the profiling run that they contain."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rank.fake_plugin import FakePlugin
from tests.unit.worker.device_fakes import KV_BYTES, LOAD, MIB, MeasuredGenerator, model_info
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.types import ModelInfo
from vsched.wire import SizeKv
from vsched.worker.contract import Batch, ImagePlan, Sampled
from vsched.worker.sizing import (
    KvBuilder,
    chunks_next_to_decodes,
    heap,
    image_for,
    run_profile,
    spread,
)
from vsched.worker.spec import StepLimits

PROBE = SizeKv(4096, profile=True, headroom_bytes=0, probe=True)
BUILD = SizeKv(8192, profile=True, headroom_bytes=16 * MIB)


def sizing_on(
    kind: type[MeasuredGenerator] = MeasuredGenerator, *, state_bytes: int = 0
) -> tuple[KvBuilder, MeasuredGenerator]:
    worker = kind(SimulatedMemory(256 * MIB), state_bytes=LOAD.slots * state_bytes)
    info = msgspec.structs.replace(model_info(), state_bytes=state_bytes)
    return KvBuilder(worker, info, LOAD, rank=3), worker


def test_carry_out_measures_an_attempt() -> None:
    """Inputs of the next attempt: the peak of the profiling run, and the KV bytes as built."""
    sizing, worker = sizing_on()
    worker.row_bytes = MIB
    before = sizing.measure()
    sized = sizing.carry_out(PROBE)
    memory = sized.memory
    assert (sized.outcome, memory.rank, memory.kv_bytes) == ("fits", 3, 4096 * KV_BYTES)
    assert memory.weights_bytes == worker.weights_bytes
    grown = memory.peak_bytes - before.reserved_bytes
    assert grown == 4096 * KV_BYTES + LOAD.batch_tokens * worker.row_bytes
    assert memory.total_bytes == memory.available_bytes + memory.reserved_bytes
    assert sizing.blocks == 256


def test_carry_out_counts_the_states_of_all_slots() -> None:
    """They are allocated and freed with the KV cache, and are not part of its bytes."""
    sizing, worker = sizing_on(state_bytes=MIB)
    assert sizing.measure().state_bytes == 0
    memory = sizing.carry_out(PROBE).memory
    assert (memory.kv_bytes, memory.state_bytes) == (4096 * KV_BYTES, LOAD.slots * MIB)
    memory = sizing.carry_out(BUILD).memory
    assert memory.released_bytes == 4096 * KV_BYTES + LOAD.slots * MIB
    worker._kv.pop()  # the states, which are never dropped
    leaked = sizing.carry_out(PROBE)
    assert leaked.outcome == "leak"
    assert f"at least {8192 * KV_BYTES + LOAD.slots * MIB}" in leaked.message


@pytest.mark.parametrize("failed", [False, True])
def test_carry_out_tears_down_in_order(*, failed: bool) -> None:
    """Graphs, request state, KV and its backends, one release; then everything is built again.

    The error of a failing step must not keep its requests alive, nor the headroom.
    """
    sizing, worker = sizing_on()
    if failed:
        worker.memory.fail_at(4)
    assert sizing.carry_out(BUILD).outcome == ("out_of_memory" if failed else "fits")
    worker.events.clear()
    worker.batches.clear()
    release = worker.memory.release

    def recorded() -> None:
        worker.events.append("release")
        release()

    worker.memory.release = recorded  # type: ignore[method-assign]
    sized = sizing.carry_out(PROBE)
    assert worker.events[:4] == ["drop graphs", "drop kv, 0 requests alive", "release", "build 256"]
    assert sized.memory.released_bytes == 8192 * KV_BYTES
    assert worker.memory.allocated() == worker.weights_bytes + 4096 * KV_BYTES
    assert len(worker.batches) == 3, "the profiling run was repeated, with new state"


def test_carry_out_holds_the_headroom_during_the_profiling_run() -> None:
    """It is held while the steps run, and not after."""
    sizing, worker = sizing_on()
    assert sizing.carry_out(SizeKv(4096, profile=False, headroom_bytes=0)).outcome == "fits"
    assert not worker.batches, "nothing runs if no profile is requested"
    sizing.carry_out(SizeKv(4096, profile=True, headroom_bytes=0))
    plain = list(worker.held_bytes)
    worker.held_bytes.clear()
    sizing.carry_out(SizeKv(4096, profile=True, headroom_bytes=16 * MIB))
    assert [held - 16 * MIB for held in worker.held_bytes] == plain
    assert worker.memory.allocated() == worker.weights_bytes + 4096 * KV_BYTES


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_carry_out_reports_out_of_memory_at_every_allocation(number: int) -> None:
    """KV, headroom and each step: the error always leads to the same outcome, and a smaller order works after it."""
    sizing, worker = sizing_on()
    worker.memory.fail_at(number)
    sized = sizing.carry_out(BUILD)
    assert sized.outcome == "out_of_memory"
    assert "memory ran out on simulated" in sized.message
    assert "8192 tokens" in sized.message
    assert "Remedy" not in sized.message, "the policy has a better one"
    assert sized.memory.kv_bytes == (0 if number == 1 else 8192 * KV_BYTES)
    assert sizing.carry_out(PROBE).outcome == "fits"
    worker.memory.check_invariants()


def test_carry_out_reports_memory_errors_and_raises_defects() -> None:
    """Numpy and Python run out of memory, too; a smaller cache would not help against other errors."""
    sizing, worker = sizing_on()
    errors: list[Exception] = [MemoryError(), ValueError("shapes differ")]

    def step(_batch: object) -> None:
        raise errors.pop(0)

    worker.step = step  # type: ignore[method-assign, assignment]
    assert sizing.carry_out(PROBE).outcome == "out_of_memory"
    with pytest.raises(ValueError, match="shapes differ"):
        sizing.carry_out(PROBE)


@pytest.mark.parametrize("failed", [False, True])
def test_carry_out_calls_a_leak_a_leak(*, failed: bool) -> None:
    """Memory that does not come back is not out-of-memory, even after such a failure; nothing is built on top of it."""
    sizing, worker = sizing_on()
    if failed:
        worker.memory.fail_at(3)
    worker.leaks = True
    assert sizing.carry_out(PROBE).outcome == ("out_of_memory" if failed else "fits")
    sized = sizing.carry_out(BUILD)
    assert (sized.outcome, sized.memory.released_bytes) == ("leak", 0)
    assert f"value 0, limit at least {4096 * KV_BYTES}" in sized.message
    assert worker.events[-1].startswith("drop kv")


def test_carry_out_stresses_contexts_that_the_cache_can_hold() -> None:
    """A probe stands for caches of any size; in another cache a longer sequence is refused on arrival."""
    sizing, worker = sizing_on()
    sizing.carry_out(SizeKv(32, profile=True, headroom_bytes=0, probe=True))
    sizing.carry_out(SizeKv(32, profile=True, headroom_bytes=0))
    assert [context for _, context, *_ in worker.batches if context] == [126, 127, 30, 31]


class Sharing(MeasuredGenerator):
    """A worker of several ranks: records when it informs its peers of a failure."""

    def abort(self) -> None:
        self.events.append("abort")


def test_carry_out_reports_its_failure_to_peers() -> None:
    """A rank whose cache or headroom does not fit leaves no peer waiting in a step.

    When ranks disagreed, successful ones also meet their peers again before anything is built.
    """
    sizing, worker = sizing_on(Sharing)
    for order, outcome, aborts in (
        (SizeKv(4096, profile=True, headroom_bytes=0), "fits", 0),
        (SizeKv(4096, profile=True, headroom_bytes=0, reset_peers=True), "fits", 1),
        (SizeKv(4096, profile=True, headroom_bytes=1 << 40), "out_of_memory", 1),
        (SizeKv(1 << 30, profile=True, headroom_bytes=0), "out_of_memory", 1),
    ):
        worker.events.clear()
        assert sizing.carry_out(order).outcome == outcome
        assert worker.events.count("abort") == aborts
        assert not order.reset_peers or worker.events[0] == "abort"


# --- the profiling run: its steps are as large as any that the kernel may send ---


IMAGE = ImagePlan((), 6)


class FrugalGenerator(MeasuredGenerator):
    frugal = True


class Skipping(MeasuredGenerator):
    skips_layers = True


def run(
    load: StepLimits = LOAD,
    *,
    kind: type[MeasuredGenerator] = MeasuredGenerator,
    image: ImagePlan | None = None,
    blocks: int = 3,
    state_bytes: int = 0,
) -> MeasuredGenerator:
    worker = kind(SimulatedMemory(1024 * MIB))
    worker.build_kv(blocks=blocks, block_size=load.block_size)
    info = msgspec.structs.replace(model_info(), state_bytes=state_bytes)
    run_profile(worker, info, load, blocks=blocks, image=image)
    return worker


def test_profiling_run_prefills_the_whole_budget_and_decodes_every_slot() -> None:
    """As many rows and slots as the kernel enforces, at the longest context, sampler included."""
    worker = run()
    prefill, decode, mixed = worker.batches
    longest = LOAD.context_tokens - 3
    assert [stop for _, stop, _ in prefill[2]] == [longest] * LOAD.slots
    assert sum(stop - start for start, stop, _ in prefill[2]) == LOAD.batch_tokens
    assert decode[:2] == (LOAD.slots, LOAD.context_tokens - 2)
    rows = mixed[0] + sum(stop - start for start, stop, _ in mixed[2])
    assert rows == LOAD.batch_tokens
    assert [special for *_, special in (prefill, decode, mixed)] == [LOAD.slots] * 3
    assert all(one.temperature and one.top_p < 1 and one.logprobs for one in worker.sampling)


@pytest.mark.parametrize("kind", [MeasuredGenerator, FrugalGenerator])
def test_profiling_run_begins_a_sequence_if_layers_keep_a_state(
    kind: type[MeasuredGenerator],
) -> None:
    """With the longest chunk; the other chunks continue at the longest context."""
    assert run(kind=kind, state_bytes=8).batches[-1][2] == [(0, LOAD.chunk_tokens, 0)]


def test_profiling_run_fills_chunks_with_image_rows() -> None:
    """Rows of images cost more than rows of text; one token of text stays between two images."""
    prefill, _, mixed = run(image=IMAGE).batches
    for start, stop, rows in [*prefill[2], *mixed[2]]:
        assert rows >= (stop - start) * 6 // 7 - 1


def test_profiling_run_aliases_blocks_so_that_any_cache_does() -> None:
    """A probe is smaller than the sequences it is run with."""
    assert max(run(blocks=2).tables) == 1


@pytest.mark.parametrize("context_tokens", [1, 2, 4, 5, 16, 17])
def test_profiling_run_runs_the_shortest_contexts(context_tokens: int) -> None:
    load = msgspec.structs.replace(LOAD, context_tokens=context_tokens)
    assert len(run(load, image=IMAGE, blocks=1).batches) >= 3


def test_profiling_run_of_a_frugal_worker_is_short() -> None:
    """One chunk at the longest context stands for all; rows and slots are all there."""
    worker = run(kind=FrugalGenerator, image=IMAGE)
    joining, decode, mixed = worker.batches
    assert worker.events[1:] == [f"layers {n} of step {step}" for step, n in enumerate((0, 2, 2))]
    assert len(joining[2]) == LOAD.slots
    assert decode[:2] == (LOAD.slots, LOAD.context_tokens - 2)
    assert mixed[0] + sum(stop - start for start, stop, _ in mixed[2]) == LOAD.batch_tokens
    assert mixed[2][0][:2] == (LOAD.context_tokens - 3 - 16, LOAD.context_tokens - 3)
    assert all(start == 0 for start, _, _ in mixed[2][1:])


def test_profiling_run_skips_layers_in_the_step_with_a_chunk_in_every_slot() -> None:
    """On a GPU, each of its chunks gathers a long context in every layer; other steps prove all layers."""
    worker = run(kind=Skipping)
    assert worker.events[1:] == ["layers 2 of step 0"]
    assert [len(chunks) for _, _, chunks, _ in worker.batches] == [LOAD.slots, 0, 3]
    assert worker.batches == run().batches


@given(
    slots=st.integers(1, 70),
    more=st.integers(1, 500),
    chunk_tokens=st.integers(1, 200),
    context_tokens=st.integers(1, 300),
)
def test_profiling_run_layouts_use_the_budget_up(
    slots: int, more: int, chunk_tokens: int, context_tokens: int
) -> None:
    """Neither more than the budget, nor less than slots of that many tokens can take."""
    sizes = {"chunk_tokens": chunk_tokens, "context_tokens": context_tokens}
    load = StepLimits(slots=slots, batch_tokens=slots + more, block_size=16, **sizes)
    most = min(load.batch_tokens, slots * load.chunk_max)
    assert sum(spread(load)) == sum(heap(load, load.batch_tokens)) == most
    assert len(spread(load)) == slots
    beside = chunks_next_to_decodes(load)
    assert sum(beside) + slots - len(beside) == (load.batch_tokens if len(beside) < slots else most)
    assert all(1 <= length <= load.chunk_max for length in [*spread(load), *beside])


class Builder(FakePlugin):
    """Knows one image: the largest that is allowed."""

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]]:
        return [[ImagePlan((), info.item_tokens_max)]]


def test_image_for_fits_the_prompt() -> None:
    """An image longer than a prompt is refused on arrival, so the profiling run takes one that is not."""
    plugin, info = Builder(), model_info()
    tight = msgspec.structs.replace(LOAD, context_tokens=20)
    found = [image_for(plugin, info, load, pixels_max=9) for load in (LOAD, tight)]
    assert [plan.tokens for plan in found if plan] == [32, 16]
    assert image_for(plugin, info, LOAD, pixels_max=0) is None
    assert image_for(FakePlugin(), info, LOAD, pixels_max=9) is None


def test_profiling_run_computes_all_rows_with_an_adapter_if_there_may_be_any() -> None:
    """Layers apply one adapter at a time, so one for all rows takes the maximum; it is removed afterwards."""
    seen: list[set[int]] = []

    class Adapted(MeasuredGenerator):
        adapters: set[int] = set()  # noqa: RUF012 # of one worker
        adapter_bytes = 8

        def add_adapter(self, number: int, path: str) -> None:
            raise NotImplementedError

        def add_trial_adapter(self, number: int) -> None:
            self.adapters.add(number)

        def remove_adapter(self, number: int) -> None:
            self.adapters.remove(number)

        def step(self, batch: Batch) -> Sampled:
            sequences = [*batch.decode_sequences, *(chunk.sequence for chunk in batch.chunks)]
            seen.append({each.adapter for each in sequences})
            assert seen[-1] <= self.adapters
            return super().step(batch)

    worker = Adapted(SimulatedMemory(1024 * MIB))
    sizing = KvBuilder(worker, model_info(), LOAD)
    measured = sizing.carry_out(SizeKv(4096, profile=True, headroom_bytes=0, probe=True)).memory
    assert measured.adapter_bytes == 8
    assert seen
    assert all(adapters == {1} for adapters in seen)
    assert not worker.adapters
