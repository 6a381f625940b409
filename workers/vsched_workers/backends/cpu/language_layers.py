"""Fused layers of a bfloat16 language model on a CPU: five products per layer and four calls between them.

With transformers' modules a small decode step spends three quarters of its time on calls: about forty-five per layer,
each over all rows. Here a layer is five products with packed weights (QKV is one of them) and four calls of the
compiled kernels in `kernels/`. Long steps are split into blocks of rows, which bounds the memory of intermediate
results. Steps of up to 1024 rows are one call (`compiled_step/`), but for the last layer of chunks, in which few rows
are needed.

The computation of a layer follows from the model's architecture (`families/decoders.py`). Models of other
architectures keep transformers' modules; so does a mixture of experts in the place of the last three products, and its
steps are never one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched_workers.adapters.places import AdapterPass, LayerPlace
from vsched_workers.backends.base import Product
from vsched_workers.backends.cpu.attention import fits as fits_vectors
from vsched_workers.backends.cpu.attention import prefill_by_rule, sample_cache, shares_of
from vsched_workers.backends.cpu.compiled_step.step import CompiledStep, StepAngles, fits
from vsched_workers.backends.cpu.kernels.activation import gelu, gelu_tanh, swiglu
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.norm import add_norm, add_normed, norm_parts
from vsched_workers.backends.cpu.kernels.rope import (
    Bf16Array,
    RopeRows,
    heads_of,
    rope_prefill,
)
from vsched_workers.backends.cpu.layer_parts import Norm, RowBlock, StepRows
from vsched_workers.backends.cpu.low_rank import layer_places
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.reference.layers import CutFeedForward, MergedAttention, angles_of
from vsched_workers.backends.reference.packed_weights import PackedLinear
from vsched_workers.batching.paged_attention import ScoreRule
from vsched_workers.families.decoders import Activation
from vsched_workers.memory.sparse_runs import attended_contexts, is_sparse, room_for

if TYPE_CHECKING:
    from vsched_workers.batching.packed_step import Images
    from vsched_workers.batching.paged_attention import PagedStep, Segment
    from vsched_workers.families.decoders import AttentionKind, Decoder
    from vsched_workers.parallel.slicing import Cut

DECODE_VALUES_MIN = 1 << 18
"""Attention with fewer products of a query and a key runs on one thread: waking the others takes longer."""

GATED: Mapping[Activation, Any] = {
    Activation.SILU: swiglu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: gelu_tanh,
}
"""Kernels of the MLP's activation."""


@dataclass(slots=True)
class _Layer:
    """A layer: its products, norms and sizes.

    Attributes:
        gate: Product of the gate; None, as are `up` and `down`, in a layer with a mixture of experts.
        mixture: Transformers' module of a mixture of experts.
        input_layernorm: Norm before attention.
        attention_output_norm: Norm of the attention output before the residual add, if any: Gemma's
            `post_attention_layernorm`.
        post_attention_layernorm: Norm before the MLP, named as in Llama; Gemma's `pre_feedforward_layernorm`.
        mlp_output_norm: Norm of the MLP output before the residual add, Gemma's `post_feedforward_layernorm`, if any.
        head_norms: `q_norm` and `k_norm`.
    """

    qkv: Product
    o_proj: Product
    gate: Product | None
    up: Product | None
    down: Product | None
    mixture: Product | None
    input_layernorm: Norm
    attention_output_norm: Norm
    post_attention_layernorm: Norm
    mlp_output_norm: Norm
    head_norms: tuple[Norm, Norm]
    heads: npt.NDArray[Any]
    attention: MergedAttention
    feed_forward: CutFeedForward | None
    kind: int


class _Part(NamedTuple):
    """Decode rows or prefill rows of a block, from row `start` of the step on."""

    start: int
    rows: RopeRows
    tables: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]


@dataclass(slots=True)
class _StepAttention:
    """Inputs of attention in a step other than the hidden states, shared by all layers of a kind.

    Attributes:
        parts: Decode rows and prefill rows of each block.
        rule: Rule for the scores of chunks: sliding window, if shorter than a context, and soft-capping.
        heads_buffer: Buffer for the heads of prefill rows, [heads + 2 * kv heads, rows, head_dim].
        pool: Address of the state of the threads of decode rows; 0 for the calling thread.
        threads: Their number.
    """

    parts: list[tuple[_Part | None, _Part | None]]
    rule: ScoreRule
    heads_buffer: torch.Tensor
    pool: int
    threads: int


class FusedLanguage:
    """Runs the layers of a model that `fuse` has accepted and whose linear layers are packed.

    Attributes:
        passes: Receives the rows with adapters, and selects those of the next product.
    """

    def __init__(
        self,
        model: Any,
        decoder: Decoder,
        threads: int,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
        deterministic: bool = False,
    ) -> None:
        """Take the model.

        Args:
            model: Model with fused layers and packed linear layers.
            decoder: Description of its architecture.
            threads: Threads of the kernels.
            kv_dtype: Type of the KV cache: bfloat16, or int8.
            deterministic: Compute a row by the same code whatever other rows are in the batch: the attention kernel of
                decode rows for prefill rows, too.
        """
        self._model = model
        self._decoder = decoder
        self._threads = threads
        self._deterministic = deterministic
        self.passes = AdapterPass()
        kinds = decoder.kinds(model.config)
        self._kinds = list(dict.fromkeys(kinds))
        self._score_bound = decoder.score_bound(model.config)
        self._layers = [
            _layer_of(layer, decoder, self._kinds.index(kind), kind, self._score_bound)
            for layer, kind in zip(model.layers, kinds, strict=True)
        ]
        self._by_module = dict(zip(model.layers, self._layers, strict=True))
        self._angles = StepAngles(
            self._kinds,
            {
                kind.frequencies: angles_of(
                    model.rotary_emb, kind.frequencies, axes=decoder.axes, dtype=torch.bfloat16
                )
                for kind in self._kinds
            },
        )
        self._last = Norm.of(model.norm, decoder.norms.weights)
        self._adds_plainly = decoder.adds_plainly
        self._norms_all_heads = decoder.norms_all_heads
        self._added_factor = np.float32(decoder.added_factor(model.config))
        self._rows_factor = decoder.rows_factor(model.config)
        self._gated = GATED[decoder.activation(model.config)]
        self._pool = pool_of(threads)
        cached = sample_cache(kv_dtype)
        self._kept = cached.dtype
        kernels = [add_norm, self._gated]
        if not self._adds_plainly or self._norms_all_heads:
            kernels += [add_normed, norm_parts]
        for each in kernels:
            each.address_of()
        for each in (rope_prefill, decode):
            each.address_of(cached, cached)
        self._compiled_step: CompiledStep | None = None
        if fits(self._layers):
            self._compiled_step = CompiledStep(
                self._layers,
                self._last,
                decoder=decoder,
                factor=self._added_factor,
                activation=self._gated,
                threads=threads,
                kept=cached,
                tiles=not deterministic,
            )
        self._compiles_chunks = kv_dtype == torch.bfloat16 and fits_vectors(
            self._layers[0].attention.head_dim
        )

    def adapter_places(self, within: str, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
        """Return the positions of adapters; see `module_places`."""
        return layer_places(self._layers, self._decoder, within, cuts)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the normed hidden states of the wanted rows, [rows, hidden].

        Wanted are all decode rows, and the last rows of some chunks.
        """
        if self._deterministic:
            step = step.as_decode_rows()
        count = len(token_ids)
        hidden, places, levels = self._embed(token_ids, images)
        angles = self._angles(positions)
        compiled = self._compiled_step if self._is_compiled(step, count) else None
        if compiled is not None and count == step.decode_rows and not levels:
            normed = torch.empty_like(hidden)
            compiled(
                hidden,
                normed,
                angles,
                step,
                None,
                attends_together=self._attends_together(step),
                layers=range(len(self._layers)),
            )
            # A deterministic step has chunks as well, of which only the last rows are wanted.
            return normed[torch.from_numpy(wanted)] if len(wanted) < count else normed
        first = self._layers[0].attention
        attended = room_for(hidden, len(hidden), first.heads * first.head_dim)
        rows = StepRows(hidden, attended)
        rows.adapted = self.passes.rows
        attention_steps = self._prepare_attention(rows, angles, step)
        layers = self._layers
        if len(self._model.layers) < len(layers):  # a profiling run uses a subset of layers
            layers = [self._by_module[layer] for layer in self._model.layers]
        norms = [*(layer.input_layernorm for layer in layers), self._last]
        select = torch.from_numpy(wanted) if len(wanted) < count else None
        together = range(len(levels), len(layers) - 1) if compiled is not None else range(0)
        if together.start or not together:
            self._add_norm(rows, norms[0])
        for index, (layer, following) in enumerate(zip(layers, norms[1:], strict=True)):
            if index in together:
                if compiled is not None and index == together.start:
                    compiled(
                        hidden,
                        rows.normed,
                        angles,
                        step,
                        attention_steps[0].heads_buffer,
                        attends_together=self._attends_together(step),
                        layers=together,
                    )
                continue
            if select is not None and index + 1 == len(self._layers) > len(levels):
                # Other rows are not needed after the last attention, and no image levels are added
                # to them.
                if self._deterministic:
                    attention_steps = self._prepare_attention(rows, angles, _only(step, wanted))
                self._attend(layer, rows, attention_steps[layer.kind], step, _ends(step, wanted))
                rows, select = rows.only(select), None
            else:
                self._attend(layer, rows, attention_steps[layer.kind], step, step.segments)
            self._feed_forward(layer, rows, following)
            if index < len(levels):
                rows.hidden[places] += levels[index]
                self._add_norm(rows, following)
        return rows.normed if select is None else rows.normed[select]

    def _embed(
        self, token_ids: torch.Tensor, images: Images | None
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        """Return the input of the first layer, the rows of images, and what the first layers add to these rows."""
        hidden = self._model.embed_tokens(token_ids)
        places, levels = torch.empty(0), []
        if images is not None:
            places, levels = torch.from_numpy(images.rows), list(images.levels[1:])
            hidden[places] = images.levels[0]
        if self._rows_factor != 1.0:
            hidden *= self._rows_factor
        return hidden, places, levels

    def _is_compiled(self, step: PagedStep, count: int) -> bool:
        """Return True if layers can run in one call: not too many rows, no adapters, all layers.

        Chunks cannot read an int8 cache, nor heads that are no whole number of vectors.
        """
        return (
            self._compiled_step is not None
            and 0 < count <= self._compiled_step.rows_max
            and (not step.segments or self._compiles_chunks)
            and self.passes.rows is None
            and len(self._model.layers) == len(self._layers)
            and not is_sparse()
        )

    def _attends_together(self, step: PagedStep) -> bool:
        """Return True if decode rows attend on all threads."""
        attention = self._layers[0].attention
        seen = int(step.contexts.sum()) * attention.heads * attention.head_dim
        return self._threads > 1 and seen >= DECODE_VALUES_MIN

    def _prepare_attention(
        self, rows: StepRows, angles: tuple[Bf16Array, Bf16Array], step: PagedStep
    ) -> list[_StepAttention]:
        """Prepare the inputs of attention in a step, for each kind of layers."""
        attention = self._layers[0].attention
        written = attention.heads + 2 * attention.kv_heads
        many = self._attends_together(step)
        prefilled = len(rows.hidden) - step.decode_rows
        found = []
        for index, kind in enumerate(self._kinds):
            cut = kind.window is not None and step.longest > kind.window
            window = kind.window if cut else None
            turned = angles[0][index], angles[1][index]
            found.append(
                _StepAttention(
                    parts=_parts(rows, turned, step, self._threads),
                    rule=ScoreRule(attention.scaling, window, self._score_bound),
                    heads_buffer=room_for(rows.hidden, written, prefilled, attention.head_dim),
                    pool=self._pool if many else 0,
                    threads=self._threads if many else 1,
                )
            )
        return found

    def _attend(
        self,
        layer: _Layer,
        rows: StepRows,
        given: _StepAttention,
        step: PagedStep,
        segments: Sequence[Segment],
    ) -> None:
        """Attend for the rows of a step, from their norms to the input of `o_proj`.

        Writes keys and values to the cache. Among prefill rows, those of `segments` attend.
        """
        attention = layer.attention
        keys, values = step.cache.arrays[attention.index]
        for block, (decoding, prefilling) in zip(rows.blocks, given.parts, strict=True):
            self._select_rows(rows, block)
            qkv = layer.qkv(block.normed)
            qkv_at = qkv.data_ptr()
            if self._norms_all_heads:
                self._norm_heads(layer, qkv)
            if decoding is not None:
                count = len(decoding.rows.slots)
                decode(
                    given.pool,
                    qkv_at,
                    block.attended.data_ptr(),
                    layer.heads,
                    decoding.rows,
                    keys,
                    values,
                    decoding.tables,
                    decoding.contexts,
                    step.cache.block_size,
                    shares_of(count, attention.kv_heads, given.threads),
                )
            if prefilling is not None:
                skipped = (prefilling.start - block.start) * qkv.shape[1] * qkv.itemsize
                place = (prefilling.start - step.decode_rows) * attention.head_dim * qkv.itemsize
                rope_prefill(
                    self._pool,
                    qkv_at + skipped,
                    given.heads_buffer.data_ptr() + place,
                    given.heads_buffer.shape[1],
                    layer.heads,
                    prefilling.rows,
                    keys,
                    values,
                )
        if segments:
            self._attend_chunks(attention, rows, given, step, segments)

    def _attend_chunks(
        self,
        attention: MergedAttention,
        rows: StepRows,
        given: _StepAttention,
        step: PagedStep,
        segments: Sequence[Segment],
    ) -> None:
        """Attend for prefill rows, whose heads are in the buffer."""
        queries = given.heads_buffer[: attention.heads]
        for segment in segments:
            part = slice(segment.start - step.decode_rows, segment.stop - step.decode_rows)
            out = rows.attended[segment.start : segment.stop]
            out = out.view(-1, attention.heads, attention.head_dim)
            prefill_by_rule(queries[:, part], attention.index, segment, step, given.rule, out)

    def _feed_forward(self, layer: _Layer, rows: StepRows, following: Norm) -> None:
        """Run the rest of a layer, from the attention output to the input norms of the following layer."""
        for block in rows.blocks:
            self._select_rows(rows, block)
            delta = layer.o_proj(block.attended)
            self._add_norm_block(
                block, delta, layer.attention_output_norm, layer.post_attention_layernorm
            )
            if layer.gate is None or layer.up is None or layer.down is None:
                assert layer.mixture is not None, "a layer has a feed-forward or a mixture"
                out = layer.mixture(block.normed[None])[0].contiguous()
            else:
                gate, up = layer.gate(block.normed), layer.up(block.normed)
                self._gated(self._pool, gate.data_ptr(), up.data_ptr(), *gate.shape)
                out = layer.down(gate)
            self._add_norm_block(block, out, layer.mlp_output_norm, following)

    def _select_rows(self, rows: StepRows, block: RowBlock) -> None:
        """Select the rows of the next products, if any row has an adapter."""
        if rows.adapted is not None:
            self.passes.call = rows.adapted.part(block.start, block.stop)

    def _norm_heads(self, layer: _Layer, qkv: torch.Tensor) -> None:
        """Norm the queries of each row, all heads at once, and the keys."""
        at = qkv.data_ptr()
        for each in layer.head_norms:
            norm_parts(
                self._pool, at, qkv.shape[1] * qkv.itemsize, each.width, each.record, len(qkv)
            )
            at += each.width * qkv.itemsize

    def _add_norm(self, rows: StepRows, norm: Norm) -> None:
        for block in rows.blocks:
            self._add_norm_block(block, None, norm, norm)

    def _add_norm_block(
        self, block: RowBlock, delta: torch.Tensor | None, added: Norm, norm: Norm
    ) -> None:
        """Add `delta`, normed by `added`, to a block's hidden states, and write their norms."""
        if self._adds_plainly:
            norm.add(self._pool, block.hidden_at, delta, block.rows, block.normed_at)
            return
        add_normed(
            self._pool,
            block.hidden_at,
            0 if delta is None else delta.data_ptr(),
            added.record,
            self._added_factor,
            norm.record,
            norm.width,
            block.normed_at,
            block.rows,
        )


def _parts(
    rows: StepRows, angles: tuple[Bf16Array, Bf16Array], step: PagedStep, threads: int
) -> list[tuple[_Part | None, _Part | None]]:
    """Split each block of rows into decode rows and prefill rows."""
    (cos, sin), slots = angles, step.slots.numpy()
    contexts = attended_contexts(step.contexts, threads)

    def part_of(start: int, stop: int) -> _Part | None:
        if start == stop:
            return None
        part = slice(start, stop)
        rows = RopeRows(cos[part], sin[part], slots[part])
        return _Part(start, rows, step.tables[part], contexts[part])

    parts = []
    for block in rows.blocks:
        middle = min(max(step.decode_rows, block.start), block.stop)
        parts.append((part_of(block.start, middle), part_of(middle, block.stop)))
    return parts


def _layer_of(
    layer: Any, decoder: Decoder, number: int, kind: AttentionKind, score_bound: float | None
) -> _Layer:
    attention: MergedAttention = getattr(layer, decoder.attention)
    feed_forward: Any = getattr(layer, decoder.feed_forward)
    qkv: Any = attention.qkv_proj
    norms, width = decoder.norms, qkv.in_features
    plain = feed_forward if isinstance(feed_forward, CutFeedForward) else None

    def norm_named(name: str) -> Norm:
        return Norm.of(getattr(layer, name) if name else None, norms.weights, width=width)

    of_heads = [Norm.of(each, norms.weights) for each in (attention.query_norm, attention.key_norm)]
    alone = [0, 0] if decoder.norms_all_heads else [each.record_at for each in of_heads]
    return _Layer(
        qkv=product_of(attention.qkv_proj),
        o_proj=product_of(attention.o_proj),
        gate=None if plain is None else product_of(plain.gate_proj),
        up=None if plain is None else product_of(plain.up_proj),
        down=None if plain is None else product_of(plain.down_proj),
        mixture=feed_forward if plain is None else None,
        input_layernorm=norm_named(norms.before_attention),
        attention_output_norm=norm_named(norms.after_attention),
        post_attention_layernorm=norm_named(norms.before_feed_forward),
        mlp_output_norm=norm_named(norms.after_feed_forward),
        head_norms=(of_heads[0], of_heads[1]),
        heads=heads_of(
            attention.heads,
            alone[0],
            alone[1],
            float(of_heads[0].eps),
            attention.scaling,
            norm_once=of_heads[0].once,
            softcap=score_bound,
            window=kind.window,
        ),
        attention=attention,
        feed_forward=plain,
        kind=number,
    )


def _ends(step: PagedStep, wanted: npt.NDArray[np.int64]) -> list[Segment]:
    """Return the wanted last rows of chunks. Other rows of a chunk yield no token."""
    rows = set(wanted[step.decode_rows :].tolist())
    return [segment.last_row() for segment in step.segments if segment.stop - 1 in rows]


def _only(step: PagedStep, wanted: npt.NDArray[np.int64]) -> PagedStep:
    """Return a step of decode rows in which only the wanted rows attend."""
    contexts = np.zeros_like(step.contexts)
    contexts[wanted] = step.contexts[wanted]
    return replace(step, contexts=contexts)


def product_of(module: nn.Module) -> Product:
    """Return the product of a packed linear layer, without the overhead of calling a module if possible."""
    if isinstance(module, PackedLinear):
        return module.packed
    forward: Product = module.forward
    return forward
