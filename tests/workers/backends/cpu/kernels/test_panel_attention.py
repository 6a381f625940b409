"""Attention over a cache in panels: against float64, and the same bits for a row in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("numba")

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.panel_attention import RUN_QUERIES, attend_rows
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.threads import pool_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_bf16_dot(), reason="the processor has no VDPBF16PS"),
]

KV_HEADS = 2
BLOCKS = 40


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    return tensor.view(torch.uint16).numpy()


class Layer:
    """A cache full of NaN, and two sequences of random rows with scattered blocks."""

    def __init__(self, group: int, head_dim: int, block_size: int, lengths: Sequence[int]) -> None:
        torch.manual_seed(group + head_dim)
        self.heads, self.head_dim, self.block_size = group * KV_HEADS, head_dim, block_size
        self.lengths = lengths
        width = self.heads + 2 * KV_HEADS
        self.qkv = [torch.randn(n, width, head_dim).bfloat16() for n in lengths]
        self.angles = [torch.rand(n, head_dim // 2) * 7 for n in lengths]
        blocks = torch.randperm(BLOCKS).int()
        self.tables = [each.numpy() for each in blocks.chunk(len(lengths))]
        self.record = heads_of(self.heads, 0, 0, 0.0, head_dim**-0.5)
        shape = (BLOCKS * block_size, KV_HEADS, head_dim)
        # torch aligns to cache lines.
        self.keys, self.values = (bits(torch.full(shape, torch.nan).bfloat16()) for _ in "kv")
        self.out = [torch.zeros(n, self.heads, head_dim).bfloat16() for n in lengths]

    def attend(
        self, *parts: tuple[int, int, int], parallel: bool = False, requested: Sequence[int] = ()
    ) -> None:
        """Attend for the rows `first` to `stop` of each sequence, all at once, or only for some positions."""
        places = [(each, place) for each, first, stop in parts for place in range(first, stop)]
        qkv = torch.stack([self.qkv[each][place] for each, place in places])
        out = torch.zeros(len(places), self.heads, self.head_dim).bfloat16()
        angles = torch.stack([self.angles[each][place] for each, place in places])
        cos, sin = (bits(each.bfloat16()) for each in (angles.cos(), angles.sin()))
        tables = np.stack([self.tables[each] for each, _ in places])
        contexts = np.array(
            [place + 1 if place in requested or not requested else 0 for _, place in places],
            dtype=np.int32,
        )
        size = self.block_size
        slots = np.array(
            [self.tables[each][place // size] * size + place % size for each, place in places]
        )
        attend_rows(
            pool_of(2) if parallel else 0,
            qkv.data_ptr(),
            out.data_ptr(),
            self.record,
            RopeRows(cos, sin, slots.astype(np.int64)),
            self.keys,
            self.values,
            tables,
            contexts,
            size,
        )
        for row, (each, place) in enumerate(places):
            self.out[each][place] = out[row]

    def wanted(self, each: int) -> torch.Tensor:
        """Return the causal attention of all rows of a sequence, in float64."""
        count, half = self.lengths[each], self.head_dim // 2
        cos, sin = (
            part.bfloat16().double()[:, None]
            for part in (self.angles[each].cos(), self.angles[each].sin())
        )
        qkv = self.qkv[each].double()
        lower, upper = qkv[..., :half], qkv[..., half:]
        rotated = torch.cat([lower * cos - upper * sin, upper * cos + lower * sin], dim=-1)
        query, key = rotated[:, : self.heads], rotated[:, self.heads : -KV_HEADS]
        group = self.heads // KV_HEADS
        key, value = (
            part.repeat_interleave(group, dim=1).transpose(0, 1)
            for part in (key, qkv[:, -KV_HEADS:])
        )
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * self.head_dim**-0.5
        scores += torch.full((count, count), -torch.inf).triu(1)
        wanted: torch.Tensor = (scores.softmax(-1) @ value).transpose(0, 1)
        return wanted


SIZES = [
    (1, 64, 16),
    (2, 64, 32),
    (3, 128, 16),
    (7, 80, 16),
    (2, 32, 48),
    (4, 16, 16),
    (30, 16, 16),
]


@pytest.mark.parametrize(("group", "head_dim", "block_size"), SIZES)
def test_rows_attend_to_the_tokens_of_their_blocks(
    group: int, head_dim: int, block_size: int
) -> None:
    """Memory after the last token is not read, whatever its content."""
    layer = Layer(group, head_dim, block_size, [77, 1])
    layer.attend((0, 0, 77), (1, 0, 1))
    for each in range(2):
        wanted = layer.wanted(each)
        assert torch.allclose(layer.out[each].double(), wanted, atol=2e-2, rtol=2e-2)
        error = (layer.out[each].double() - wanted).abs().mean()
        assert error < 4e-3 * wanted.abs().mean()


@pytest.mark.parametrize(("group", "head_dim", "block_size"), SIZES)
def test_a_row_is_the_same_however_rows_come(group: int, head_dim: int, block_size: int) -> None:
    """All at once, row by row, and split at any position, together with another sequence, with one thread."""
    lengths = [100, 60]
    found = []
    run = max(RUN_QUERIES // group, 1)
    for borders in (
        [0, 100],
        list(range(101)),
        [0, 1, 2, 15, 16, 17, 31, 50, 98, 99, 100],
        [0, run, 2 * run + 1, 64, 65, 100] if 2 * run + 1 < 64 else [0, 64, 65, 100],
    ):
        layer = Layer(group, head_dim, block_size, lengths)
        for number, (first, stop) in enumerate(itertools.pairwise(borders)):
            other = (1, number * 60 // (len(borders) - 1), (number + 1) * 60 // (len(borders) - 1))
            parts = [(0, first, stop), *([other] if other[1] < other[2] else [])]
            layer.attend(*parts if number % 2 else parts[::-1])
        assert all(each.isfinite().all() for each in layer.out)
        found.append([bits(each).tobytes() for each in layer.out])
    assert found[0] == found[1] == found[2] == found[3]


def test_a_row_is_the_same_however_rows_come_on_all_threads() -> None:
    layer, other = (Layer(2, 64, 16, [100, 60]) for _ in range(2))
    layer.attend((0, 0, 100), (1, 0, 60), parallel=True)
    for row in range(100):
        other.attend((0, row, row + 1), *([(1, row, row + 1)] if row < 60 else []), parallel=True)
    assert [bits(each).tobytes() for each in layer.out] == [
        bits(each).tobytes() for each in other.out
    ]


def test_rows_that_nobody_asks_for_are_left_out() -> None:
    """Their keys are written."""
    layer, other = (Layer(2, 64, 16, [40, 1]) for _ in range(2))
    layer.attend((0, 0, 40))
    other.attend((0, 0, 40), requested=[7, 39])
    for place in range(40):
        requested = place in {7, 39}
        assert other.out[0][place].equal(layer.out[0][place] * requested)


def test_neighbours_of_two_sequences_with_contexts_that_follow_each_other_are_no_run() -> None:
    """A row of a sequence of n tokens, followed by one of another sequence of n + 1 tokens with other blocks."""
    for length in (1, 15, 16, 17, 39):
        layer, other = (Layer(2, 64, 16, [length, length + 1]) for _ in range(2))
        if length > 16:  # they share a cached prefix
            for each in (layer, other):
                each.tables[1] = np.concatenate([each.tables[0][:1], each.tables[1][1:]])
                each.qkv[1][:16], each.angles[1][:16] = each.qkv[0][:16], each.angles[0][:16]
        for one in (layer, other):
            one.attend((0, 0, length - 1), (1, 0, length))
        layer.attend((0, length - 1, length), (1, length, length + 1))
        other.attend((0, length - 1, length))
        other.attend((1, length, length + 1))
        for found, alone in zip(layer.out, other.out, strict=True):
            assert bits(found[-1]).tolist() == bits(alone[-1]).tolist()
        assert torch.allclose(layer.out[1][-1].double(), layer.wanted(1)[-1], atol=2e-2, rtol=2e-2)
