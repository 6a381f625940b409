"""The generate worker: the language model alone, one packed batch per step over a paged KV cache."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vsched.errors import ConfigError
from vsched.types import ModelInfo, Spans
from vsched.worker.contract import (
    Batch,
    GenerateWorker,
    Progress,
    PromptLogprobs,
    Sampled,
    SequenceState,
    WorkerSettings,
)
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.backends.base import CapturedSteps, Product, RunnableLanguage
from vsched_workers.backends.choice import (
    check_quantized,
    choose_backend,
    torch_threads,
)
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.backends.reference.layers import RuledHead
from vsched_workers.backends.reference.whole_model import (
    WholeModel,
    check_built,
    check_kept,
    first_run,
    first_run_of_share,
)
from vsched_workers.batching import paged_attention
from vsched_workers.batching.kv_cache import (
    SWAP_REMEDY,
    KvCache,
    KvShape,
    Pairs,
    SwapArea,
    kept_dim,
)
from vsched_workers.batching.packed_step import (
    Images,
    PromptPositions,
    bidirectional_spans_of,
    fetch_images,
    has_prompt_logprobs,
    pack,
    prompt_logprobs,
    sampling_rows,
    special_rows,
)
from vsched_workers.batching.paged_attention import AttentionKernels, PagedStep
from vsched_workers.batching.recurrent_state import RecurrentStates
from vsched_workers.batching.sampling import choose_tokens
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.quantized_parts import find_parts
from vsched_workers.checkpoint.weights import WeightIndex, fill_module, load_head
from vsched_workers.checkpoint.whole_model import (
    build_whole,
    build_without_tower,
    left_out,
    load_whole,
)
from vsched_workers.families import LanguageFamily, language_family
from vsched_workers.families.decoders import AttentionKind, text_family, text_positions
from vsched_workers.families.generic import read_config
from vsched_workers.families.qwen_positions import Items
from vsched_workers.families.sharing import parallel_plan, shares_heads
from vsched_workers.memory.out_of_memory import (
    require_available,
    stage_remedy,
    typed_out_of_memory,
)
from vsched_workers.parallel.experts import BALANCE, INTERVAL_S, ExpertBalance, SharedExperts
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.parallel.slicing import (
    Cut,
    PlannedRanks,
    cut_of,
    share_by_plan,
    slice_module,
    sum_rows,
)
from vsched_workers.quantized.layers import check_groups, find_quantized
from vsched_workers.rank_worker import (
    RankWorker,
    checkpoint_scheme,
    compile_language,
    served_adapters,
    with_checkpoint_weights,
)

if TYPE_CHECKING:
    from torch import nn


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanguageModel:
    """A language model that is ready to run, with the properties that its worker needs.

    Attributes:
        kv: Shape of each layer's keys and values per token on this rank.
        heads: Query heads of this rank.
        positions: Compute the positions of a prompt, int64 [3, tokens], and the delta of the positions after it.
        first_layers: Context manager that runs only the first n layers of each kind; None if all layers must run.
        shares_head: Whether this rank computes the logits of a part of the vocabulary only.
        ruled: Whether layers have score rules, or values of another size than keys.
        states: Recurrent states of the layers; None if they keep only keys and values.
        bidirectional_spans: Return the spans of a sequence with bidirectional attention; None if attention is causal
            throughout.
        adapt: Make its layers able to take LoRA adapters.
    """

    module: nn.Module
    runnable: RunnableLanguage
    kv: Sequence[KvShape]
    heads: int
    positions: Callable[[npt.NDArray[np.int32], Items], tuple[npt.NDArray[np.int64], int]]
    first_layers: Callable[[int], AbstractContextManager[None]] | None
    adapt: Callable[..., AdaptedModule]
    shares_head: bool = False
    ruled: bool = False
    states: RecurrentStates | None = None
    bidirectional_spans: Callable[[SequenceState], Spans] | None = None


class LanguageWorker(RankWorker, GenerateWorker):
    """The language model of one rank."""

    def __init__(
        self,
        info: ModelInfo,
        backend: Backend,
        language: LanguageModel,
        group: RankGroup,
        *,
        slots: int = 0,
        snapshots: int = 0,
        adapters: AdaptedModule | None = None,
    ) -> None:
        """Take the model.

        `slots` and `snapshots` are the numbers of recurrent states to keep, for models with such layers. `adapters` are
        those that requests may name; None without adapters.
        """
        super().__init__(
            info, backend, group, adapters, weights_bytes=language.runnable.weights_bytes
        )
        # Each layer reuses the memory of the layer before it, apart from fragmentation.
        self.skips_layers = language.first_layers is not None
        self.frugal = self.skips_layers and not backend.keeps_indices
        self._dtype: torch.dtype = getattr(torch, info.dtype)
        self._language = language
        self.module: Any = language.module
        self._slots, self._snapshots = slots, snapshots
        self._cache: KvCache | None = None
        self._swap_area: SwapArea | None = None
        self._attention: AttentionKernels | None = None
        self._captured: CapturedSteps | None = None
        experts = [each for each in self.module.modules() if isinstance(each, SharedExperts)]
        self._balance = ExpertBalance(experts, group) if experts else None
        self._layers, self._head = language.runnable.layers, language.runnable.head
        self._apart = language.runnable.apart

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate a KV cache of `blocks` blocks, and states for all slots; drop older ones first.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """
        self.drop_kv()
        info, states, spare = self._info, self._language.states, self._backend.spare_blocks
        size = blocks * block_size * info.kv_bytes_per_token
        size += (self._slots + self._snapshots + spare) * info.state_bytes
        with self._group.together(), typed_out_of_memory("building the KV cache"):
            require_available(self._memory, size, f"a KV cache of {blocks * block_size} tokens")
            allocate = functools.partial(self._backend.zeros, touch=touch)
            if states is not None:
                states.build(self._slots, self._snapshots, allocate, spare=spare)
            cache = self._cache = KvCache(
                self._language.kv,
                blocks=blocks,
                block_size=block_size,
                dtype=self._backend.kv_dtype,
                allocate=allocate,
                spare_blocks=spare,
            )
            language = self._language
            self._attention = self._backend.choose_attention(
                cache, language.heads, ruled=language.ruled
            )
            self._captured = self._backend.capture_steps(
                cache, self._attention, self._logits, states
            )
        if self._balance is not None:
            self._balance.reset()

    def drop_graphs(self) -> None:
        """Drop captured steps: they point into the KV cache."""
        if self._captured is not None:
            self._captured.drop_steps()
            self._captured = None

    def drop_kv(self) -> None:
        """Drop the KV cache and the attention kernels that read it."""
        self.drop_graphs()
        self._cache = self._swap_area = None
        self._attention = None
        if self._language.states is not None:
            self._language.states.free_states()

    def build_swap(self, blocks: int) -> None:
        """Allocate host memory for `blocks` blocks of the present KV cache.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        assert self._cache is not None, "build_kv comes before"
        setting = typed_out_of_memory("allocating host memory for blocks", remedy=SWAP_REMEDY)
        with self._group.watched(), setting:
            self._swap_area = self._backend.swap_area(self._cache, blocks)

    @torch.inference_mode()
    def swap(self, out: Pairs, back: Pairs) -> None:
        """Copy KV blocks to host memory, and back.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        assert self._swap_area is not None, "build_swap comes before"
        with self._group.watched(), typed_out_of_memory("swapping KV blocks", remedy=SWAP_REMEDY):
            if self._captured is not None:
                # A step that was started ahead writes to blocks that may have another owner by now.
                self._captured.let_others_wait()
            self._swap_area.copy(out, back)

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Run only the first `count` layers of each kind, and only sparse runs of these, until the context ends."""
        assert self._language.first_layers is not None, "skips_layers says so"
        captured, self._captured = self._captured, None  # captured steps have all layers
        try:
            with self._language.first_layers(count), self._backend.sparsely():
                yield
        finally:
            self._captured = captured
            if self._balance is not None:
                self._balance.reset()

    def prepare(self, sequence: SequenceState) -> None:
        """Compute the positions of the prompt.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        prompt = sequence.tokens[: sequence.prompt_length]
        with self._group.watched(), typed_out_of_memory("preparing a request"):
            positions, delta = self._language.positions(prompt, sequence.items)
        sequence.state = PromptPositions(positions=positions, delta=delta)

    @torch.inference_mode()
    def step(self, batch: Batch) -> Sampled:
        """Run one step and sample.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        with self._group.together(), typed_out_of_memory("running a step"):
            sampled = None if self._captured is None else self._captured.step(batch)
            if sampled is not None:
                return sampled
            assert self._cache is not None, "build_kv comes before the first step"
            assert self._attention is not None, "it comes with the cache"
            token_ids, positions, step = pack(
                batch,
                self._cache,
                self._attention,
                self._backend,
                self._language.bidirectional_spans,
            )
            if self._language.states is not None:
                self._language.states.begin_step(step, batch, self._backend.send)
            rows = sampling_rows(batch)
            has_logprobs = has_prompt_logprobs(batch)
            wanted = np.arange(len(token_ids)) if has_logprobs else rows
            layers, head = (has_logprobs and self._apart) or (self._layers, self._head)
            computing = self._backend.computing("generate", len(token_ids))
            with self.adapted(batch), computing:
                hidden = layers(token_ids, positions, step, self._images(batch), wanted)
            logits_of = functools.partial(self._logits_of, head)
            reported: list[PromptLogprobs] = []
            if has_logprobs:
                few = max(self._slots // 2, 1)
                reported = prompt_logprobs(batch, hidden, logits_of, rows_max=few)
                hidden = hidden[self._backend.send(rows)]
            if not len(rows):
                return Sampled(tokens=np.empty(0, dtype=np.int32), prompts=reported)
            logits, special = logits_of(hidden, len(rows)), special_rows(batch)
            greedy = self._backend.argmax(logits)
            sampled = choose_tokens(greedy, logits, special, self._backend.draw)
            return replace(sampled, prompts=reported) if reported else sampled

    def _logits_of(self, head: Product, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the logits of hidden states, [rows, vocabulary], the same ones on every rank."""
        logits = head(hidden)[:rows]
        # Every rank samples from the same logits, and so draws the same token.
        return self._group.all_gather(logits) if self._language.shares_head else logits

    def hooks(self) -> Mapping[str, float]:
        """Return the periodic collective work: balancing experts, if ranks share experts."""
        return {} if self._balance is None else {BALANCE: INTERVAL_S}

    def run_hook(self, name: str) -> None:
        """Balance the experts; every rank does so at the same step.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        assert name == BALANCE, f"no such work: {name}"
        assert self._balance is not None, "it is not offered then"
        with typed_out_of_memory("balancing experts"):
            moved = self._balance.rebalance()
        logger.info("%d experts moved to other ranks", moved)

    def _images(self, batch: Batch) -> Images | None:
        info = self._info
        return fetch_images(
            batch,
            self._backend,
            dtype=self._dtype,
            levels=info.embedding_levels,
            hidden=info.hidden_size,
        )

    def _logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Run a step with one token per row; return logits [rows, vocabulary]."""
        wanted = np.arange(len(token_ids))
        return self._head(self._layers(token_ids, positions, step, None, wanted))


def load_generator(info: ModelInfo, settings: WorkerSettings, progress: Progress) -> LanguageWorker:
    """Load the language model alone, on its family's path or on the generic path.

    Raises:
        CheckpointError: When weights are missing, a file is corrupt, or the architecture cannot run.
        ConfigError: When the configuration cannot run here.
    """
    torch.set_num_threads(torch_threads(settings))
    dtype: torch.dtype = getattr(torch, info.dtype)
    settings = with_checkpoint_weights(info, settings)
    backend = choose_backend(settings, dtype, info.kv_dtype)
    family = _family_of_rank(info, settings)
    compile_language(info, settings, backend, progress)
    load = _load_any if family is None else functools.partial(_load_family, family)
    loading = typed_out_of_memory("loading the language model", remedy=stage_remedy("generate"))
    # Memory that packing frees would stay in the heap, another size of the weights that the KV cache would lack.
    with loading, backend.without_holes():
        language, group = load(info, settings, backend, progress)
        adapters = served_adapters(language.adapt, backend)
    return LanguageWorker(
        info,
        backend,
        language,
        group,
        slots=settings.slots,
        snapshots=settings.state_snapshots,
        adapters=adapters,
    )


def check_language_share(info: ModelInfo, settings: WorkerSettings) -> None:
    """Raise a `ConfigError` if a rank cannot quantize its share of the language model."""
    family = _family_of_rank(info, settings)
    if family is not None:
        _build_share(family, info, settings)


def _family_of_rank(info: ModelInfo, settings: WorkerSettings) -> LanguageFamily | None:
    family = language_family(info.family, info.path, settings)
    if settings.ranks > 1 and family is not None and not family.language_sharing.sizes:
        return None  # only the generic path can use a tensor-parallel plan
    return family


def _build_share(
    family: LanguageFamily, info: ModelInfo, settings: WorkerSettings
) -> tuple[Any, dict[str, Cut]]:
    """Build a rank's share of a language model on the meta device; return the cuts by name, too."""
    if not family.own_modules:
        paged_attention.register()  # transformers looks it up while it builds the model
    with torch.device("meta"):
        model: Any = family.build_language(info.path, paged_attention.NAME)
    if family.own_modules:
        model.attend_by(paged_attention.attend)
    cuts = slice_module(model, family.language_sharing, ranks=settings.ranks, rank=settings.rank)
    check_groups(cuts, settings, stage="generate")
    return model, cuts


def _load_family(
    family: LanguageFamily,
    info: ModelInfo,
    settings: WorkerSettings,
    backend: Backend,
    progress: Progress,
) -> tuple[LanguageModel, RankGroup]:
    config = family.model_config(info.path)
    tied = bool(config.tie_word_embeddings)
    index = WeightIndex.open(checkpoint_directory(info.path), tied=tied)
    ranks, rank = settings.ranks, settings.rank
    model, cuts = _build_share(family, info, settings)
    scheme, experts = checkpoint_scheme(info), None
    if scheme is not None:
        check_quantized(settings, backend.dtype, what=f"config.json: {scheme.method}")
        prefixes = family.language_prefixes
        find_quantized(model, scheme, lambda name: index.find(name, prefixes) is not None)
        if family.decoder.experts:
            experts = find_parts(model, index, scheme, prefixes)
            experts.remove_from(model)
    vocabulary: int = config.get_text_config().vocab_size
    divides = ranks > 1 and vocabulary % ranks == 0
    fill_module(
        model,
        index,
        family.language_prefixes,
        dtype=backend.dtype,
        device=settings.device,
        label="loading the language model",
        progress=progress,
        cuts=cuts,
        flips=family.flips,
        mapped=backend.lays_out(model),
        scheme=scheme,
    )
    if experts is not None:
        report = functools.partial(progress, "loading the language model")
        experts.read_into(model, backend.dtype, settings.device, report)
    head = load_head(
        model,
        index,
        dtype=backend.dtype,
        device=settings.device,
        cut=cut_of(vocabulary, ranks=ranks, rank=rank) if divides else None,
    )
    if backend.compiles:
        progress("loading kernels", 1.0)
    backend.load_attention()
    group = RankGroup(settings, "generate", backend.collectives)
    sum_rows(model, family.language_sharing, group)
    adapt = functools.partial(
        AdaptedModule,
        model,
        cuts=cuts,
        prefixes=family.language_prefixes,
        others=getattr(family, "vision_prefixes", ()),
    )
    return family_language(info, family, backend, model, head, adapt, ranks=ranks), group


def family_language(
    info: ModelInfo,
    family: LanguageFamily,
    backend: Backend,
    model: nn.Module,
    head: torch.Tensor,
    adapt: Callable[..., AdaptedModule],
    *,
    config: Any = None,
    ranks: int = 1,
) -> LanguageModel:
    """Return a family's model, with its weights, ready to run.

    `head` is the output projection, or this rank's part of its vocabulary. `config` is the text configuration if the
    checkpoint's configuration describes more than this model. `info` has this rank's share of the KV cache. `adapt`
    makes its layers able to take LoRA adapters, given the runnable layers.
    """
    config = config or family.model_config(info.path)
    text = config.get_text_config()
    kinds = family.decoder.kinds(text)
    kv_heads = text.num_key_value_heads // ranks
    head_bytes = info.kv_bytes_per_token // (text.num_hidden_layers * kv_heads * 2)
    head_dim = kept_dim(head_bytes // backend.kv_dtype.itemsize, backend.kv_dtype)
    runnable = backend.prepare_language(model, head, family.decoder)
    rule = family.decoder.logit_rule(text)
    if rule is not None:
        runnable = replace(runnable, head=RuledHead(runnable.head, rule))
    return LanguageModel(
        module=model,
        runnable=runnable,
        kv=[KvShape(kv_heads, head_dim, head_dim)] * text.num_hidden_layers,
        heads=text.num_attention_heads // ranks,
        positions=functools.partial(family.positions, config),
        first_layers=functools.partial(_cut_layers, model, kinds),
        adapt=functools.partial(adapt, layers=runnable.layers),
        shares_head=len(head) < text.vocab_size,
        ruled=any(kind.window for kind in kinds) or family.decoder.score_bound(text) is not None,
    )


@contextmanager
def _cut_layers(model: Any, kinds: Sequence[AttentionKind], count: int) -> Iterator[None]:
    layers, seen = model.layers, Counter[AttentionKind]()
    first = type(layers)()
    for layer, kind in zip(layers, kinds, strict=True):
        seen[kind] += 1
        if seen[kind] <= count:
            first.append(layer)
    model.layers = first
    try:
        yield
    finally:
        model.layers = layers


def build_any(info: ModelInfo, share: Callable[[Any], None] | None = None) -> Any:
    """Return a model for the generic path, without weights, on the meta device.

    `share` reduces it to one rank's share under tensor parallelism.

    Raises:
        CheckpointError: When it cannot run, as far as that can be determined without weights.
    """
    build = build_without_tower if info.takes_images else build_whole
    built = build(info.path, info.family, getattr(torch, info.dtype))
    check_built(built, info, share)
    return built


def _load_any(
    info: ModelInfo, settings: WorkerSettings, backend: Backend, progress: Progress
) -> tuple[LanguageModel, RankGroup]:
    """Load a model on the generic path."""
    _check_generic(info, settings)
    paged_attention.register()
    scheme = checkpoint_scheme(info)
    if scheme is not None:
        check_quantized(settings, backend.dtype, what=f"config.json: {scheme.method}")
    ranks, share = PlannedRanks(ranks=settings.ranks, rank=settings.rank), None
    text = read_config(checkpoint_directory(info.path), info.family).get_text_config()
    if settings.ranks > 1:
        plan = parallel_plan(text, info.family)
        share = functools.partial(share_by_plan, plan=plan, family=info.family, ranks=ranks)
    built, quantized = build_any(info, share), None
    if scheme is not None:
        index = WeightIndex.open(checkpoint_directory(info.path))
        quantized = find_parts(built, index, scheme)
    model = load_whole(
        built,
        info.path,
        attention=paged_attention.NAME,
        dtype=backend.dtype,
        device=settings.device,
        progress=progress,
        share=share,
        mapped=backend.lays_out,
        quantized=quantized,
    )
    from vsched_workers.backends.reference.image_inputs import ImageInputs

    inputs = ImageInputs(model, levels=info.embedding_levels) if info.takes_images else None
    found = first_run(model, info, inputs) if share is None else first_run_of_share(model, info)
    check_kept(found, info)
    if backend.compiles:
        progress("loading kernels", 1.0)
    backend.load_attention()
    group = RankGroup(settings, "generate", backend.collectives)
    ranks.join(group)
    usual = None
    if share is None and (inputs is None or found.only_places_rows):
        usual = text_family(text.model_type, text, mixtures=backend.fuses_mixtures)
    if usual is not None and not (info.item_atomic or info.prompt_atomic):
        decoder, head = model.get_decoder(), model.get_output_embeddings().weight
        name = next(name for name, each in model.named_modules() if each is decoder)
        others = tuple(f"{other}." for other in left_out(model))
        adapt = functools.partial(AdaptedModule, decoder, prefixes=(f"{name}.",), others=others)
        return family_language(info, usual, backend, decoder, head, adapt, config=text), group
    found.states.use_functions(backend.state_functions(found.states.names))
    size = backend.prepare_whole(model)
    language = LanguageModel(
        module=model,
        runnable=WholeModel(model, backend.send, inputs).runnable(size),
        kv=found.kv,
        heads=text.num_attention_heads // (settings.ranks if shares_heads(text) else 1),
        positions=text_positions if inputs is None else inputs.positions,
        first_layers=None if found.layers is None else found.layers.first,
        ruled=not found.plain,
        states=found.states if info.state_bytes else None,
        bidirectional_spans=bidirectional_spans_of(info),
        adapt=functools.partial(AdaptedModule, model, cuts=ranks.cuts, only=found.adaptable),
    )
    return language, group


def _check_generic(info: ModelInfo, settings: WorkerSettings) -> None:
    """Check a configuration of the generic path.

    Raises:
        ConfigError: When the generic path does not support the configuration.
    """
    what, or_one_rank = f"model_type {info.family!r} is served by the generic path, which", ""
    if language_family(info.family, info.path) is not None:
        what = f"several ranks share model_type {info.family!r} on the generic path, which"
        or_one_rank = ", or generate.tensor_parallel to 1"
    if settings.quantizes and settings.ranks > 1:
        raise ConfigError(
            f"generate.weights: {what} quantizes to {settings.weights} on one rank only, not on {settings.ranks}. "
            f"Remedy: set generate.tensor_parallel to 1, or generate.weights to auto."
        )
    if settings.deterministic:
        raise ConfigError(
            f"model.deterministic: {what} cannot do so. Remedy: set it to false{or_one_rank}."
        )
