"""The worst legal batch of images, out-of-memory errors as one exception, sparse runs, sizing of a KV cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import printed_by
from tests.workers.driver import Checkpoints, inspect, load_generator
from tests.workers.properties import REPEATABLE, thorough
from vsched.errors import DeviceOutOfMemory
from vsched.types import ModelInfo
from vsched.wire import SizeKv
from vsched.worker.contract import ImagePlan
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits
from vsched_workers.backends.cpu.products import QuantizedProduct
from vsched_workers.backends.reference.host_memory import DRIFT_BYTES, SCATTERED_SHARE, HostMemory
from vsched_workers.families.qwen_image import (
    ASPECT_RATIO_MAX,
    ResizeLimits,
    clamp_limits,
    grid_of,
    image_plan,
    largest_units,
    resized,
)
from vsched_workers.language import LanguageWorker
from vsched_workers.memory.out_of_memory import require_available, typed_out_of_memory
from vsched_workers.memory.sparse_runs import sparsely
from vsched_workers.memory.worst_case import worst_batches


def every_unit(
    limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
) -> dict[int, int]:
    """Try every legal image."""
    found: dict[int, int] = {}
    for short in range(1, math.isqrt(pixels_max) + 1):
        for long in range(short, min(ASPECT_RATIO_MAX * short, pixels_max // short) + 1):
            rows, columns = resized(short, long, factor=factor, limits=limits)
            few, many = sorted((rows // factor, columns // factor))
            if not tokens_max or few * many <= tokens_max:
                found[few] = max(found.get(few, 0), many)
    return found


@given(
    factor=st.integers(2, 8),
    pixels_max=st.integers(1, 1200),
    budget=st.sampled_from([0, 1, 4, 9, 30, 64]),
    capped=st.booleans(),
    minimum=st.integers(1, 70),
    maximum=st.one_of(st.none(), st.integers(1, 6000)),
)
@REPEATABLE
def test_largest_units_are_bounds_of_every_image(
    factor: int, pixels_max: int, budget: int, capped: bool, minimum: int, maximum: int | None
) -> None:
    """No legal image reaches further, under all limits together."""
    limits = ResizeLimits(minimum=minimum * factor, maximum=maximum)
    limits = clamp_limits(limits, tokens=budget, factor=factor)
    tokens_max = budget if capped else 0
    found = largest_units(limits, factor=factor, tokens_max=tokens_max, pixels_max=pixels_max)
    wanted = every_unit(limits, factor=factor, tokens_max=tokens_max, pixels_max=pixels_max)
    assert all(found.get(few, 0) >= many for few, many in wanted.items())
    assert not tokens_max or max(few * many for few, many in found.items()) <= tokens_max


def test_largest_units_find_the_strip_that_guesses_miss() -> None:
    """At 3,686,400 pixels, patch 14, merge 2: a square has 4,761 tokens, 154 x 23937 pixels have 5,130."""
    found = largest_units(ResizeLimits(3136, None), factor=28, tokens_max=0, pixels_max=3_686_400)
    assert max(few * many for few, many in found.items()) == 5130
    assert found[6] == 855


@pytest.fixture
def batches(checkpoints: Checkpoints, size: str) -> Callable[..., list[list[ImagePlan]]]:
    info = inspect(checkpoints(size))

    def search(
        *, items: int, tokens: int, pixels_max: int, item_tokens_max: int
    ) -> list[list[ImagePlan]]:
        capped = msgspec.structs.replace(info, item_tokens_max=item_tokens_max)
        return worst_batches(capped, items=items, tokens=tokens, pixels_max=pixels_max)

    return search


@pytest.mark.parametrize(
    ("items", "tokens", "pixels_max", "item_tokens_max"),
    [(8, 200, 64_000_000, 200), (3, 200, 64_000_000, 60), (8, 4, 64_000_000, 4), (2, 90, 9000, 64)],
    ids=["budget", "count", "a few tokens", "pixels"],
)
def test_worst_batches_stay_within_every_cap(
    batches: Callable[..., list[list[ImagePlan]]],
    items: int,
    tokens: int,
    pixels_max: int,
    item_tokens_max: int,
) -> None:
    """Multiples of the merge size, at least one unit, and no limit is exceeded."""
    found = batches(
        items=items, tokens=tokens, pixels_max=pixels_max, item_tokens_max=item_tokens_max
    )
    assert found
    for batch in found:
        assert 1 <= len(batch) <= items
        assert sum(plan.tokens for plan in batch) <= tokens
        for plan in batch:
            frames, rows, columns = grid_of(plan.metadata)
            assert min(rows, columns) >= 2
            assert (rows % 2, columns % 2) == (0, 0)
            assert plan.tokens == frames * rows * columns // 4 <= item_tokens_max


def test_worst_batches_use_the_budget_up(batches: Callable[..., list[list[ImagePlan]]]) -> None:
    """The tighter limit binds, and the rest of the budget is used."""
    caps = {"pixels_max": 64_000_000, "item_tokens_max": 64}
    full = batches(items=8, tokens=200, **caps)
    assert max(sum(plan.tokens for plan in batch) for batch in full) >= 196
    assert max(plan.tokens for batch in full for plan in batch) == 64
    assert max(len(batch) for batch in full) == 8
    few = batches(items=2, tokens=200, **caps)
    assert max(sum(plan.tokens for plan in batch) for batch in few) == 128
    small = batches(items=8, tokens=200, pixels_max=3000, item_tokens_max=64)
    assert max(plan.tokens for batch in small for plan in batch) < 64
    unlimited = batches(items=3, tokens=0, **caps)
    assert [plan.tokens for plan in unlimited[0]] == [64, 64, 64]
    # An image above the budget is encoded alone, so it is a candidate.
    above = batches(items=8, tokens=40, **caps)
    assert [plan.tokens for plan in above[0]] == [64]
    assert all(len(each) == 1 or sum(plan.tokens for plan in each) <= 40 for each in above)
    assert batches(items=8, tokens=40, pixels_max=0, item_tokens_max=64) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("numpy"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError(
            "unable to mmap 9 bytes from file <model.safetensors>: Cannot allocate memory"
        ),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_typed_out_of_memory_is_one_type(error: Exception) -> None:
    with (
        pytest.raises(DeviceOutOfMemory, match="while testing. Remedy"),
        typed_out_of_memory("testing"),
    ):
        raise error


def test_typed_out_of_memory_lets_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"), typed_out_of_memory("testing"):
        raise RuntimeError("size mismatch")


def test_require_available_gives_value_limit_and_remedy() -> None:
    memory = HostMemory()
    require_available(memory, 1, "a byte")
    with pytest.raises(
        DeviceOutOfMemory, match=r"a lot does not fit on cpu.*value \d+, limit \d+\. Remedy"
    ):
        require_available(memory, 1 << 60, "a lot")


class CachingMemory(HostMemory):
    """Memory whose allocator caches all of it until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = 100

    def available(self) -> int:
        return 100 - self.cached

    def release(self) -> None:
        self.cached = 0


def test_require_available_counts_the_allocators_cache_and_keeps_it_if_there_is_room() -> None:
    memory = CachingMemory()
    require_available(memory, 100, "as much as is cached")
    with pytest.raises(DeviceOutOfMemory, match="value 101, limit 100"):
        require_available(CachingMemory(), 101, "more")
    memory.cached = 40
    require_available(memory, 60, "what is free")
    assert memory.cached == 40


def test_a_sparse_product_takes_the_first_and_the_last_block_and_some_outputs() -> None:
    """Others are zero: tokens are sampled from the head's results, which must be valid numbers."""
    narrow, wide = (
        QuantizedProduct(torch.ones(outputs, 16, dtype=torch.bfloat16), None, threads=1)
        for outputs in (16, 96)
    )
    rows = torch.ones(3000, 16, dtype=torch.bfloat16)
    with sparsely():
        sparse, some = narrow(rows), wide(rows[:3])
    assert (sparse[:1024] == 16).all()
    assert not sparse[1024:2048].any()
    assert (sparse[2048:] == 16).all()
    assert set(some.flatten().tolist()) == {0.0, 16.0}


ENCODES = """
import sys
from contextlib import nullcontext
from vsched.worker.memory import limit_process_memory
limit_process_memory(4 << 30, keys="encode.memory_limit")
from vsched.worker import sizing as reserve
from vsched.worker.contract import WorkerSettings
from vsched.worker.spec import EncodeRole
from vsched_workers.plugin import plugin
from vsched_workers.vision import VisionWorker
info = plugin.inspect(sys.argv[1], dtype=sys.argv[2], item_tokens_max=640)
settings = WorkerSettings(threads=1)
worker = plugin.load_encoder(info, settings, lambda _label, _fraction: None)
role = EncodeRole(
    address="", plugin="transformers", settings=settings, items=1, tokens=640, pixels_max=4_000_000
)
for _ in range(2):  # the first also has what is loaded and kept when code is first run
    loaded, reservation = reserve.reserve_encoder(plugin, worker, info, role)
memory = worker.device_memory()
VisionWorker.sparsely = lambda _: nullcontext()
arena = reserve.BatchArena(info, plugin.worst_batches(info, items=1, tokens=640, pixels_max=4_000_000))
memory.reset_peak()
for _ in range(2):
    for batch in arena.batches:
        reserve._encode_batch(worker, arena, batch)
print(memory.peak() - loaded.reserved_bytes, reservation.growth_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ("nano25", "bfloat16"),
        *thorough(("nano3", "bfloat16"), ("nano25", "float32"), ("nano3", "float32")),
    ],
)
def test_a_sparse_reservation_is_the_memory_of_whole_batches(
    checkpoints: Checkpoints, size: str, dtype: str
) -> None:
    """The same peak, apart from fragmentation, which the reservation allows for."""
    printed = printed_by(ENCODES, checkpoints(size), dtype, as_rank=True)
    whole, reserved = map(int, printed.split())
    measured = (reserved - DRIFT_BYTES) / (1 + 1 / SCATTERED_SHARE)
    assert measured > whole / 4, "the reservation is not only what is added to every one"
    assert whole <= reserved


MIB = 1 << 20
LOAD = StepLimits(slots=8, batch_tokens=256, chunk_tokens=64, context_tokens=512, block_size=16)
IMAGE = image_plan((1, 8, 8), merge=2, patch=1, channels=1)


def load_language(path: Path, dtype: str = "float32") -> tuple[LanguageWorker, ModelInfo]:
    info = inspect(path, dtype, 64)
    worker = load_generator(info)
    assert isinstance(worker, LanguageWorker)
    return worker, info


def tokens_of(info: ModelInfo, size: int) -> int:
    return size // info.kv_bytes_per_token // 16 * 16


@pytest.mark.slow
def test_carry_out_returns_the_memory_and_proves_it(checkpoints: Checkpoints, size: str) -> None:
    """A dropped cache is no longer resident; the next one takes its place."""
    worker, info = load_language(checkpoints(size))
    sizing = KvBuilder(worker, info, LOAD, image=IMAGE)
    order = SizeKv(tokens_of(info, 64 * MIB), profile=True, headroom_bytes=0, probe=True)
    first = sizing.carry_out(order)
    second = sizing.carry_out(SizeKv(16, profile=True, headroom_bytes=0))
    assert (first.outcome, second.outcome) == ("fits", "fits")
    assert abs(second.memory.released_bytes - first.memory.kv_bytes) < 4 * MIB
    assert first.memory.reserved_bytes - second.memory.reserved_bytes > 56 * MIB


@pytest.mark.slow
def test_carry_out_finds_a_view_that_keeps_the_cache(checkpoints: Checkpoints) -> None:
    """A view of one layer is enough."""
    worker, info = load_language(checkpoints("nano25"))
    sizing = KvBuilder(worker, info, LOAD)
    sizing.carry_out(SizeKv(tokens_of(info, 32 * MIB), profile=False, headroom_bytes=0))
    cache = worker._cache
    assert cache is not None
    view = cache.keys[0][:1]
    del cache
    order = SizeKv(16, profile=False, headroom_bytes=0)
    assert sizing.carry_out(order).outcome == "leak"
    del view


LOADED = """
import resource, sys
from vsched.worker.memory import limit_process_memory, status_bytes
limit_process_memory(4 << 30, keys="encode.memory_limit")
from vsched_workers.language import LanguageWorker
from vsched_workers.families.qwen_image import image_plan
from vsched_workers.plugin import plugin
from vsched.wire import SizeKv
from vsched.worker.contract import WorkerSettings
from vsched.worker.sizing import KvBuilder, run_profile
from vsched.worker.spec import StepLimits
info = plugin.inspect(sys.argv[1], dtype=sys.argv[2], item_tokens_max=64)
worker = plugin.load_generator(info, WorkerSettings(threads=1), lambda _label, _fraction: None)
image = image_plan((1, 8, 8), merge=2, patch=1, channels=1)
"""
FRUGAL_AND_WHOLE = f"""{LOADED}
load = StepLimits(slots=4, batch_tokens=1028, chunk_tokens=512, context_tokens=4096, block_size=16)
worker.build_kv(blocks=64, block_size=16)
memory = worker.device_memory()
for frugal in (True, True, False):
    LanguageWorker.frugal = property(lambda _: frugal)
    before = memory.reserved()
    memory.reset_peak()
    run_profile(worker, info, load, blocks=64, image=image)
    print(memory.peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"), [("nano25", "float32"), *thorough(("nano3", "bfloat16"))]
)
def test_profiling_run_is_frugal_without_missing_the_peak(
    checkpoints: Checkpoints, size: str, dtype: str
) -> None:
    """Two layers and one long chunk reach the same peak as all layers and all chunks at the longest context.

    The heap keeps its peak in fragments, so the whole run takes slightly more: 0 to 24 MiB, different in each process.
    A build's headroom, 256 MiB by default, is free while serving.
    """
    frugal, again, whole = map(
        int, printed_by(FRUGAL_AND_WHOLE, checkpoints(size), dtype, as_rank=True).split()
    )
    assert frugal > (8 if dtype == "float32" else 1) * MIB
    assert max(again, whole) < 48 * MIB


UNDER_A_LIMIT = f"""{LOADED}
import gc

MIB = 1 << 20
load = StepLimits(slots=8, batch_tokens=512, chunk_tokens=64, context_tokens=2048, block_size=16)
sizing = KvBuilder(worker, info, load, image=image)
tokens = 32 * MIB // info.kv_bytes_per_token // 16 * 16
# A first, small run: what compiles itself when it is first called does not survive a lack of memory.
small = StepLimits(slots=8, batch_tokens=64, chunk_tokens=16, context_tokens=64, block_size=16)
KvBuilder(worker, info, small).carry_out(SizeKv(64, profile=True, headroom_bytes=0, probe=True))
worker.drop_kv()
for room in map(int, sys.argv[3:]):  # MiB above what was held before: the run fails, then the cache, then everything
    gc.collect()  # a cycle may still hold the memory of the last failure; the next order collects it, too
    held = status_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (held + room * MIB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    found = sizing.carry_out(SizeKv(tokens, profile=True, headroom_bytes=8 * MIB, probe=True))
    print(found.outcome)
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    worker.drop_kv()
    sizing.blocks = 0
print(sizing.carry_out(SizeKv(tokens, profile=True, headroom_bytes=0, probe=True)).outcome)
"""


@pytest.mark.slow
def test_kv_cache_is_touched_if_no_thread_can_start(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the limit there may be no memory for a thread's stack, which is not fatal."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker, info = load_language(checkpoints("nano25"))
    sizing = KvBuilder(worker, info, LOAD)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert sizing.carry_out(SizeKv(1024, profile=True, headroom_bytes=0)).outcome == "fits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rooms"),
    # oneDNN, which multiplies bfloat16, may crash if memory runs out within its products.
    [("float32", (42, 10, 1)), *thorough(("bfloat16", (33, 1)))],
)
def test_carry_out_survives_real_out_of_memory(
    checkpoints: Checkpoints, dtype: str, rooms: Sequence[int]
) -> None:
    """Under a real limit, the allocator's own failure becomes the outcome, and the rank continues."""
    path = checkpoints("nano25")
    found = printed_by(UNDER_A_LIMIT, path, dtype, *rooms, as_rank=True)
    assert found.split() == [*["out_of_memory"] * len(rooms), "fits"]
