"""Conversion of GGUF blocks to values, scales and offsets, exact except for the sum of two offsets.

A row of a tensor consists of blocks. The formats, with nibbles and pairs of bits in the order of llama.cpp's ggml:

    Q8_0   32 values   d, 32 x int8                                   d q
    Q4_0   32 values   d, 32 x 4 bits                                 d (q - 8)
    Q4_1   32 values   d, m, 32 x 4 bits                              d q + m
    Q4_K  256 values   d, e, 8 x (s, t) of 6 bits, 256 x 4 bits       d s q - e t      of 32 values each
    Q6_K  256 values   256 x 6 bits, 16 x s of int8, d                d s (q - 32)     of 16 values each

d, m and e are float16. 4-bit values stay 4-bit; 6-bit values are stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CENTRE = 8
"""The zero point of 4-bit values in memory."""


class Levels(NamedTuple):
    """A quantized weight [out, in].

    Attributes:
        values: int8 [out, in], or 4-bit values with a zero point of 8, as uint8 [out, in].
        scales: [out, groups], for groups of equal size.
        offsets: As scales; None without offsets.
    """

    values: npt.NDArray[Any]
    scales: Floats
    offsets: Floats | None = None


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at a position of each block, [out, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(octets: Bytes) -> Bytes:
    """Return 4-bit values: the low nibbles of all bytes, then the high ones."""
    return np.concatenate((octets & 15, octets >> 4), axis=-1)


def _q8_0(blocks: Bytes) -> Levels:
    return Levels(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Levels:
    return Levels(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Levels:
    scales = _half(blocks, 0)
    return Levels(_nibbles(blocks[..., 4:]), scales, _half(blocks, 2) + CENTRE * scales)


def _q4_k(blocks: Bytes) -> Levels:
    packed = blocks[..., 4:16]
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((low & 63, last & 15 | low >> 6 << 4), axis=-1)
    minima = np.concatenate((high & 63, last >> 4 | high >> 6 << 4), axis=-1)
    exact = _half(blocks, 0) * scales
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Levels(values, exact, CENTRE * exact - _half(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Levels:
    shape = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))
    pairs = blocks[..., 128:192].reshape(*shape, 2, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Levels(values, _half(blocks, 208) * scales)


READERS: Mapping[str, tuple[int, Callable[[Bytes], Levels]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
"""Formats by name: the bytes of a block, and the reader of blocks [out, blocks, bytes]."""


def read_blocks(name: str, rows: Bytes) -> Levels:
    """Return the quantized values in a tensor's rows, [out, bytes], of the format with this name."""
    size, read = READERS[name]
    found = read(rows.reshape(len(rows), -1, size))
    grids = (None if each is None else each.reshape(len(rows), -1) for each in found[1:])
    scales, offsets = grids
    assert scales is not None, "every format has scales"
    return Levels(found.values.reshape(len(rows), -1), scales, offsets)
