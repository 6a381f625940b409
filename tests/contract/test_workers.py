"""Worker plug-ins keep their contract, and each that breaks it in one respect is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.rank import fake_plugin
from tests.unit.rank.fake_plugin import FakeEncoder, FakeGenerator, FakePlugin
from tests.workers.properties import thorough
from vsched.sim.faults import FaultPlan
from vsched.sim.loop import VirtualLoop
from vsched.sim.ranks.plugin import RankPlugin, SimulatedPlugin
from vsched.sim.ranks.symbolic_model import PIXELS, image_plan
from vsched.sim.ranks.symbolic_workers import Process, SymbolicEncoder, SymbolicGenerator
from vsched.sim.workload.images import Appearance
from vsched.sim.world import World
from vsched.testing import ContractBroken, check_worker
from vsched.testing.contracts.worker import SampleImage
from vsched.types import ArraySpec, MediaItem, ModelInfo
from vsched.worker.contract import (
    Batch,
    EncodeJob,
    ImagePlan,
    Progress,
    Sampled,
    SequenceState,
    WorkerSettings,
)

INFO = fake_plugin.model_info()


def fake_image(tokens: int) -> SampleImage:
    pixels, mask = np.zeros((4 * tokens, 4), np.float32), np.ones((1, tokens), np.bool_)
    arrays = {"pixels": pixels, "mask": mask}
    specs = tuple(ArraySpec(name, one.dtype.name, one.shape) for name, one in arrays.items())
    return SampleImage(ImagePlan(specs, tokens, metadata=bytes([2 * tokens])), arrays)


IMAGES = [fake_image(tokens) for tokens in (1, 3, 7)]


def test_fake_plugin_keeps_the_contract_with_images_and_without() -> None:
    check_worker(fake_plugin.plugin, INFO, images=IMAGES)
    check_worker(fake_plugin.plugin, INFO, images=[], seeds=range(3))


# --- workers that are wrong in one respect ---


class Rejoining(FakeGenerator):
    """Wrong if a preempted request is computed again."""

    def prepare(self, sequence: SequenceState) -> None:
        sequence.state = 0

    def step(self, batch: Batch) -> Sampled:
        tokens = super().step(batch).tokens
        row = len(batch.decode_slots)
        for chunk in batch.chunks:
            known = chunk.sequence.state
            if chunk.samples:
                tokens[row] += known > chunk.start
                row += 1
            chunk.sequence.state = max(known, chunk.stop)
        return Sampled(tokens)


class Reborn(FakeGenerator):
    """Wrong for a request with outputs from before a loss."""

    def prepare(self, sequence: SequenceState) -> None:
        sequence.state = sequence.length > sequence.prompt_length

    def step(self, batch: Batch) -> Sampled:
        tokens = super().step(batch).tokens
        for row, sequence in enumerate(batch.decode_sequences):
            tokens[row] += sequence.state
        return Sampled(tokens)


class Cutting(FakeGenerator):
    """Wrong if a chunk begins inside a prompt."""

    def step(self, batch: Batch) -> Sampled:
        tokens = super().step(batch).tokens
        started = [chunk for chunk in batch.chunks if chunk.samples]
        for row, chunk in enumerate(started, len(batch.decode_slots)):
            tokens[row] += chunk.start % 4 == 3
        return Sampled(tokens)


class Leaking(FakeGenerator):
    """Forgets its KV cache, and frees nothing."""

    def drop_kv(self) -> None:
        self._kv = []


class Untyped(FakeGenerator):
    """Raises an error of its own when out of memory."""

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        if blocks * block_size > 1 << 30:
            raise RuntimeError("CUDA out of memory")
        super().build_kv(blocks=blocks, block_size=block_size, touch=touch)


class Wide(FakeGenerator):
    """Returns a token too many."""

    def step(self, batch: Batch) -> Sampled:
        return Sampled(np.append(super().step(batch).tokens, np.int32(1)))


class Scribbling(FakeGenerator):
    """Sorts its block tables in place."""

    def step(self, batch: Batch) -> Sampled:
        batch.block_tables[0] += 1
        return super().step(batch)


class Spilling(FakeEncoder):
    """Writes one page too many."""

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        super().encode(jobs, embeddings)
        embeddings[(jobs[-1].pages[-1] + 1) % len(embeddings)] = 255


class Sparing(FakeEncoder):
    """Leaves the last row out."""

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        for job in jobs:
            rows = embeddings.shape[1]
            for row in range(job.tokens - 1):
                embeddings[job.pages[row // rows], row % rows] = job.metadata[0]


class Staining(FakeEncoder):
    """Normalises the pixels in place."""

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        job = jobs[0]
        job.arrays["pixels"][:] = 0
        super().encode(jobs, embeddings)


class Hasty(FakeEncoder):
    """In time slices, it leaves the last image out."""

    pauses = True

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        self._work, self._left = (jobs[:-1], embeddings), 2

    def advance(self, layers: int) -> bool:
        self._left -= min(layers or self._left, self._left)
        if not self._left:
            self.encode(*self._work)
        return not self._left


@pytest.mark.parametrize(
    ("worker", "complaint"),
    [
        (Rejoining, "alone and"),
        (Reborn, "alone and"),
        (Cutting, "alone and"),
        (Leaking, ": leak, not out_of_memory"),
        (Untyped, "out of memory must be DeviceOutOfMemory: RuntimeError"),
        (Wide, "the hardest steps failed"),
        (Scribbling, "wrote to `block_tables`"),
        (Hasty, "must write all"),
        (Spilling, "which is none of its images'"),
        (Sparing, "must write all"),
        (Staining, "read-only"),
    ],
)
def test_check_worker_refuses_workers(
    worker: type[FakeGenerator | FakeEncoder], complaint: str
) -> None:
    class Plugin(FakePlugin):
        def load_encoder(self, *_: Any, **__: Any) -> FakeEncoder:
            return worker() if issubclass(worker, FakeEncoder) else FakeEncoder()

        def load_generator(self, *_: Any, **__: Any) -> FakeGenerator:
            kind = worker if issubclass(worker, FakeGenerator) else FakeGenerator
            return kind(fake_plugin.Behaviour())

    with pytest.raises(ContractBroken, match=complaint):
        check_worker(Plugin(), INFO, images=IMAGES, seeds=range(20))


def test_check_worker_refuses_other_objects() -> None:
    with pytest.raises(ContractBroken, match=r"must be a vsched\.worker\.contract\.WorkerPlugin"):
        check_worker(object(), INFO)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kv_dtype"), [("nano25", "auto"), *thorough(("nano3", "int8"))])
def test_transformers_plugin_keeps_the_contract(
    size: str, kv_dtype: str, checkpoints: Callable[[str], Path]
) -> None:
    """The plug-in that comes with vsched, with attention that does not depend on the batch."""
    from vsched_workers.plugin import plugin

    path = str(checkpoints(size))
    settings = WorkerSettings(threads=1, attention="exact")
    info = plugin.inspect(path, dtype="float32", item_tokens_max=0)
    info = info.with_int8_kv if kv_dtype == "int8" else info
    check_worker(plugin, info, settings=settings, seeds=range(3))


# --- the plug-in of simulations, which reads and writes KV ---


class SimGenerator(SymbolicGenerator):
    """Knows its images by their numbers of tokens, and serves once the KV cache is built for the last time.

    As with a real model, its output depends on all KV that it reads.
    """

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        super().build_kv(blocks=blocks, block_size=block_size, touch=touch)
        self._process.serving = not touch

    def prepare(self, sequence: SequenceState) -> None:
        self._world.items[sequence.number] = tuple(
            MediaItem(key=key_of(place.tokens), **msgspec.structs.asdict(place))
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

    def __init__(self, generator: type[SimGenerator] = SimGenerator) -> None:
        self.generator = generator
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
    with pytest.raises(ContractBroken, match="alone and"):
        check_simulated(SimPlugin(generator), range(20))
