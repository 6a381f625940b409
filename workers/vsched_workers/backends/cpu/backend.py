"""CPU backend with kernels compiled by numba: fused layers, paged decode attention, products, sampler."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched.errors import ConfigError
from vsched.worker.contract import Progress, WorkerSettings
from vsched_workers.adapters.places import MakeSums, TorchSums
from vsched_workers.backends.base import RunnableLanguage
from vsched_workers.backends.cpu import attention, recurrences
from vsched_workers.backends.cpu.attention import NumbaDecode
from vsched_workers.backends.cpu.compiling import (
    compile_ahead,
    fuses_mixtures,
    language_needs,
    tower_needs,
)
from vsched_workers.backends.cpu.experts import experts_together
from vsched_workers.backends.cpu.kernels import compilation, sampling
from vsched_workers.backends.cpu.kernels.low_rank import add_low_rank
from vsched_workers.backends.cpu.kernels.sampling import (
    ROW,
    RowLists,
    argmax,
    draw_rows,
    make_buffers,
)
from vsched_workers.backends.cpu.language_layers import FusedLanguage
from vsched_workers.backends.cpu.low_rank import KernelSums
from vsched_workers.backends.cpu.norms import use_norm_kernel
from vsched_workers.backends.cpu.products import (
    QuantizedProduct,
    make_product,
    quantizes_activations,
    round_groups,
    widens_in_tiles,
)
from vsched_workers.backends.cpu.threads import pool_of, process_pool
from vsched_workers.backends.cpu.tower_attention import use_patch_kernel
from vsched_workers.backends.cpu.vision_layers import fuse_blocks, fuse_mlps
from vsched_workers.backends.reference.attention import prefill_by_gather
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.backends.reference.layers import fuse
from vsched_workers.backends.reference.packed_weights import packed_names
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.paged_attention import AttentionKernels, PrefillKernel
from vsched_workers.batching.sampling import (
    SEED_MASK,
    TEMPERATURE_MIN,
    UNDRAWN,
    SpecialRow,
    biases,
)
from vsched_workers.memory import sparse_runs
from vsched_workers.quantized.experts import MultiplyEach, expert_names, is_quantized
from vsched_workers.quantized.layers import QuantizedLinear, Quantizer

if TYPE_CHECKING:
    from vsched_workers.families.decoders import Decoder


TORCH_ROWS_MIN = 64
"""Minimum rows of a step in which torch uses several threads: for fewer, they take cores from the kernels' threads."""
BF16_EXPONENT = 0x7F80
"""The exponent's bits of a bfloat16 number; all are set if it is infinite or NaN."""


def draw_compiled(logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
    """Return the token of each special row, as `draw_in_torch` does; logits bfloat16 or float32."""
    logits = logits.contiguous()
    vocabulary = logits.shape[1]
    halves, singles = np.empty((0, vocabulary), np.uint16), np.empty((0, vocabulary), np.float32)
    if logits.dtype == torch.bfloat16:
        halves = logits.view(torch.int16).numpy().view(np.uint16)
    else:
        singles = logits.numpy()
    tokens, highest = np.empty(len(special), np.int32), np.empty(len(special), np.float32)
    draw_rows(
        *(halves, singles, *_parameters(special, vocabulary)),
        *(_buffers(vocabulary), tokens, highest),
    )
    tokens[~np.isfinite(highest)] = UNDRAWN
    return tokens


# A draft model's vocabulary may be padded to another size.
_buffers = functools.lru_cache(maxsize=2)(make_buffers)


def _parameters(
    special: Sequence[SpecialRow], vocabulary: int
) -> tuple[npt.NDArray[Any], RowLists]:
    """Return the parameters of the rows, `ROW`, and their lists."""
    rows: list[tuple[Any, ...]] = []
    tokens: list[npt.NDArray[np.int32]] = []
    biased: list[int] = []
    bias: list[float] = []
    masks: list[npt.NDArray[np.uint32]] = []
    count = 0
    for entry in special:
        sequence, params = entry.sequence, entry.sequence.sampling
        tokens.append(sequence.tokens[: entry.position if params.has_penalty else 0])
        added = biases(entry, vocabulary)
        biased += added
        bias += added.values()
        if sequence.token_mask is not None:
            masks.append(sequence.token_mask)
        greedy = params.temperature == 0.0
        rows.append(
            (
                entry.row,
                0.0 if greedy else 1.0 / max(params.temperature, TEMPERATURE_MIN),
                params.top_k,
                params.top_p,
                params.min_p,
                (params.seed or 0) & SEED_MASK,
                entry.position,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
                sequence.prompt_length,
                (count, count + len(tokens[-1])),
                (len(biased) - len(added), len(biased)),
                len(masks) - 1 if sequence.token_mask is not None else -1,
            )
        )
        count += len(tokens[-1])
    lists = RowLists(
        np.concatenate(tokens),
        np.array(biased, np.int64),
        np.array(bias, np.float32),
        np.stack(masks) if masks else np.empty((0, 0), np.uint32),
    )
    return np.array(rows, ROW), lists


class CpuBackend(Backend):
    """CPU backend with compiled kernels, for float32 and bfloat16."""

    def __init__(
        self, settings: WorkerSettings, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(settings, dtype, kv_dtype)
        self.compiles = True
        self._fuses = dtype == torch.bfloat16
        self._threads = settings.threads
        self._deterministic = settings.deterministic
        self.fuses_mixtures = fuses_mixtures(settings, dtype)
        self._make_plain = functools.partial(
            make_product,
            threads=settings.threads,
            int8_activations=quantizes_activations(settings.activations, dtype),
            tiles=widens_in_tiles(settings, dtype),
            deterministic=settings.deterministic,
        )
        self._quantizer: Quantizer | None = None
        if self._fuses:
            self._pack_weights()
        if settings.quantizes:
            given = {**self._make_plain.keywords}
            del given["deterministic"]
            make = functools.partial(QuantizedProduct, **given)
            self._quantizer = Quantizer(
                settings.weights,
                settings.weights_group,
                make,
                int4=functools.partial(round_groups, settings.threads),
            )
            self._pack_weights()
            self.make_product, self.make_head = self._quantizer.linear, self._quantizer.head
        self._attention: AttentionKernels | None = None
        self._decode: NumbaDecode | None = None
        pool_of(settings.threads)
        if not settings.threads_fixed:
            process_pool().adapt()
        self._torch_threads = torch.get_num_threads()

    def _pack_weights(self) -> None:
        """Pack weights from now on, unless they are packed already; plain float32 weights are torch's."""
        if self.make_product is None:
            self.make_product = self.make_head = self.make_plain = self._make_plain

    def _pack_quantized(self, model: nn.Module) -> None:
        """Pack weights from now on if some of a model are quantized."""
        modules = model.modules()
        if any(isinstance(each, QuantizedLinear) or is_quantized(each) for each in modules):
            self._pack_weights()

    def computing(
        self, stage: str, rows: int, kind: Hashable = None
    ) -> AbstractContextManager[None]:
        few = stage == "generate" and rows < TORCH_ROWS_MIN and self.make_product is not None
        threads = 1 if few else self._torch_threads
        return process_pool().computing(stage, rows, kind, torch_threads=threads)

    def prepare_language(
        self, model: nn.Module, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        self._pack_quantized(model)
        fuses = self.fuses_mixtures if decoder.experts else self._fuses
        is_fused = fuses and fuse(model, decoder)
        if self._quantizer is not None:
            self._quantizer.embed(cast("nn.Embedding", model.embed_tokens), head)
        packed = super().prepare_language(model, head, decoder)
        if self._quantizer is not None:
            size = packed.weights_bytes + self._quantizer.embedding_bytes
            packed = dataclasses.replace(packed, weights_bytes=size)
        if not is_fused:
            self._load_decode()
            if self._deterministic:
                raise ConfigError(
                    "model.deterministic: no deterministic kernels support the layers of this model (such as mixtures "
                    "of experts). Remedy: set it to false."
                )
            return packed
        layers = FusedLanguage(
            model,
            decoder,
            self._threads,
            kv_dtype=self.kv_dtype,
            deterministic=self._deterministic,
        )
        return dataclasses.replace(packed, layers=layers)

    def prepare_whole(self, model: Any) -> int:
        self._pack_quantized(model)
        size, head = 0, model.get_output_embeddings()
        if self._quantizer is not None and type(head) is nn.Linear:
            self._quantizer.embed(model.get_input_embeddings(), head.weight)
            size = self._quantizer.embedding_bytes
        size += super().prepare_whole(model)
        if self._fuses:
            use_norm_kernel(model, self._threads)
        self._load_decode()
        return size

    def state_functions(self, names: Collection[str]) -> Mapping[str, Callable[..., Any]]:
        return recurrences.state_functions(names, self.dtype, self._threads)

    def prepare_tower(self, tower: nn.Module) -> int:
        size = super().prepare_tower(tower)
        if self._fuses and not fuse_blocks(tower, self._threads, deterministic=self._deterministic):
            self._use_kernels(tower)
        return size

    def prepare_any_tower(self, model: nn.Module) -> int:
        size = super().prepare_any_tower(model)
        if self._fuses:
            self._use_kernels(model)
        return size

    def _use_kernels(self, tower: nn.Module) -> None:
        use_patch_kernel(tower)
        fuse_mlps(tower, self._threads)

    def lays_out(self, module: nn.Module) -> Collection[str]:
        if self.make_product is None:
            return ()
        names = {*packed_names(module), *expert_names(module)}
        # Of a tied head, the embedding's name as well.
        weights = dict(module.named_parameters(remove_duplicate=False))
        packed = {weights[name] for name in names & weights.keys()}
        return [name for name, weight in weights.items() if weight in packed]

    def experts_together(self, products: Sequence[Any]) -> MultiplyEach:
        return experts_together(self._threads, products)

    def prepare_adapters(self) -> MakeSums:
        if self.dtype != torch.bfloat16:
            return TorchSums
        add_low_rank.address_of()
        kernel = functools.partial(KernelSums, self._threads)

        def make(dtype: torch.dtype, device: torch.device) -> TorchSums:
            return kernel() if dtype == torch.bfloat16 else TorchSums(dtype, device)

        return make

    def compile_language(
        self, config: Any, decoder: Decoder | None, kinds: Sequence[str], progress: Progress
    ) -> int:
        wanted = language_needs(self.settings, self.dtype, self.kv_dtype, config, decoder, kinds)
        return compile_ahead([*wanted], progress)

    def compile_tower(self, tower: nn.Module, progress: Progress) -> int:
        return compile_ahead([*tower_needs(self.settings, self.dtype, tower)], progress)

    def kernels_here(self) -> Mapping[str, int]:
        return compilation.kernels_here()

    def sparsely(self) -> AbstractContextManager[None]:
        return sparse_runs.sparsely() if self._host.counts_reserved else nullcontext()

    def argmax(self, logits: torch.Tensor) -> npt.NDArray[np.int32]:
        if logits.dtype != torch.bfloat16 or not logits.is_contiguous():
            return super().argmax(logits)
        found = np.empty(len(logits), dtype=np.int32)
        argmax(logits.data_ptr(), *logits.shape, found)
        highest = logits.view(torch.int16).numpy()[np.arange(len(found)), found]
        found[highest & BF16_EXPONENT == BF16_EXPONENT] = UNDRAWN
        return found

    def draw(self, logits: torch.Tensor, special: Sequence[SpecialRow]) -> npt.NDArray[np.int32]:
        if logits.dtype not in (torch.bfloat16, torch.float32):
            return super().draw(logits, special)
        return draw_compiled(logits, special)

    def load_attention(self) -> None:
        sampling.warm_up()
        prefill: PrefillKernel = prefill_by_gather
        if self.dtype == torch.bfloat16:
            sampling.warm_up_greedy()
        if self.dtype == torch.bfloat16 and not self._deterministic:
            attention.warm_up()
            prefill = attention.NumbaPrefill()
        self._decode = NumbaDecode(self.dtype, self.kv_dtype, self._threads)
        self._attention = AttentionKernels(self._decode, prefill)

    def _load_decode(self) -> None:
        """Compile decode attention for transformers' modules; fused layers have their own."""
        assert self._decode is not None, "attention is loaded before a model is prepared"
        self._decode.warm_up()

    def choose_attention(
        self, cache: KvCache, heads: int, *, ruled: bool = False
    ) -> AttentionKernels:
        if self._attention is None:
            self.load_attention()
        assert self._attention is not None
        return self._attention
