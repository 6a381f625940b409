"""The sizing of a KV cache with a real language model on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.programs import printed_by
from tests.workers.driver import Checkpoints, inspect, load_generator
from tests.workers.properties import thorough
from vsched.types import ModelInfo
from vsched.wire import SizeKv
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits
from vsched_workers.families.qwen_image import image_plan
from vsched_workers.language import LanguageWorker

pytestmark = pytest.mark.slow

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
MIB = 1 << 20
load = StepLimits(slots=8, batch_tokens=512, chunk_tokens=64, context_tokens=2048, block_size=16)
sizing = KvBuilder(worker, info, load, image=image)
tokens = 32 * MIB // info.kv_bytes_per_token // 16 * 16
# A first, small run: what compiles itself when it is first called does not survive a lack of memory.
small = StepLimits(slots=8, batch_tokens=64, chunk_tokens=16, context_tokens=64, block_size=16)
KvBuilder(worker, info, small).carry_out(SizeKv(64, profile=True, headroom_bytes=0, probe=True))
worker.drop_kv()
for room in map(int, sys.argv[3:]):  # MiB above what was held before: the run fails, then the cache, then everything
    held = status_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (held + room * MIB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    found = sizing.carry_out(SizeKv(tokens, profile=True, headroom_bytes=8 * MIB, probe=True))
    print(found.outcome)
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    worker.drop_kv()
    sizing.blocks = 0
print(sizing.carry_out(SizeKv(tokens, profile=True, headroom_bytes=0, probe=True)).outcome)
"""


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
