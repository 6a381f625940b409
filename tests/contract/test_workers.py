"""Worker plug-ins keep their contract, and each that breaks it in one respect is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.rank import fake_plugin
from tests.unit.rank.fake_plugin import FakeEncoder, FakeGenerator, FakePlugin
from tests.workers.properties import thorough
from vsched.testing import ContractBroken, check_worker
from vsched.testing.contracts.worker import SampleImage
from vsched.types import ArraySpec
from vsched.worker.contract import (
    Batch,
    EncodeJob,
    ImagePlan,
    Sampled,
    SequenceState,
    WorkerPlugin,
    WorkerSettings,
)

INFO = fake_plugin.model_info()


@pytest.fixture(autouse=True, scope="module")
def _collect_little() -> Iterator[None]:
    """Exclude objects of other tests from the many garbage collections of sizing."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fake_image(tokens: int) -> SampleImage:
    arrays = {
        "pixels": np.zeros((4 * tokens, 4), np.float32),
        "mask": np.ones((1, tokens), np.bool_),
    }
    specs = tuple(ArraySpec(name, one.dtype.name, one.shape) for name, one in arrays.items())
    return SampleImage(ImagePlan(specs, tokens, metadata=bytes([2 * tokens])), arrays)


IMAGES = [fake_image(tokens) for tokens in (1, 3, 7)]


def plugin_of(
    generator: type[FakeGenerator] = FakeGenerator, encoder: type[FakeEncoder] = FakeEncoder
) -> WorkerPlugin:
    """Return a plug-in with these workers."""

    class Plugin(FakePlugin):
        def load_encoder(self, *_: Any, **__: Any) -> FakeEncoder:
            return encoder()

        def load_generator(self, *_: Any, **__: Any) -> FakeGenerator:
            return generator(fake_plugin.Behaviour())

    return Plugin()


def test_fake_plugin_keeps_the_contract() -> None:
    check_worker(fake_plugin.plugin, INFO, images=IMAGES)


def test_check_worker_needs_no_images() -> None:
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


@pytest.mark.parametrize(
    ("generator", "complaint"),
    [
        (Rejoining, "alone and"),
        (Reborn, "alone and"),
        (Cutting, "alone and"),
        (Leaking, ": leak, not out_of_memory"),
        (Untyped, "out of memory must be DeviceOutOfMemory: RuntimeError"),
        (Wide, "the hardest steps failed"),
        (Scribbling, "wrote to `block_tables`"),
    ],
)
def test_check_worker_refuses_generators(generator: type[FakeGenerator], complaint: str) -> None:
    """Leaks, and other faults of a generate worker."""
    with pytest.raises(ContractBroken, match=complaint):
        check_worker(plugin_of(generator=generator), INFO, images=IMAGES, seeds=range(20))


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
    ("encoder", "complaint"),
    [
        (Hasty, "must write all"),
        (Spilling, "which is none of its images'"),
        (Sparing, "must write all"),
        (Staining, "read-only"),
    ],
)
def test_check_worker_refuses_encoders(encoder: type[FakeEncoder], complaint: str) -> None:
    with pytest.raises(ContractBroken, match=complaint):
        check_worker(plugin_of(encoder=encoder), INFO, images=IMAGES, seeds=range(5))


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
