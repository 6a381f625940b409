"""The profiling run: the steps with the highest memory use, executed before a generate worker serves.

The steps are real: decisions, followed by a separate `GenerateRank` and executed by the worker, including the sampler.
Block tables repeat the same few blocks, and image rows the same few pages, so any context can run on a KV cache of any
size; the written values are meaningless.

The memory of a step depends on its rows, on the total of computed tokens of its sequences (tables, masks), on the
largest product of a chunk and its context (scores, masks), and on images and sampling. Here every chunk is full of
image rows, and every row that samples uses all sampling options. The steps:

1. If step 2 has no chunk of full length: the whole budget as prefill in few slots.
2. The whole budget as prefill in all slots: as many chunks of full length as possible with at least a token for every
   other slot. Every chunk ends its prompt just below the maximum context.
3. Decode just below the maximum context in all slots.
4. Chunks of full length in as few slots as possible for the rest of the budget, decode in all others.
5. With recurrent layers: one chunk of full length from position 0.

Steps with fewer chunks lie between 3 and 4, and steps with fewer decodes between 4 and 2. Their memory is a sum of
terms proportional to one of the two numbers, or the maximum of two such terms, so the maximum is at an end of each
range.

On a CPU this would take minutes. But there freed memory is returned, so a worker can be `frugal`: every layer frees
all that it allocates, and allocates for one sequence at a time. Then two layers reach the peak (the second starts
while the input of the first is still held), and one chunk at the maximum context is sufficient; the others are short
prompts. Compared with step 4, step 2 then adds only the state of the requests, which a step without layers creates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
)
from vsched.policy import RankMemory
from vsched.types import ItemPlace, ModelInfo, SamplingParams
from vsched.worker.contract import GenerateWorker, ImagePlan, Worker, WorkerPlugin
from vsched.worker.generate_rank import GenerateRank


def measure_rank(worker: Worker, rank: int) -> RankMemory:
    """Return the memory that a rank holds on its device now, and the free memory there."""
    memory = worker.device_memory()
    return RankMemory(
        rank=rank,
        pool=memory.pool,
        total_bytes=memory.total(),
        available_bytes=memory.available(),
        reserved_bytes=memory.reserved(),
        weights_bytes=worker.weights_bytes,
        adapter_bytes=worker.adapter_bytes,
    )


@contextmanager
def trial_adapter(worker: Worker) -> Iterator[int]:
    """Add an adapter of the maximum rank within the context; yield its number, or 0 without adapters.

    There are no other adapters while memory is measured, so its number is free.
    """
    if not worker.adapter_bytes:
        yield 0
        return
    worker.add_trial_adapter(1)
    try:
        yield 1
    finally:
        worker.remove_adapter(1)


_PAGE_ROWS = 64

_OUTPUTS = 3
"""Output tokens of a sequence: in the step of its last chunk and in two more."""


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's limits of a step, by the names of its sizes.

    `state_snapshots` is the number of state snapshots besides the states of slots, and `swap_blocks` that of blocks in
    host memory, which steps do not use.
    """

    slots: int
    batch_tokens: int
    chunk_tokens: int
    context_tokens: int
    block_size: int
    state_snapshots: int = 0
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        if self.batch_tokens < self.slots:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, must be at least slots ({self.slots})"
            )

    @property
    def length_max(self) -> int:
        """Maximum sequence length, at least sufficient for the outputs."""
        return max(self.context_tokens, _OUTPUTS + 1)

    @property
    def prompt_tokens(self) -> int:
        """Maximum prompt length with room for the outputs."""
        return self.length_max - _OUTPUTS

    @property
    def chunk_max(self) -> int:
        """Maximum chunk length."""
        return min(self.chunk_tokens, self.prompt_tokens, self.batch_tokens)


_SAMPLING = SamplingParams(
    max_tokens=_OUTPUTS, temperature=1.0, top_p=0.95, repetition_penalty=1.1, logprobs=20
)


def image_for(
    plugin: WorkerPlugin, info: ModelInfo, limits: StepLimits, *, pixels_max: int
) -> ImagePlan | None:
    """Return the largest image that fits in a prompt; None without images, or if the plug-in reports none."""
    room = min(info.item_tokens_max, limits.prompt_tokens - 1)
    if pixels_max < 1 or room < 1:
        return None
    capped = msgspec.structs.replace(info, item_tokens_max=room)
    batches = plugin.worst_batches(capped, items=1, tokens=0, pixels_max=pixels_max) or []
    return max((batch[0] for batch in batches), key=lambda plan: plan.tokens, default=None)


def run_profile(
    worker: GenerateWorker,
    info: ModelInfo,
    limits: StepLimits,
    *,
    blocks: int,
    image: ImagePlan | None,
    adapter: int = 0,
) -> int:
    """Execute the profiling run on the current KV cache of `blocks` blocks; return the number of steps.

    `image` is the image in chunks, None for text only; `adapter` is the adapter of all rows, 0 for none. Layers process
    the rows of different adapters in turn, so memory is highest if all have the same.

    Raises:
        DeviceOutOfMemory: From the worker.
    """
    writer = _DecisionWriter(info, limits, blocks=blocks, image=image, adapter=adapter)
    rank = GenerateRank(
        worker,
        writer.embeddings,
        slots=limits.slots,
        context_tokens=limits.length_max,
        block_size=limits.block_size,
    )
    rank.adapters.add(adapter)
    steps = 0
    for decision, layers in writer.frugal() if worker.frugal else writer.whole():
        with worker.first_layers(layers) if worker.frugal else nullcontext():
            rank.apply(decision)
        steps += 1
    return steps


def spread(limits: StepLimits) -> list[int]:
    """Return the chunk lengths of a step that uses the budget in all slots, full chunks first."""
    lengths: list[int] = []
    left = limits.batch_tokens
    for later in range(limits.slots - 1, -1, -1):
        lengths.append(min(limits.chunk_max, left - later))
        left -= lengths[-1]
    return lengths


def heap(limits: StepLimits, budget: int) -> list[int]:
    """Return the chunk lengths of a step that uses a budget in as few slots as possible."""
    full, rest = divmod(budget, limits.chunk_max)
    lengths = [limits.chunk_max] * full + ([rest] if rest else [])
    return lengths[: limits.slots]


def beside_decodes(limits: StepLimits) -> list[int]:
    """Return the chunk lengths of a step with decode rows in all other slots."""
    for prefilling in range(1, limits.slots):
        left = limits.batch_tokens - (limits.slots - prefilling)
        if left <= prefilling * limits.chunk_max:
            return heap(limits, left)
    return heap(limits, limits.batch_tokens)


Step = tuple[GenerateDecision, int]
"""A step, and its number of layers of a frugal worker."""

_LAYERS = 2


class _DecisionWriter:
    """Creates the decisions of a profiling run."""

    def __init__(
        self,
        info: ModelInfo,
        limits: StepLimits,
        *,
        blocks: int,
        image: ImagePlan | None,
        adapter: int,
    ) -> None:
        self._limits = limits
        self._info = info
        self._image = image
        self._adapter = adapter
        self._step = 0
        self._number = 0
        self._slot_requests: dict[int, int] = {}
        self._blocks = [
            index % blocks for index in range(-(-limits.length_max // limits.block_size))
        ]
        self._data: dict[int, RequestData] = {}
        self.embeddings: npt.NDArray[np.uint8] = np.zeros(
            (1, _PAGE_ROWS, info.embedding_row_bytes), np.uint8
        )

    def whole(self) -> Iterator[Step]:
        """Yield the steps; each must be executed before the next."""
        few, many = heap(self._limits, self._limits.batch_tokens), spread(self._limits)
        if few[0] > many[0]:
            yield self._prefill(few, long=len(few))
        yield self._prefill(many, long=len(many))
        yield self._decode()
        beside = beside_decodes(self._limits)
        yield self._prefill(beside, long=len(beside))
        yield from self._beginning()

    def frugal(self) -> Iterator[Step]:
        """Yield the steps for a frugal worker."""
        few, beside = heap(self._limits, self._limits.batch_tokens), beside_decodes(self._limits)
        if few[0] > beside[0]:
            yield self._prefill(few, long=1)
        joining, _ = self._prefill([1] * self._limits.slots, long=self._limits.slots)
        yield joining, 0
        yield self._decode()
        yield self._prefill(beside, long=1)
        yield from self._beginning()

    def _beginning(self) -> Iterator[Step]:
        """Yield a chunk of full length from position 0, where recurrent layers may compute differently."""
        if self._info.state_bytes:
            yield self._prefill([self._limits.chunk_max], long=0)

    def _decode(self) -> Step:
        self._step += 1
        return GenerateDecision(self._step), _LAYERS

    def _prefill(self, lengths: list[int], *, long: int) -> Step:
        """Prefill the last chunks of new requests in the first slots, in place of their present requests.

        The first `long` of them have the maximum prompt length, the others only their chunk.
        """
        left, joined, chunks = [], [], []
        for slot, length in enumerate(lengths):
            if slot in self._slot_requests:
                left.append(Leave(self._slot_requests[slot], slot, keep=False))
            self._number += 1
            self._slot_requests[slot] = self._number
            stop = self._limits.prompt_tokens if slot < long else length
            data = self._request(stop)
            joined.append(Join(self._number, slot, stop - length, stop, self._blocks, data))
            items = [
                ChunkItem(item.offset, item.tokens, [0] * -(-item.tokens // _PAGE_ROWS))
                for item in data.items
                if item.offset + item.tokens > stop - length
            ]
            chunks.append(ChunkPlan(slot, stop - length, stop, items))
        self._step += 1
        return GenerateDecision(self._step, left=left, joined=joined, chunks=chunks), _LAYERS

    def _request(self, prompt_tokens: int) -> RequestData:
        known = self._data.get(prompt_tokens)
        if known is not None:
            return known
        prompt = np.full(prompt_tokens, 1 if self._info.image_token_id == 0 else 0, np.int32)
        places = self._places(prompt_tokens)
        for place in places:
            prompt[place.offset : place.offset + place.tokens] = self._info.placeholder
        self._data[prompt_tokens] = RequestData(
            tokens=prompt.tobytes(),
            prompt_length=prompt_tokens,
            items=places,
            sampling=_SAMPLING,
            stop_token_ids=(),
            adapter=self._adapter,
        )
        return self._data[prompt_tokens]

    def _places(self, prompt_tokens: int) -> list[ItemPlace]:
        """Fill the longest chunk with images from its end, with a text token after each to separate them."""
        places: list[ItemPlace] = []
        image, end = self._image, prompt_tokens - 1
        while image and end > max(prompt_tokens - self._limits.chunk_max, image.tokens - 1):
            places.append(ItemPlace(end - image.tokens, image.tokens, image.metadata))
            end -= image.tokens + 1
        return places[::-1]
