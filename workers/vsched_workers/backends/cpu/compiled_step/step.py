"""Steps in one call: tables of a model's layers, rotary angles of the rows, and the call of the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.attention import (
    attention_kernel,
    padded_context,
    shares_of,
)
from vsched_workers.backends.cpu.compiled_step.kernel import (
    MODEL,
    Chunks,
    PackedRows,
    Places,
    Tables,
    run_layers,
)
from vsched_workers.backends.cpu.kernels.bf16 import BF16
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.gemm import WEIGHT
from vsched_workers.backends.cpu.kernels.norm import NORM, add_norm, add_normed, norm_parts
from vsched_workers.backends.cpu.kernels.prefill_attention import any_arguments
from vsched_workers.backends.cpu.kernels.rope import HEADS, Bf16Array, rope_prefill
from vsched_workers.backends.cpu.products import KernelProduct, addresses_of
from vsched_workers.backends.cpu.threads import pool_of, process_pool
from vsched_workers.backends.reference.layers import Angles
from vsched_workers.backends.reference.packed_weights import BLOCK_ROWS

if TYPE_CHECKING:
    from vsched_workers.backends.cpu.layer_parts import Norm
    from vsched_workers.batching.paged_attention import PagedStep
    from vsched_workers.families.decoders import AttentionKind, Decoder


_ONE = np.uint16(0x3F80)
"""1.0 in bfloat16."""


class StepAngles:
    """Cosines and sines of rows; kinds of layers that do not rotate have zero angles."""

    def __init__(self, kinds: Sequence[AttentionKind], angles: Mapping[str, Angles]) -> None:
        """Take the kinds of layers, and the angles by frequencies."""
        self._kinds, self._angles = kinds, angles

    def __call__(self, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
        """Return cosines and sines [kinds, rows, head_dim / 2] of positions [4, 1, rows]."""
        found = {}
        for name, made in self._angles.items():
            cos, sin = made(positions)
            found[name] = cos.view(torch.uint16).numpy(), sin.view(torch.uint16).numpy()
        turned = [found[kind.frequencies] for kind in self._kinds]
        still = [
            (cos, sin) if kind.rotates else (np.full_like(cos, _ONE), np.zeros_like(sin))
            for kind, (cos, sin) in zip(self._kinds, turned, strict=True)
        ]
        return np.stack([cos for cos, _ in still]), np.stack([sin for _, sin in still])


_TAGS = BF16, BF16, BF16, BF16
_LINE_VALUES = 32
"""bfloat16 values of a cache line, to which buffers are aligned."""


_NO_CHUNKS = np.empty((0, 4), dtype=np.int64), np.empty(0, dtype=np.int64)


class CompiledStep:
    """Runs a step's rows through layers whose products all use this package's kernels.

    Attributes:
        rows_max: Maximum rows of a step: those that layers one by one would multiply at once.
    """

    rows_max = BLOCK_ROWS

    def __init__(
        self,
        layers: Sequence[Any],
        last: Norm,
        *,
        decoder: Decoder,
        factor: np.float32,
        activation: Any,
        threads: int,
        kept: npt.NDArray[Any],
        tiles: bool,
    ) -> None:
        """Take layers that pass `fits` and must outlive this object.

        Args:
            layers: The layers, as in `language_layers`.
            last: The final norm.
            decoder: Description of the architecture.
            factor: Multiplier of the residual.
            activation: Kernel of the MLP's activation.
            threads: Threads of the kernels.
            kept: An array with the dtype and layout of the cache.
            tiles: Whether chunks attend in AMX tiles if the processor has them.
        """
        first, self._threads, self._tiles = layers[0], threads, tiles
        self._pool = pool_of(threads)
        attention = first.attention
        products: list[KernelProduct] = [each for layer in layers for each in _products(layer)]
        self._kv_heads, self._head_dim = attention.kv_heads, attention.head_dim
        self._queries = attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        inner = first.gate.shape[0]
        model = (
            *(last.width, inner, self._queries, keys),
            *(decoder.adds_plainly, decoder.norms_all_heads, factor, self._pool),
        )
        norms = [
            norm
            for each in layers
            for norm in (
                each.input_layernorm,
                each.attention_output_norm,
                each.post_attention_layernorm,
                each.mlp_output_norm,
            )
        ]
        self._tables = Tables(
            np.array([model], dtype=MODEL),
            np.concatenate([each.weight for each in products]),
            np.array(addresses_of(products), dtype=np.int64),
            np.concatenate([each.record for each in (*norms, last)]),
            np.concatenate([norm.record for each in layers for norm in each.head_norms]),
            np.concatenate([each.heads for each in layers]),
            np.array([(each.kind, each.attention.index) for each in layers]),
        )
        self._wide = max(self._queries + 2 * keys, inner)
        self._other = max(last.width, inner)
        attend, self._tag = attention_kernel(tiles=tiles)
        self._addresses = np.array(  # in the order of `kernel.KERNELS`
            [
                (add_norm if decoder.adds_plainly else add_normed).address_of(),
                norm_parts.address_of() if decoder.norms_all_heads else 0,
                activation.address_of(),
                decode.address_of(kept, kept),
                rope_prefill.address_of(kept, kept),
                attend.address_of(any_arguments(self._tag)),
            ]
        )
        self._no_chunks = Chunks(*_NO_CHUNKS, 0, 0, 0, self._tag)
        compile_for(kept)

    def __call__(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        angles: tuple[Bf16Array, Bf16Array],
        step: PagedStep,
        heads_buffer: torch.Tensor | None,
        *,
        attends_together: bool,
        layers: range,
    ) -> None:
        """Run rows through some consecutive layers.

        Shape: hidden, normed [rows, hidden], which are overwritten; angles as of `StepAngles`; heads_buffer as of
        `language_layers`.

        Args:
            hidden: Hidden states.
            normed: Their norms, the input of the first layer, unless that is layer 0. Afterwards the norms that the
                next layer takes, or the final norms.
            angles: Cosines and sines of the rows.
            step: The step.
            heads_buffer: Buffer for the heads of prefill rows; None for a step without them.
            attends_together: Decode attention runs on all threads.
            layers: The layers.
        """
        count = len(hidden)
        widths = [_whole_lines(count * each) for each in (self._queries, self._wide, self._other)]
        buffer = hidden.new_empty(sum(widths))
        buffer_at = buffer.data_ptr()
        wide_at = buffer_at + 2 * widths[0]
        threads = self._threads if attends_together else 1
        chunks = self._no_chunks
        if heads_buffer is not None:
            longest = max((each.context for each in step.segments), default=0)
            keys, head_dim = padded_context(longest, self._head_dim, tiles=self._tiles)
            packed = hidden.new_empty(self._kv_heads * keys * 2 * head_dim)
            pool, tag = process_pool().state_at, self._tag
            chunks = Chunks(
                *_chunks_of(step), heads_buffer.data_ptr(), packed.data_ptr(), pool, tag
            )
        rows = PackedRows(
            *angles,
            step.slots.numpy(),
            step.tables,
            step.contexts,
            shares_of(step.decode_rows, self._kv_heads, threads),
            self._pool if attends_together else 0,
            chunks,
        )
        at = Places(
            hidden.data_ptr(), normed.data_ptr(), buffer_at, wide_at, wide_at + 2 * widths[1]
        )
        run_layers(
            self._addresses,
            _TAGS,
            self._tables,
            rows,
            at,
            step.cache.addresses,
            step.cache.arrays[0][0],
            step.cache.block_size,
            layers.start,
            layers.stop,
        )


def _chunks_of(step: PagedStep) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the bounds of a step's chunks, and their slots, for `kernel.Chunks`."""
    if not step.segments:
        return _NO_CHUNKS
    slots = [segment.slots().numpy() for segment in step.segments]
    begins = np.cumsum([0, *(len(each) for each in slots[:-1])])
    bounds = [
        (segment.start - step.decode_rows, segment.stop - step.decode_rows, segment.first, begin)
        for segment, begin in zip(step.segments, begins, strict=True)
    ]
    return np.array(bounds, dtype=np.int64), np.concatenate(slots)


def fits(layers: Sequence[Any]) -> bool:
    """Return True if a compiled step can run the layers: this package's products, unpermuted inputs, equal shapes."""
    if not layers:
        return False
    products = [each for layer in layers for each in _products(layer)]
    if not all(isinstance(each, KernelProduct) and not each.has_order for each in products):
        return False
    return len({tuple(each.shape for each in _products(layer)) for layer in layers}) == 1


def compile_for(kept: npt.NDArray[Any]) -> None:
    """Compile `run_layers` for a cache type."""
    none = np.empty(0, dtype=np.int64)
    norms, halves = np.empty(0, dtype=NORM), np.empty((0, 0, 0), dtype=np.uint16)
    given = (
        none,
        _TAGS,
        Tables(
            np.empty(0, dtype=MODEL),
            np.empty(0, dtype=WEIGHT),
            np.empty((0, 0), dtype=np.int64),
            norms,
            norms,
            np.empty(0, dtype=HEADS),
            np.empty((0, 0), dtype=np.int64),
        ),
        PackedRows(
            *(halves, halves, none, np.empty((0, 0), dtype=np.int32)),
            *(np.empty(0, dtype=np.int32), 1, 0),
            Chunks(*_NO_CHUNKS, 0, 0, 0, attention_kernel()[1]),
        ),
        Places(0, 0, 0, 0, 0),
        np.empty((0, 0), dtype=np.int64),
        kept,
        *(1, 0, 0),
    )
    run_layers.compile(tuple(numba.typeof(each) for each in given))


def _products(layer: Any) -> tuple[Any, ...]:
    return layer.qkv, layer.o_proj, layer.gate, layer.up, layer.down


def _whole_lines(values: int) -> int:
    return -(-values // _LINE_VALUES) * _LINE_VALUES
