"""The memory contract on a CPU; packed weights: blocks of rows, and activations that oneDNN computes."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.programs import printed_by
from tests.workers.properties import thorough
from vsched_workers.backends.reference.host_memory import HostMemory, HugePages
from vsched_workers.backends.reference.packed_weights import (
    BlockedActivation,
    PackedLinear,
    PackedProduct,
    Weight,
    block_activations,
    pack_linears,
    warm_up,
)


def test_host_memory_sees_an_allocation_and_its_peak() -> None:
    memory = HostMemory()
    memory.release()
    memory.reset_peak()
    before = memory.allocated()
    held = np.ones(64 << 20, dtype=np.uint8)
    assert memory.reserved() - before > 48 << 20
    del held
    assert memory.allocated() - before < 32 << 20
    assert memory.peak() - before > 48 << 20
    assert 0 < memory.available() <= memory.total()
    assert memory.pool == "cpu"


UNDER_A_LIMIT = """
from vsched.worker.memory import limit_process_memory
limit_process_memory(1500 << 20, keys="encode.memory_limit")
import numpy as np
import torch
from vsched.errors import DeviceOutOfMemory
from vsched_workers.backends.reference.host_memory import HostMemory
from vsched_workers.memory.out_of_memory import typed_out_of_memory
MIB = 1 << 20
memory = HostMemory()
assert memory.pool.startswith("cpu limit of ")
assert memory.total() == 1500 * MIB
assert memory.available() == memory.total() - memory.reserved(), "peers are nobody"
old = torch.ones(200 * MIB, dtype=torch.uint8)
del old
memory.reset_peak()
before = memory.reserved()
assert memory.peak() - before < MIB, "an older peak is forgotten"
held = torch.ones(50 * MIB, dtype=torch.uint8)
untouched = np.zeros(30 * MIB, np.uint8)
assert 80 * MIB <= memory.reserved() - before < 81 * MIB, "the limit counts what nobody touched"
del held, untouched
assert memory.reserved() - before < MIB, "freed memory stops counting"
assert 80 * MIB <= memory.peak() - before < 81 * MIB
with memory.hold(300 * MIB):
    assert memory.reserved() - before >= 300 * MIB
try:
    with memory.hold(1500 * MIB):
        pass
except DeviceOutOfMemory:
    print("refused")
for allocate in (
    lambda: torch.empty(1500 * MIB, dtype=torch.uint8),
    lambda: np.empty(1500 * MIB, np.uint8),
    lambda: bytearray(1500 * MIB),
):
    try:
        with typed_out_of_memory("testing"):
            allocate()
    except DeviceOutOfMemory:
        print("typed")
"""


@pytest.mark.slow
def test_host_memory_counts_as_the_limit_does() -> None:
    """Total, available, reserved and peak are consistent under a real limit; failures raise the common exception."""
    assert printed_by(UNDER_A_LIMIT).split() == ["refused", "typed", "typed", "typed"]


PROMISES = """
import sys
import torch
from vsched.worker import memory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.reference import host_memory
from vsched_workers.backends.reference.backend import Backend
MIB = 1 << 20
case = sys.argv[1]
if case != "no limit":
    memory.limit_process_memory(2 << 30, keys="generate.memory_limit")
host_memory.reports_free_memory = lambda: case != "host does not tell"
backend = Backend(WorkerSettings(promises=case != "at start"), torch.float32)
reserved, resident = backend.memory.reserved(), memory.status_bytes("RssAnon")
cache = backend.zeros((64, MIB), torch.float32, touch=True)
there = memory.status_bytes("RssAnon") - resident
with backend.memory.hold(128 * MIB):
    held = memory.status_bytes("RssAnon") - resident - there
    print(there >= 250 * MIB, held >= 120 * MIB, backend.memory.reserved() - reserved >= 384 * MIB)
assert not cache[::8, ::100].any()
heap = [torch.ones(MIB) for _ in range(64)]
keep = torch.ones(16)
del heap
resident = memory.status_bytes("RssAnon")
backend.memory.settle()
print(resident - memory.status_bytes("RssAnon") >= 200 * MIB)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "touched"),
    [
        ("on use", False),
        *thorough(("at start", True), ("no limit", True), ("host does not tell", True)),
    ],
)
def test_host_memory_promises_if_that_can_be_relied_on(case: str, touched: bool) -> None:
    """Reserved memory counts at once; its pages are allocated on use, and the heap's are freed when sizes are known."""
    printed = printed_by(PROMISES, case, as_rank=True).split()
    cache, headroom, reserved, given_back = (each == "True" for each in printed)
    assert (cache, headroom, given_back) == (touched, touched, not touched)
    assert reserved


LITTER_AND_PIECES = """
import torch
from vsched.worker.memory import limit_process_memory
from vsched_workers.backends.reference.host_memory import HostMemory, mapped_pieces
limit_process_memory(2 << 30, keys="encode.memory_limit")
memory = HostMemory()

def held_after_pieces():
    before = memory.reserved()
    # A small object lies after each piece, and stays.
    both = [(torch.ones(256 << 10, dtype=torch.uint8), torch.ones(32 << 10, dtype=torch.uint8)) for _ in range(64)]
    stays.extend(small for _, small in both)
    del both
    memory.release()
    return memory.reserved() - before - 64 * (32 << 10)

stays = []
with mapped_pieces():
    print(held_after_pieces() >> 20)
print(held_after_pieces() >> 20)
"""


@pytest.mark.slow
def test_host_memory_maps_pieces_that_are_not_to_leave_holes() -> None:
    """Mappings are freed in spite of small objects that stay; afterwards the heap keeps memory between them again."""
    mapped, usual = map(int, printed_by(LITTER_AND_PIECES, as_rank=True).split())
    assert mapped <= 1
    assert usual >= 12


def test_huge_pages_hold_pieces_behind_one_another_and_little_is_left_over() -> None:
    pages = HugePages()
    draw = random.Random(1)
    kinds = [draw.randrange(1, 3 << 20) for _ in range(5)]
    taken = [pages.allocate_bytes(size) for size in [*kinds, 33 << 20] * 8]
    for place, piece in enumerate(taken):
        assert piece.ctypes.data % 64 == 0
        assert not piece[:100].any()
        piece[:] = place % 256
    assert all((piece == place % 256).all() for place, piece in enumerate(taken)), "none overlap"
    given = sum(len(piece) for piece in taken)
    assert given <= pages.mapped <= 1.15 * given


def test_a_mapping_of_huge_pages_goes_back_with_its_last_piece() -> None:
    """Its unused end does not keep it alive: a dropped model would stay resident."""
    pages, memory = HugePages(), HostMemory()
    before = memory.allocated()
    pieces = [pages.allocate_bytes(size) for size in ((96 << 20) - 50_000, 10_000)]
    for piece in pieces:
        piece.fill(1)
    assert pages.mapped == 96 << 20, "the second lies behind the first"
    assert memory.allocated() - before > 90 << 20
    kept = torch.from_numpy(pieces[1])
    del pieces, piece
    gc.collect()
    assert kept.all(), "a mapping stays as long as a piece of it"
    assert memory.allocated() - before > 90 << 20
    del kept
    gc.collect()
    assert memory.allocated() - before < 32 << 20
    assert not pages.allocate_bytes(10_000).any(), "a new one"
    assert pages.mapped > 96 << 20


class _Watched(PackedProduct):
    """Records the numbers of rows that it multiplies."""

    many_rows_min = 17

    def __init__(self, weight: Weight, _bias: torch.Tensor | None) -> None:
        self.shape, self.size_bytes = (weight.shape[0], weight.shape[1]), 10
        self.counts: list[int] = []

    def multiply_rows(self, dtype: torch.dtype, rows_at: int, count: int, result_at: int) -> None:
        del dtype, rows_at, result_at
        self.counts.append(count)


def test_warm_up_multiplies_by_each_shape_once_for_each_kernel() -> None:
    """Serving compiles nothing that was not compiled when the KV cache was sized."""
    module = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 24)).bfloat16()
    assert pack_linears(module, _Watched) == 30
    packed = [child.packed for child in module if isinstance(child, PackedLinear)]
    warm_up(module, torch.bfloat16)
    counts = [each.counts for each in packed if isinstance(each, _Watched)]
    assert sorted(map(sorted, counts)) == [[], [1, 17], [1, 17]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 17, 256, 700])
def test_blocked_activation_sees_few_numbers_of_rows(rows: int, dtype: torch.dtype) -> None:
    """OneDNN keeps its code for each size; the values are bit-identical."""
    tower = nn.Sequential(nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU())
    block_activations(tower)
    assert isinstance(tower[0], BlockedActivation)
    assert not any(isinstance(other, BlockedActivation) for other in list(tower)[1:])
    seen: list[int] = []
    tower[0].activation.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    torch.manual_seed(rows)
    given = torch.randn(1, rows, 24).to(dtype)
    assert torch.equal(tower[0](given), nn.functional.gelu(given))
    assert set(seen) <= set(BlockedActivation.SIZES)
