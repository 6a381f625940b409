"""The worker plug-in of simulations, which reads and writes KV, keeps the contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from vsched.sim.faults import FaultPlan
from vsched.sim.loop import VirtualLoop
from vsched.sim.ranks.plugin import RankPlugin, SimulatedPlugin, SimulatedPreprocessor
from vsched.sim.ranks.symbolic_model import PIXELS, image_plan
from vsched.sim.ranks.symbolic_workers import Process, SymbolicEncoder, SymbolicGenerator
from vsched.sim.workload.images import Appearance
from vsched.sim.world import World
from vsched.testing import ContractBroken, check_worker
from vsched.testing.contracts.worker import SampleImage, sample_images
from vsched.types import MediaItem, ModelInfo
from vsched.worker.contract import Batch, Progress, Sampled, SequenceState, WorkerSettings


class SimGenerator(SymbolicGenerator):
    """Knows its images by their numbers of tokens, and serves once the KV cache is built for the last time.

    As with a real model, its output depends on all KV that it reads.
    """

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        super().build_kv(blocks=blocks, block_size=block_size, touch=touch)
        self._process.serving = not touch

    def prepare(self, sequence: SequenceState) -> None:
        self._world.items[sequence.number] = tuple(
            MediaItem(
                key=key_of(place.tokens),
                tokens=place.tokens,
                offset=place.offset,
                metadata=place.metadata,
                spans=place.spans,
                kept=place.kept,
            )
            for place in sequence.items
        )
        super().prepare(sequence)

    def step(self, batch: Batch) -> Sampled:
        before = len(self._world.violations)
        tokens = super().step(batch).tokens
        return Sampled(tokens + np.int32(len(self._world.violations) - before))


def key_of(tokens: int) -> bytes:
    return b"%032d" % tokens


class SimPlugin(SimulatedPlugin):
    """The simulated plug-in, with the parts of engine and rank."""

    generator: type[SimGenerator] = SimGenerator

    def __init__(self) -> None:
        self.world = World(VirtualLoop(), 0, FaultPlan())

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> SymbolicEncoder:
        return RankPlugin(self.world, Process()).load_encoder(info, settings, progress)

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> SimGenerator:
        process = Process()
        process.serving = False
        return self.generator(self.world, process, info, settings)

    def images(self) -> list[SampleImage]:
        made = []
        for tokens in (1, 4, 9):
            self.world.appearances[key_of(tokens)] = look = Appearance((tokens, 2, 3), tokens)
            pixels = np.tile(np.array([*look.colour, tokens], np.float32), (4 * tokens, 1))
            made.append(SampleImage(image_plan(tokens), {PIXELS: pixels}, key_of(tokens)))
        return made


def check_simulated(plugin: SimPlugin, seeds: Sequence[int]) -> None:
    info = plugin.inspect("", dtype="auto", item_tokens_max=0)
    try:
        check_worker(plugin, info, images=plugin.images(), seeds=seeds)
    finally:
        plugin.world.loop.close()


def test_simulated_plugin_keeps_the_contract() -> None:
    """The schedules keep theirs: it checks every position of KV that it reads."""
    plugin = SimPlugin()
    check_simulated(plugin, range(8))
    assert plugin.world.violations == []


class Straying(SimGenerator):
    """Writes one position too far: at the end of a block, into the block of a stale table entry."""

    def step(self, batch: Batch) -> Sampled:
        sampled = super().step(batch)
        for slot, position in zip(batch.decode_slots, batch.decode_positions, strict=True):
            block, within = divmod(int(position) + 1, self._blocks.shape[1])
            self._blocks[batch.block_tables[slot, block], within] += np.uint64(1)
        return sampled


class Borrowing(SimGenerator):
    """Wrong after a prefix that another request has computed."""

    def step(self, batch: Batch) -> Sampled:
        ends = [chunk for chunk in batch.chunks if chunk.samples]
        borrowed = [getattr(chunk.sequence.state, "length", 0) < chunk.start for chunk in ends]
        tokens = super().step(batch).tokens
        tokens[len(batch.decode_slots) :] += np.array(borrowed, np.int32)
        return Sampled(tokens)


@pytest.mark.parametrize("generator", [Straying, Borrowing])
def test_check_worker_refuses_wrong_kv(generator: type[SimGenerator]) -> None:
    plugin = SimPlugin()
    plugin.generator = generator
    with pytest.raises(ContractBroken, match="alone and"):
        check_simulated(plugin, range(20))


def test_sample_images_come_from_the_preprocessor() -> None:
    plugin = SimulatedPlugin()
    info = plugin.inspect("", dtype="auto", item_tokens_max=0)
    images = sample_images(plugin, info)
    preprocessor = SimulatedPreprocessor(info)
    for image in images:
        assert preprocessor.plan_embedding([image.plan.tokens]) == image.plan
