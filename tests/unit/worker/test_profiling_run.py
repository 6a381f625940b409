"""The profiling run: its steps are as large as any that the kernel may send."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rank.fake_plugin import FakePlugin
from tests.unit.worker.device_fakes import LOAD, MIB, MeasuredGenerator, model_info
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
    load = StepLimits(
        slots=slots,
        batch_tokens=slots + more,
        chunk_tokens=chunk_tokens,
        context_tokens=context_tokens,
        block_size=16,
    )
    most = min(load.batch_tokens, slots * load.chunk_max)
    assert sum(spread(load)) == sum(heap(load, load.batch_tokens)) == most
    assert len(spread(load)) == slots
    mixed = chunks_next_to_decodes(load)
    assert sum(mixed) + slots - len(mixed) == (load.batch_tokens if len(mixed) < slots else most)
    assert all(1 <= length <= load.chunk_max for length in [*spread(load), *mixed])


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
