"""The generate worker: the language model alone, one packed row a step over a paged KV cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as functional

from vsched.types import ModelInfo
from vsched.worker.contract import Batch, Progress, Sampled, SequenceState, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers.backends.cpu.modules import PackedWeight, pack_linears, packs, warm_up
from vsched_workers.backends.cuda.copies import open_copies
from vsched_workers.backends.cuda.graph_stream import CudaLane, DecodeLane
from vsched_workers.backends.cuda.graphs import DecodeGraphs
from vsched_workers.backends.kernel_choice import (
    choose_decode,
    choose_prefill,
    choose_products,
    try_kernels,
)
from vsched_workers.batching import paged_attention as attention
from vsched_workers.batching.packed_step import Images, fetch_images, pack, send
from vsched_workers.batching.paged_attention import DecodeKernel, KvCache, PagedStep
from vsched_workers.batching.sampling import sample
from vsched_workers.batching.step_rows import Prepared, sampling_rows, special_rows
from vsched_workers.memory.device_memory import (
    open_device_memory,
    require_available,
    typed_out_of_memory,
)
from vsched_workers.parallel.experts import BALANCE, INTERVAL_S, ExpertBalance, SharedExperts

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.backends.cpu.language_layers import FusedLanguage
    from vsched_workers.families import Family
    from vsched_workers.parallel.rank_group import RankGroup


logger = logging.getLogger(__name__)


class LanguageWorker:
    """The language model of one rank."""

    def __init__(
        self,
        info: ModelInfo,
        settings: WorkerSettings,
        family: Family,
        model: nn.Module,
        head: torch.Tensor,
        group: RankGroup,
    ) -> None:
        """Take the model; `head` is the output projection, or this rank's part of the vocabulary of it."""
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._info = info
        self._family = family
        self._model: Any = model
        self._device = settings.device
        self._config = family.model_config(info.path)
        self._group = group
        self._memory = group.memory(open_device_memory(settings.device))
        self._settings = settings
        # Chosen now, so that a wrong setting is found before the weights are measured.
        self._decode: DecodeKernel | None = choose_decode(settings, dtype)
        self._prefill = choose_prefill(settings, dtype)
        self._cache: KvCache | None = None
        self._copies = open_copies(settings.device)
        self._lane = _open_lane(settings)
        self._graphs: DecodeGraphs | None = None
        experts = [each for each in model.modules() if isinstance(each, SharedExperts)]
        self._balance = ExpertBalance(experts, group) if experts and group.size > 1 else None
        self._head: Callable[[torch.Tensor], torch.Tensor]
        self._head_is_shared = len(head) < self._config.text_config.vocab_size
        self._fused: FusedLanguage | None = None
        packed_bytes = 0
        # By where they lie: a tied head is the embedding, or a view of it.
        kept: dict[int, torch.Tensor] = {}
        if packs(settings.device, dtype):
            # A tied head is packed too: it is the largest product of a step. The embedding needs the plain copy.
            fused = _fused_layers(settings)
            if fused is not None and not fused.fuse(model):
                fused = None
            make_own = choose_products(settings)
            packed_head = PackedWeight(head, None, make_own=make_own)
            self._head = packed_head
            packed_bytes = pack_linears(model, make_own=make_own) + packed_head.size_bytes
            warm_up(model, packed_head)
            if fused is not None:
                self._fused = fused.FusedLanguage(model, settings.threads)
        else:
            self._head = functools.partial(functional.linear, weight=head)
            kept[head.untyped_storage().data_ptr()] = head
        kept.update((each.untyped_storage().data_ptr(), each) for each in model.parameters())
        plain_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        self._weights_bytes = packed_bytes + plain_bytes

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self._weights_bytes

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the device that it runs on."""
        return self._memory

    def abort(self) -> None:
        """Fail the collectives of the group, for a failure outside of this worker."""
        self._group.abort()

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate a KV cache of this many blocks; an older one is dropped first.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """
        self.drop_kv()
        text = self._config.text_config
        dtype: torch.dtype = getattr(torch, self._info.dtype)
        size = blocks * block_size * self._info.kv_bytes_per_token
        kv_heads = text.num_key_value_heads // self._group.size
        with self._group.together(), typed_out_of_memory("building the KV cache"):
            require_available(self._memory, size, f"a KV cache of {blocks * block_size} tokens")
            self._cache = KvCache(
                layers=text.num_hidden_layers,
                blocks=blocks,
                block_size=block_size,
                kv_heads=kv_heads,
                head_dim=self._info.kv_bytes_per_token
                // (2 * text.num_hidden_layers * kv_heads * self._info.itemsize),
                dtype=dtype,
                device=self._device,
                touch=touch,
                spare_blocks=0 if self._lane is None else 1,
            )
            heads = text.num_attention_heads // self._group.size
            self._choose_kernels(self._cache, dtype, heads)
        if self._balance is not None:
            self._balance.reset()

    def _choose_kernels(self, cache: KvCache, dtype: torch.dtype, heads: int) -> None:
        """Choose what reads the cache, and have decode steps captured where that can be."""
        if self._device == "cpu":
            self._decode = choose_decode(self._settings, dtype)
        else:
            self._decode, self._prefill = try_kernels(self._settings, dtype, cache, heads)
        if self._lane is None or not getattr(self._decode, "capturable", False):
            return
        self._graphs = DecodeGraphs(
            self._lane,
            cache,
            self._decode,
            self._prefill,
            self._logits,
            reserved=self._memory.reserved,
        )

    def drop_graphs(self) -> None:
        """Forget captured steps: they point into the KV cache."""
        if self._graphs is not None:
            self._graphs.drop()
            self._graphs = None

    def drop_kv(self) -> None:
        """Forget the KV cache and the attention kernel that reads it."""
        self.drop_graphs()
        self._cache = None
        self._decode = None

    @property
    def frugal(self) -> bool:
        """Whether a layer takes no more than the one before it gave back: on a CPU, but for what the heap scatters."""
        return self._device == "cpu"

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Run only the first `count` layers until the context ends."""
        layers = self._model.layers
        self._model.layers = layers[:count]
        try:
            yield
        finally:
            self._model.layers = layers
            if self._balance is not None:
                self._balance.reset()

    def prepare(self, sequence: SequenceState) -> None:
        """Compute the positions of the prompt.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        prompt = sequence.tokens[: sequence.prompt_length]
        with self._group.watched(), typed_out_of_memory("preparing a request"):
            positions, delta = self._family.positions(self._config, prompt, sequence.items)
        sequence.state = Prepared(positions=positions, delta=delta)

    @torch.inference_mode()
    def step(self, batch: Batch) -> Sampled:
        """Run one step and sample.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        with self._group.together(), typed_out_of_memory("running a step"):
            sampled = None if self._graphs is None else self._graphs.step(batch)
            if sampled is not None:
                return sampled
            assert self._cache is not None, "build_kv comes before the first step"
            assert self._decode is not None, "it comes with the cache"
            token_ids, positions, step = pack(
                batch, self._cache, self._decode, self._prefill, self._device
            )
            rows, images = sampling_rows(batch), self._images(batch)
            if self._fused is not None:
                hidden = self._fused(token_ids, positions, step, images, rows)
            else:
                hidden = self._forward(token_ids, positions, step, images)
                if len(rows) < len(hidden):
                    hidden = hidden[send(rows, self._device)]
            if not len(rows):
                return Sampled(tokens=np.empty(0, dtype=np.int32))
            logits = self._head(hidden)[: len(rows)]
            if self._head_is_shared:
                # Every rank samples, from the same logits, and so draws the same token.
                logits = self._group.all_gather(logits)
            return sample(logits, special_rows(batch))

    def hooks(self) -> Mapping[str, float]:
        """Return the collective work that is due now and then: balancing experts, where ranks share any."""
        return {} if self._balance is None else {BALANCE: INTERVAL_S}

    def wanted_hooks(self) -> Sequence[str]:
        """Return what should be done soon."""
        return [BALANCE] if self._balance is not None and self._balance.wanted() else []

    def run_hook(self, name: str) -> None:
        """Balance the experts; every rank does at the same step.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        assert name == BALANCE, f"no such work: {name}"
        assert self._balance is not None, "it is not offered then"
        with typed_out_of_memory("balancing experts"):
            moved = self._balance.run()
        logger.info("%d experts moved to other ranks", moved)

    def _images(self, batch: Batch) -> Images | None:
        info = self._info
        return fetch_images(
            batch,
            self._copies,
            dtype=getattr(torch, info.dtype),
            levels=info.embedding_levels,
            hidden=info.hidden_size,
        )

    def _logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Run a step that yields a token a row; returns logits [rows, vocabulary]."""
        return self._head(self._forward(token_ids, positions, step, None))

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
    ) -> torch.Tensor:
        """Run the layers over the packed row; returns hidden states [rows, hidden]."""
        embeds = self._model.embed_tokens(token_ids)
        options: dict[str, Any] = {}
        if images is not None:
            rows = send(images.rows, self._device)
            embeds[rows] = images.levels[0]
            if len(images.levels) > 1:
                mask = torch.zeros(1, len(token_ids), dtype=torch.bool, device=self._device)
                mask[0, rows] = True
                options["visual_pos_masks"] = mask
                options["deepstack_visual_embeds"] = list(images.levels[1:])
        out = self._model(
            inputs_embeds=embeds[None],
            position_ids=positions,
            use_cache=False,
            paged_step=step,
            **options,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


def _open_lane(settings: WorkerSettings) -> DecodeLane | None:
    """Return where captured decode steps run; None on a CPU, and where ranks meet in every step."""
    if settings.device == "cpu":
        return None
    if settings.ranks > 1:
        logger.info(
            "decode steps run without CUDA graphs: %d ranks share the model", settings.ranks
        )
        return None
    if torch.device(settings.device).index is not None:
        # Triton starts kernels on the device that is current, wherever its tensors are.
        torch.cuda.set_device(settings.device)
    return CudaLane(settings.device)


def _fused_layers(settings: WorkerSettings) -> Any:
    """Return the module of fused layers, but where transformers' own are asked for or there is no compiler for it."""
    if settings.attention not in {"auto", "numba"}:
        return None
    try:
        from vsched_workers.backends.cpu import language_layers as fused_layers
    except ImportError:
        return None
    return fused_layers


def load_generator(info: ModelInfo, settings: WorkerSettings, progress: Progress) -> LanguageWorker:
    """Load the language model alone.

    Raises:
        CheckpointError: When weights are missing or a file is corrupt.
    """
    from vsched_workers.checkpoint.facts import checkpoint_directory
    from vsched_workers.checkpoint.weights import WeightIndex, fill_module, load_head
    from vsched_workers.families import FAMILIES
    from vsched_workers.parallel.rank_group import RankGroup
    from vsched_workers.parallel.slicing import cut_of, slice_module, sum_rows

    torch.set_num_threads(settings.threads)
    attention.register()
    family = FAMILIES[info.family]
    index = WeightIndex.open(checkpoint_directory(info.path))
    dtype: torch.dtype = getattr(torch, info.dtype)
    ranks, rank = settings.ranks, settings.rank
    with torch.device("meta"):
        model = family.build_language(info.path, attention.NAME)
    cuts = slice_module(model, family.language_sharing, ranks=ranks, rank=rank)
    config = family.model_config(info.path)
    vocabulary: int = config.text_config.vocab_size
    divides = ranks > 1 and vocabulary % ranks == 0
    with typed_out_of_memory("loading the language model"):
        fill_module(
            model,
            index,
            family.language_prefixes,
            dtype=dtype,
            device=settings.device,
            label="loading the language model",
            progress=progress,
            cuts=cuts,
            flips=family.flips,
        )
        head = load_head(
            model,
            index,
            tied=bool(config.tie_word_embeddings),
            dtype=dtype,
            device=settings.device,
            cut=cut_of(vocabulary, ranks=ranks, rank=rank) if divides else None,
        )
    if settings.device == "cpu":
        progress("compiling kernels", 1.0)
    group = RankGroup(settings, "generate")
    sum_rows(model, family.language_sharing, group)
    return LanguageWorker(info, settings, family, model, head, group)
