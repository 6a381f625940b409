"""The paged KV cache: keys and values of every layer, in the model's data type or int8, and the swap space.

In int8, a head of a token is stored as its int8 values followed by their scale, a bfloat16:

    head [x_0 .. x_n-1]  ->  [round(x_0 / s) .. round(x_n-1 / s), s],   s = max |x_i| / 127

As each head has its own scale, a token is written without reading others of its block, and blocks are copied, shared
and swapped like blocks of any other type. Attention always reads the quantized values, never those that the model had
computed: otherwise the output would depend on the chunks of a prompt.

A place in the swap space holds the keys and values of one block in every layer, stored layer by layer. Copies go layer
by layer, over runs of consecutive places: blocks may lie anywhere, and no temporary memory is needed. On a CPU the KV
cache is in host memory, too, but the swap space is still a separate mapping. It is shared memory, which the limit on
the process does not count: as for the arena, the host must have it. The host backs its pages on first write.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vsched.errors import DeviceOutOfMemory
from vsched.types import KV_SCALE_BYTES
from vsched.worker.memory import host_available

LEVELS = 127
"""The largest int8 value; -128 is not used."""
SCALE_MIN = 1e-37
"""Heads with a smaller scale are stored as zeros: the inverse of the scale must be finite."""


class Allocate(Protocol):
    """Allocates zeroed memory on a device."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape and type."""
        ...


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """View a tensor as a numpy array; bfloat16, which numpy lacks, as uint16."""
    half = tensor.dtype == torch.bfloat16
    found: npt.NDArray[Any] = (tensor.view(torch.uint16) if half else tensor).numpy()
    return found


class KvShape(NamedTuple):
    """Shape of one layer's keys and values per token: heads, and values of each key and each value head."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def kept_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values of a token in a cache of this type."""
        widths = kept_width(self.key_dim, dtype) + kept_width(self.value_dim, dtype)
        return self.kv_heads * widths * dtype.itemsize


def kept_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a stored head, including its scale."""
    return head_dim + KV_SCALE_BYTES if dtype == torch.int8 else head_dim


def kept_dim(width: int, dtype: torch.dtype) -> int:
    """Return the number of values in a stored head of `width` elements."""
    return width - KV_SCALE_BYTES if dtype == torch.int8 else width


def to_int8(heads: torch.Tensor) -> torch.Tensor:
    """Quantize heads [..., head dim] to int8, [..., head dim + bytes of the scale]."""
    exact = heads.float()
    scale = (exact.abs().amax(-1, keepdim=True) * (1 / LEVELS)).bfloat16()
    inverse = scale.float().reciprocal().masked_fill(scale < SCALE_MIN, 0.0)
    levels: torch.Tensor = (exact * inverse).round_().clamp_(-LEVELS, LEVELS)
    return torch.cat([levels.to(torch.int8), scale.view(torch.int8)], dim=-1)


def from_int8(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize int8 heads to [..., head dim] of a type."""
    levels, scale = kept.split((kept.shape[-1] - KV_SCALE_BYTES, KV_SCALE_BYTES), dim=-1)
    heads: torch.Tensor = levels.float() * scale.contiguous().view(torch.bfloat16).float()
    return heads.to(dtype)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Keys and values of one layer, [slots, kv heads, elements of a head] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def value_dim(self) -> int:
        """Values of a value head."""
        return kept_dim(self.values.shape[2], self.values.dtype)

    def put(
        self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of some rows to their slots; return them as stored, in the same shape.

        Shape: slots int64 [rows]; key and value [kv heads, rows, head dim].
        """
        return _put(self.keys, slots, key), _put(self.values, slots, value)

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some slots in a type, [*slots, kv heads, head dim] each."""
        return _read(self.keys, slots, dtype), _read(self.values, slots, dtype)


def _put(kept: torch.Tensor, slots: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    rows = given.transpose(0, 1)
    if kept.dtype != torch.int8:
        kept.index_copy_(0, slots, rows)
        return given
    packed = to_int8(rows)
    kept.index_copy_(0, slots, packed)
    return from_int8(packed, given.dtype).transpose(0, 1)


def _read(kept: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found = kept.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return from_int8(found, dtype) if kept.dtype == torch.int8 else found


class KvCache:
    """Keys and values of every layer, [blocks * block_size, kv heads, elements of a head] each."""

    def __init__(
        self,
        shapes: Sequence[KvShape],
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate: Allocate,
        spare_blocks: int = 0,
    ) -> None:
        """Allocate for layers of these shapes.

        Args:
            shapes: Shape of each layer's keys and values.
            blocks: Blocks for requests.
            block_size: Slots of a block.
            dtype: The type of the model, or int8.
            allocate: Allocates the memory.
            spare_blocks: Extra blocks at the end, for writes of padding rows.
        """
        self.block_size = block_size
        self.blocks = blocks
        slots = (blocks + spare_blocks) * block_size
        rows = [(each.kv_heads, kept_width(each.key_dim, dtype)) for each in shapes]
        rows += [(each.kv_heads, kept_width(each.value_dim, dtype)) for each in shapes]
        sizes = [slots * heads * width for heads, width in rows]
        whole = allocate((sum(sizes),), dtype=dtype)
        parts = [part.view(slots, *row) for part, row in zip(whole.split(sizes), rows, strict=True)]
        self.keys, self.values = parts[: len(shapes)], parts[len(shapes) :]
        self.layers = [LayerKv(*each) for each in zip(self.keys, self.values, strict=True)]

    @functools.cached_property
    def arrays(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """The same memory as numpy arrays."""
        return [(as_array(each.keys), as_array(each.values)) for each in self.layers]

    @functools.cached_property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Addresses of each layer's keys and values, [layers, 2]."""
        return np.array([(each.keys.data_ptr(), each.values.data_ptr()) for each in self.layers])


Pairs = npt.NDArray[np.int32]
"""Copies, [copies, 2]: source and target."""

SWAP_REMEDY = "lower generate.swap_memory"

RUN_MAX = 64
"""The largest number of blocks in a run: on a device, a run of one layer is gathered first."""


def shared_pages(size: int) -> torch.Tensor:
    """Return `size` bytes of host memory that no limit on the process counts."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class SwapArea:
    """Swap space for blocks of one KV cache, in the kind of memory that the cache is in."""

    def __init__(self, cache: KvCache, blocks: int) -> None:
        """Allocate space for `blocks` blocks.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        size = cache.block_size
        self._parts = [
            part.view(len(part) // size, -1) for part in (*cache.keys, *cache.values) if len(part)
        ]
        widths = [part.shape[1] for part in self._parts]
        dtype = self._parts[0].dtype
        size_bytes, available = blocks * sum(widths) * dtype.itemsize, host_available()
        if size_bytes > available:
            raise DeviceOutOfMemory.of_limit(
                "generate.swap_memory: the host has less free",
                value=f"{size_bytes} bytes a rank",
                limit=f"{available} bytes",
                remedy=SWAP_REMEDY,
            )
        whole = shared_pages(size_bytes).view(dtype)
        pieces = whole.split([blocks * width for width in widths])
        self._places = [
            piece.view(blocks, width) for piece, width in zip(pieces, widths, strict=True)
        ]

    def copy(self, out: Pairs, back: Pairs) -> None:
        """Copy blocks to places, then places to blocks."""
        for place, blocks in runs(out[:, ::-1]):
            for part, places in zip(self._parts, self._places, strict=True):
                torch.index_select(part, 0, blocks, out=places[place : place + len(blocks)])
        for place, blocks in runs(back):
            for part, places in zip(self._parts, self._places, strict=True):
                part.index_copy_(0, blocks, places[place : place + len(blocks)])


def runs(pairs: Pairs) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield runs of places: the first place, and the corresponding blocks, int64; `pairs` has the places first."""
    if not len(pairs):
        return
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    breaks = np.flatnonzero(np.diff(ordered[:, 0]) != 1) + 1
    for run in np.split(ordered, breaks):
        for first in range(0, len(run), RUN_MAX):
            piece = run[first : first + RUN_MAX]
            yield int(piece[0, 0]), torch.from_numpy(piece[:, 1].astype(np.int64))
