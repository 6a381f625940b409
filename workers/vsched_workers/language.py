"""The generate worker: the language model alone, one packed row a step over a paged KV cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional

from vsched.types import ModelInfo
from vsched.worker.contract import Batch, Progress, Sampled, SequenceState, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers import attention
from vsched_workers.attention import DecodeKernel, KvCache, PagedStep, Segment
from vsched_workers.cpu_modules import PackedWeight, pack_linears, packs, warm_up
from vsched_workers.device_memory import (
    open_device_memory,
    require_available,
    typed_out_of_memory,
)
from vsched_workers.experts import BALANCE, INTERVAL_S, ExpertBalance, SharedExperts
from vsched_workers.sampling import sample
from vsched_workers.step_rows import Prepared, chunk_positions, sampling_rows, special_rows

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.families import Family
    from vsched_workers.tensor_parallel import RankGroup


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Images:
    """The image rows of a packed row: where they are, and their embedding levels [levels, image rows, hidden]."""

    rows: npt.NDArray[np.int64]
    levels: torch.Tensor


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
        self._decode: DecodeKernel | None = attention.choose_decode(settings, dtype)
        self._prefill = attention.choose_prefill(settings, dtype)
        self._cache: KvCache | None = None
        experts = [each for each in model.modules() if isinstance(each, SharedExperts)]
        self._balance = ExpertBalance(experts, group) if experts and group.size > 1 else None
        self._head: Callable[[torch.Tensor], torch.Tensor]
        self._head_is_shared = len(head) < self._config.text_config.vocab_size
        packed_bytes = 0
        # By where they lie: a tied head is the embedding, or a view of it.
        kept: dict[int, torch.Tensor] = {}
        if packs(settings.device, dtype):
            # A tied head is packed too: it is the largest product of a step. The embedding needs the plain copy.
            packed_head = PackedWeight(head, None)
            self._head = packed_head
            packed_bytes = pack_linears(model) + packed_head.size_bytes
            warm_up(model, packed_head)
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
            )
            self._decode = attention.choose_decode(self._settings, dtype)
        if self._balance is not None:
            self._balance.reset()

    def drop_graphs(self) -> None:
        """Forget captured steps; none are captured as yet."""

    def drop_kv(self) -> None:
        """Forget the KV cache and the attention kernel that reads it."""
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
            token_ids, positions, step = self._pack(batch)
            hidden = self._forward(batch, token_ids, positions, step)
            rows = sampling_rows(batch)
            if not len(rows):
                return Sampled(tokens=np.empty(0, dtype=np.int32))
            if len(rows) < len(hidden):
                hidden = hidden[torch.from_numpy(rows).to(self._device)]
            logits = self._head(hidden)
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

    def _pack(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, PagedStep]:
        """Lay out token ids [rows], positions [4, 1, rows] and the attention of a step."""
        cache, decode = self._cache, self._decode
        assert cache is not None, "build_kv comes before the first step"
        assert decode is not None, "it comes with the cache"
        size = cache.block_size
        decode_rows = len(batch.decode_slots)
        tables = batch.block_tables[batch.decode_slots]
        at = batch.decode_positions
        total = decode_rows + sum(chunk.stop - chunk.start for chunk in batch.chunks)
        ids = np.empty(total, dtype=np.int64)
        slots = np.empty(total, dtype=np.int64)
        positions = np.empty((4, 1, total), dtype=np.int64)
        if decode_rows:
            ids[:decode_rows] = batch.decode_tokens
            blocks = tables[np.arange(decode_rows), at // size].astype(np.int64)
            slots[:decode_rows] = blocks * size + at % size
            positions[0, 0, :decode_rows] = at
            deltas = [sequence.state.delta for sequence in batch.decode_sequences]
            positions[1:, 0, :decode_rows] = at + np.array(deltas, dtype=np.int64)
        segments = []
        row = decode_rows
        for chunk in batch.chunks:
            end = row + chunk.stop - chunk.start
            table = batch.block_tables[chunk.slot]
            index = np.arange(chunk.start, chunk.stop)
            ids[row:end] = chunk.sequence.tokens[chunk.start : chunk.stop]
            slots[row:end] = table[index // size].astype(np.int64) * size + index % size
            positions[0, 0, row:end] = index
            positions[1:, 0, row:end] = chunk_positions(chunk, index)
            segments.append(
                Segment(
                    table,
                    start=row,
                    first=chunk.start,
                    last=chunk.stop,
                    block_size=size,
                    device=self._device,
                )
            )
            row = end
        step = PagedStep(
            cache=cache,
            decode=decode,
            prefill=self._prefill,
            slots=torch.from_numpy(slots).to(self._device),
            decode_rows=decode_rows,
            tables=tables,
            contexts=at + 1,
            segments=segments,
        )
        return (
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(positions).to(self._device),
            step,
        )

    def _forward(
        self, batch: Batch, token_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Run the layers over the packed row; returns hidden states [rows, hidden]."""
        embeds = self._model.embed_tokens(token_ids)
        options: dict[str, Any] = {}
        images = self._images(batch)
        if images is not None:
            rows = torch.from_numpy(images.rows).to(self._device)
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

    def _images(self, batch: Batch) -> Images | None:
        """Copy the embedding rows that the chunks cover from the arena to the device, and only those."""
        places: list[npt.NDArray[np.int64]] = []
        sources: list[npt.NDArray[np.int64]] = []
        per_page = batch.embeddings.shape[1]
        row = len(batch.decode_slots)
        for chunk in batch.chunks:
            for item in chunk.items:
                wanted = np.arange(item.row_start, item.row_stop)
                pages = np.asarray(item.pages, dtype=np.int64)
                sources.append(pages[wanted // per_page] * per_page + wanted % per_page)
                first = row + item.chunk_start
                places.append(np.arange(first, first + len(wanted)))
            row += chunk.stop - chunk.start
        if not sources:
            return None
        flat = batch.embeddings.reshape(-1, batch.embeddings.shape[2])
        raw = torch.from_numpy(flat[np.concatenate(sources)])
        if self._device != "cpu":
            # From pinned memory the copy overlaps with the step that is still running (D3).
            raw = raw.pin_memory().to(self._device, non_blocking=True)
        levels = (
            raw.view(getattr(torch, self._info.dtype))
            .reshape(len(raw), self._info.embedding_levels, self._info.hidden_size)
            .transpose(0, 1)
        )
        return Images(rows=np.concatenate(places), levels=levels)


def load_generator(info: ModelInfo, settings: WorkerSettings, progress: Progress) -> LanguageWorker:
    """Load the language model alone.

    Raises:
        CheckpointError: When weights are missing or a file is corrupt.
    """
    from vsched_workers.checkpoint import checkpoint_directory
    from vsched_workers.families import FAMILIES
    from vsched_workers.slicing import cut_of, slice_module, sum_rows
    from vsched_workers.tensor_parallel import RankGroup
    from vsched_workers.weights import WeightIndex, fill_module, load_head

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
            label="language model",
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
    group = RankGroup(settings, "generate")
    sum_rows(model, family.language_sharing, group)
    return LanguageWorker(info, settings, family, model, head, group)
