"""Sparse runs: skipped work, and the same peak of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE_S
from vsched.aio.replicas.fork_server import rank_environment
from vsched_workers.backends.cpu.layer_parts import StepRows
from vsched_workers.backends.cpu.products import QuantizedProduct
from vsched_workers.backends.reference.host_memory import DRIFT_BYTES, SCATTERED_SHARE
from vsched_workers.memory.sparse_runs import (
    at_most,
    attended_contexts,
    is_left_out,
    pieces,
    sparsely,
)


def test_nothing_is_left_out_unless_runs_are_sparse() -> None:
    contexts = np.arange(8, dtype=np.int32)
    assert pieces(range(5)) == range(5)
    assert at_most(9, 2) == 9
    assert attended_contexts(contexts, 1) is contexts
    assert not any(is_left_out("kind") for _ in range(5))


def test_sparse_runs_compute_the_first_and_last_piece_two_layers_of_a_kind_and_a_row_for_each_thread() -> (
    None
):
    with sparsely():
        assert pieces(range(5)) == (0, 4)
        assert pieces(range(2)) == range(2)
        assert at_most(9, 2) == 2
        kinds = ["window", "window", "whole", "window", "whole", "whole"]
        assert [is_left_out(kind) for kind in kinds] == [False, False, False, True, False, True]
        contexts = np.full(8, 7, dtype=np.int32)
        assert attended_contexts(contexts, 2).tolist() == [7, 0, 0, 0, 7, 0, 0, 0]
        assert attended_contexts(contexts[:1], 2).tolist() == [7]
    with sparsely():
        assert not is_left_out("window"), "each run begins anew"


def test_sparse_steps_take_the_first_and_the_last_block_of_rows_through_the_layers() -> None:
    """Skipped parts are zero, as tokens are sampled from them."""
    rows = torch.ones(3000, 8)
    with sparsely():
        sparse = StepRows(rows, rows)
    assert [block.start for block in sparse.blocks] == [0, 2048]
    assert not sparse.normed.any()
    assert [block.start for block in StepRows(rows, rows).blocks] == [0, 1024, 2048]


def test_a_sparse_product_takes_the_first_and_the_last_block() -> None:
    product = QuantizedProduct(torch.ones(16, 16, dtype=torch.bfloat16), None, threads=1)
    rows = torch.ones(3000, 16, dtype=torch.bfloat16)
    with sparsely():
        sparse = product(rows)
    assert (sparse[:1024] == 16).all()
    assert not sparse[1024:2048].any()
    assert (sparse[2048:] == 16).all()
    assert (product(rows) == 16).all()


def test_skipped_rows_of_a_sparse_product_are_zero() -> None:
    """Tokens are sampled from the head's results: they may be meaningless, but must be valid numbers."""
    product = QuantizedProduct(torch.ones(96, 16, dtype=torch.bfloat16), None, threads=1)
    rows = torch.ones(3, 16, dtype=torch.bfloat16)
    whole = product(rows)
    with sparsely():
        sparse = product(rows)
    assert (whole == 16).all()
    assert sparse.shape == whole.shape
    assert set(sparse.flatten().tolist()) == {0.0, 16.0}


ENCODES = """
import sys
from contextlib import nullcontext
from vsched.worker.memory import limit_process_memory
limit_process_memory(4 << 30, keys="encode.memory_limit")
from vsched.worker import reserve
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
        reserve._run(worker, arena, batch)
print(memory.peak() - loaded.reserved_bytes, reservation.growth_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_a_sparse_reservation_is_what_whole_batches_take(
    checkpoints: Callable[[str], Path], size: str, dtype: str
) -> None:
    """The same peak, apart from fragmentation, which the reservation allows for."""
    done = subprocess.run(
        [sys.executable, "-c", ENCODES, str(checkpoints(size)), dtype],
        env=rank_environment(threads=1),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    whole, reserved = map(int, done.stdout.split())
    measured = (reserved - DRIFT_BYTES) / (1 + 1 / SCATTERED_SHARE)
    assert measured > whole / 4, "the reservation is not only what is added to every one"
    assert whole <= reserved
