"""Steps in one call: tables of a model's layers, rotary angles of the rows, and the call of the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
    CALL_ACTIVATION,
    CALL_ADD_NORM,
    CALL_ADD_NORMED,
    CALL_ATTEND,
    CALL_DECODE,
    CALL_FLOATS,
    CALL_INT8,
    CALL_NORM_PARTS,
    CALL_PANELS,
    CALL_ROPE,
    FLOATS,
    MODEL,
    PANEL_PRODUCT,
    PRODUCT,
    PRODUCTS,
    Chunks,
    PackedRows,
    Places,
    Tables,
    run_layers,
)
from vsched_workers.backends.cpu.kernels import gemm
from vsched_workers.backends.cpu.kernels.bf16 import BF16
from vsched_workers.backends.cpu.kernels.compilation import KernelCall
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.norm import NORM, add_norm, add_normed, norm_parts
from vsched_workers.backends.cpu.kernels.prefill_attention import no_arguments
from vsched_workers.backends.cpu.kernels.rope import HEADS, Bf16Array, rope_prefill
from vsched_workers.backends.cpu.products import PanelProduct, QuantizedProduct
from vsched_workers.backends.cpu.quantized import kernel as floats
from vsched_workers.backends.cpu.quantized.integers import multiply_int8
from vsched_workers.backends.cpu.threads import pool_of, process_pool
from vsched_workers.backends.cpu.tiles.kernel import multiply_in_tiles
from vsched_workers.backends.reference.layers import Angles
from vsched_workers.backends.reference.packed_weights import BLOCK_ROWS

if TYPE_CHECKING:
    from vsched_workers.backends.cpu.layer_parts import Norm
    from vsched_workers.batching.paged_attention import PagedStep
    from vsched_workers.families.decoders import AttentionKind


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


_ROWS_MAX = BLOCK_ROWS
"""Maximum rows of a step: those that layers one by one would multiply at once."""
_LINE_VALUES = 32
"""bfloat16 values of a cache line, to which buffers are aligned."""


class Traits(NamedTuple):
    """Attributes of a model that select the kernels of its steps.

    Attributes:
        activation: Kernel of the MLP's activation.
        adds_plainly: See `Decoder`; `norms_all_heads` likewise.
        factor: Multiplier of the residual.
        threads: Threads of the kernels.
        kept: An array with the dtype and layout of the cache.
        tiles: Whether chunks attend in AMX tiles if the processor has them.
    """

    activation: Any
    adds_plainly: bool
    norms_all_heads: bool
    factor: np.float32
    threads: int
    kept: npt.NDArray[Any]
    tiles: bool


class _Kind(NamedTuple):
    """A kind of products: its kernels, their call, and the dtype of its records."""

    kernels: tuple[Any, ...]
    call: KernelCall
    record: np.dtype[Any]


_KINDS = (
    _Kind((gemm.multiply, multiply_in_tiles), CALL_PANELS, PANEL_PRODUCT),
    _Kind((multiply_int8,), CALL_INT8, floats.INT8_PRODUCT),
    _Kind((floats.multiply,), CALL_FLOATS, floats.FLOAT_PRODUCT),
)
"""In the order of `kernel.PANELS`, `INT8_ACTIVATIONS` and `FLOATS`."""

_Product = PanelProduct | QuantizedProduct
_Table = npt.NDArray[Any]


_NO_CHUNKS = np.empty((0, 4), dtype=np.int64), np.empty(0, dtype=np.int64)


class CompiledStep:
    """Runs a step's rows through layers whose products all use this package's kernels.

    Attributes:
        rows_max: Maximum rows of a step.
        inner: Outputs of the gate.
    """

    def __init__(
        self, layers: Sequence[Any], last: Norm, traits: Traits, angles: StepAngles
    ) -> None:
        """Take layers (`language_layers`) that pass `fits` and must outlive this object, and the final norm."""
        first, self._traits, self._angles = layers[0], traits, angles
        self._pool = pool_of(traits.threads)
        attention = first.attention
        products = [own for layer in layers for each in _products(layer) if (own := _own(each))]
        self.rows_max = min(_ROWS_MAX, *(each.step_rows_max for each in products))
        self._kv_heads, self._head_dim = attention.kv_heads, attention.head_dim
        self._queries = attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        inner = self.inner = first.gate.shape[0]
        model = (
            *(last.width, inner, self._queries, keys),
            *(traits.adds_plainly, traits.norms_all_heads, traits.factor, self._pool),
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
            *_tables_of(products, len(layers)),
            np.concatenate([each.record for each in (*norms, last)]),
            np.concatenate([norm.record for each in layers for norm in each.head_norms]),
            np.concatenate([each.heads for each in layers]),
            np.array([(each.kind, each.attention.index) for each in layers]),
        )
        self._wide = max(self._queries + 2 * keys, inner)
        self._other = max(last.width, inner)
        self._addresses = _addresses(traits)
        self._tag = attention_kernel(tiles=traits.tiles)[1]
        self._no_chunks = Chunks(*_NO_CHUNKS, 0, 0, 0, self._tag)
        compile_for(traits.kept)

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
        threads = self._traits.threads if attends_together else 1
        chunks = self._no_chunks
        if heads_buffer is not None:
            longest = max((each.context for each in step.segments), default=0)
            keys, head_dim = padded_context(longest, self._head_dim, tiles=self._traits.tiles)
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
            BF16,
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
    if not all(_own(each) for layer in layers for each in _products(layer)):
        return False
    return len({tuple(each.shape for each in _products(layer)) for layer in layers}) == 1


def compile_for(kept: npt.NDArray[Any]) -> None:
    """Compile `run_layers` for a cache type."""
    none = np.empty(0, dtype=np.int64)
    norms, halves = np.empty(0, dtype=NORM), np.empty((0, 0, 0), dtype=np.uint16)
    given = (
        none,
        BF16,
        Tables(
            np.empty(0, dtype=MODEL),
            *_tables_of([], 0),
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


def _tables_of(
    products: Sequence[_Product], layers: int
) -> tuple[_Table, _Table, _Table, _Table, _Table]:
    """Build the tables of products for `kernel.Tables`: products, their kernels, and the records of each kind."""
    rows: list[tuple[int, ...]] = []
    records: list[list[tuple[Any, ...]]] = [[] for _ in _KINDS]
    formats: dict[tuple[Any, ...], int] = {}
    addresses: list[tuple[int, ...]] = []
    for product in products:
        kind = next(at for at, each in enumerate(_KINDS) if product.kernel in each.kernels)
        called = (kind, product.kernel, product.many_rows_min, *(tag.dtype for tag in product.tags))
        if called not in formats:
            formats[called] = len(addresses)
            addresses.append(_addresses_of(kind, product))
        weights = product.shape[0] * product.shape[1]
        rows.append((kind, len(records[kind]), formats[called], weights))
        records[kind].append(product.record)
    panel_products, int8_products, float_products = (
        np.array(found, dtype=kind.record) for kind, found in zip(_KINDS, records, strict=True)
    )
    return (
        np.array(rows, dtype=PRODUCT).reshape(layers, len(PRODUCTS)),
        np.array(addresses, dtype=np.int64).reshape(-1, 3),
        panel_products,
        int8_products,
        float_products,
    )


def _addresses_of(kind: int, product: _Product) -> tuple[int, int, int]:
    """A product's row of `Tables.multiply`."""
    call = _KINDS[kind].call
    few = call.address_of(product.kernel, *product.tags)
    if product.many_rows_kernel is None or kind == FLOATS:
        return few, few, product.many_rows_min
    many = call.address_of(product.many_rows_kernel, *product.tags)
    return few, many, product.many_rows_min


def _addresses(traits: Traits) -> npt.NDArray[np.int64]:
    """Addresses of `kernel.KERNELS`."""
    kept, (attend, tag) = traits.kept, attention_kernel(tiles=traits.tiles)
    return np.array(
        [
            CALL_ADD_NORM.address_of(add_norm)
            if traits.adds_plainly
            else CALL_ADD_NORMED.address_of(add_normed),
            CALL_NORM_PARTS.address_of(norm_parts) if traits.norms_all_heads else 0,
            CALL_ACTIVATION.address_of(traits.activation),
            CALL_DECODE.address_of(decode, kept, kept),
            CALL_ROPE.address_of(rope_prefill, kept, kept),
            CALL_ATTEND.address_of(attend, no_arguments(tag)),
        ]
    )


def _products(layer: Any) -> tuple[Any, ...]:
    return layer.qkv, layer.o_proj, layer.gate, layer.up, layer.down


def _own(product: Any) -> _Product | None:
    """Return the product if it uses this package's kernels with unpermuted inputs."""
    if isinstance(product, QuantizedProduct):
        return None if product.has_order else product
    return product if isinstance(product, PanelProduct) else None


def _whole_lines(values: int) -> int:
    return -(-values // _LINE_VALUES) * _LINE_VALUES
