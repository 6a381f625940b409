"""The hardest steps that a kernel may ask of a generate worker, so that their memory is known before it serves.

The steps are real ones: decisions, followed by a rank of its own, carried out by the worker, sampler included. Block
tables name the same few blocks over and over, and image rows the same few pages. So any context can be run over a KV
cache of any size, and what the steps write is of no use to anybody.

What a step needs follows from its rows, from the sum over its sequences of what they have computed (tables, masks),
from the largest product of a chunk and its context (scores, masks), and from whether rows carry images and yield
tokens. Every chunk here is full of image rows, and every row that yields a token asks for all that sampling offers.
The steps:

1. Where 2 has no chunk of full length: the whole budget as prefill in few slots.
2. The whole budget as prefill from all slots: as many chunks of full length as leave every other slot a token. Every
   chunk ends its prompt just below the longest context.
3. Decode just below the longest context in all slots.
4. Chunks of full length in as few slots as take the rest of the budget, decode in all others.
5. Where layers keep a state: one chunk of full length from position 0.

Between 3 and 4 lie the steps with fewer chunks, between 4 and 2 those with fewer decodes. What they need is a sum of
terms that are proportional to the one or the other number and of the larger of two such terms, so it is largest at an
end.

A processor would need minutes for this. But there, what is freed is gone, so a worker can promise to be frugal
(`FrugalSteps`): every layer gives back what it took, and takes it for one sequence after the other. Then two layers
reach the peak (the second starts while the input of the first is still held), and one chunk at the longest context is
as good as many; the others are short prompts. Step 2 adds nothing to step 4 then but the state of the requests, which
a step through no layer at all makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

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
from vsched.types import ItemPlace, ModelInfo, SamplingParams
from vsched.worker.capabilities import FrugalSteps, WorstCaseBuilder
from vsched.worker.contract import GenerateWorker, ImagePlan, WorkerPlugin
from vsched.worker.generate_rank import GenerateRank

_PAGE_ROWS = 64

_OUTPUTS = 3
"""Tokens that a sequence may yield: in the step of its last chunk and in two more."""


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the kernel asks of a step; the names are those of its sizes.

    `state_snapshots` are places for states beside those of the slots, and `swap_blocks` places for blocks in host
    memory, which no step asks anything of.
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
        """The longest sequence, never too short for the outputs."""
        return max(self.context_tokens, _OUTPUTS + 1)

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt that leaves room for the outputs."""
        return self.length_max - _OUTPUTS

    @property
    def chunk_max(self) -> int:
        """The longest chunk there can be."""
        return min(self.chunk_tokens, self.prompt_tokens, self.batch_tokens)


_SAMPLING = SamplingParams(
    max_tokens=_OUTPUTS, temperature=1.0, top_p=0.95, repetition_penalty=1.1, logprobs=20
)


def image_for(
    plugin: WorkerPlugin, info: ModelInfo, limits: StepLimits, *, pixels_max: int
) -> ImagePlan | None:
    """Return the largest image that fits a prompt; None without images, or where the plug-in knows none."""
    room = min(info.item_tokens_max, limits.prompt_tokens - 1)
    if pixels_max < 1 or room < 1 or not isinstance(plugin, WorstCaseBuilder):
        return None
    capped = msgspec.structs.replace(info, item_tokens_max=room)
    batches = plugin.worst_batches(capped, items=1, tokens=0, pixels_max=pixels_max)
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
    """Run the hardest steps over the KV cache of `blocks` blocks that stands; return how many.

    `image` is what the rows of chunks carry, None for text alone; `adapter` is what all rows have, 0 for none. Rows of
    several adapters take their turns in a layer, so that all with one take most.

    Raises:
        DeviceOutOfMemory: From the worker.
    """
    frugal = worker if isinstance(worker, FrugalSteps) and worker.frugal else None
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
    for decision, layers in writer.frugal() if frugal else writer.whole():
        with frugal.first_layers(layers) if frugal else nullcontext():
            rank.apply(decision)
        steps += 1
    return steps


def spread(limits: StepLimits) -> list[int]:
    """Return the chunk lengths of a step that fills the budget from all slots, full chunks first."""
    lengths: list[int] = []
    left = limits.batch_tokens
    for later in range(limits.slots - 1, -1, -1):
        lengths.append(min(limits.chunk_max, left - later))
        left -= lengths[-1]
    return lengths


def heap(limits: StepLimits, budget: int) -> list[int]:
    """Return the chunk lengths of a step that takes a budget in as few slots as possible."""
    full, rest = divmod(budget, limits.chunk_max)
    lengths = [limits.chunk_max] * full + ([rest] if rest else [])
    return lengths[: limits.slots]


def beside_decodes(limits: StepLimits) -> list[int]:
    """Return the chunk lengths of a step in which all other slots decode."""
    for prefilling in range(1, limits.slots):
        left = limits.batch_tokens - (limits.slots - prefilling)
        if left <= prefilling * limits.chunk_max:
            return heap(limits, left)
    return heap(limits, limits.batch_tokens)


Step = tuple[GenerateDecision, int]
"""A step, and how many layers to run it through where there is a choice."""

_LAYERS = 2


class _DecisionWriter:
    """Writes the decisions of a profiling run, as a kernel would."""

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
        """Yield the steps, each to be carried out before the next."""
        few, many = heap(self._limits, self._limits.batch_tokens), spread(self._limits)
        if few[0] > many[0]:
            yield self._prefill(few, long=len(few))
        yield self._prefill(many, long=len(many))
        yield self._decode()
        beside = beside_decodes(self._limits)
        yield self._prefill(beside, long=len(beside))
        yield from self._beginning()

    def frugal(self) -> Iterator[Step]:
        """Yield the steps that suffice for a frugal worker."""
        few, beside = heap(self._limits, self._limits.batch_tokens), beside_decodes(self._limits)
        if few[0] > beside[0]:
            yield self._prefill(few, long=1)
        joining, _ = self._prefill([1] * self._limits.slots, long=self._limits.slots)
        yield joining, 0
        yield self._decode()
        yield self._prefill(beside, long=1)
        yield from self._beginning()

    def _beginning(self) -> Iterator[Step]:
        """Yield a longest chunk from position 0, where layers that keep a state may compute otherwise than later on."""
        if self._info.state_bytes:
            yield self._prefill([self._limits.chunk_max], long=0)

    def _decode(self) -> Step:
        self._step += 1
        return GenerateDecision(self._step), _LAYERS

    def _prefill(self, lengths: list[int], *, long: int) -> Step:
        """Give the first slots to new requests, whose last chunks these are; whoever is there leaves.

        The first `long` of them have the longest prompt, the others no more than their chunk.
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
        """Fill the longest chunk with images, from its end, a token of text after each, since no two may touch."""
        places: list[ItemPlace] = []
        image, end = self._image, prompt_tokens - 1
        while image and end > max(prompt_tokens - self._limits.chunk_max, image.tokens - 1):
            places.append(ItemPlace(end - image.tokens, image.tokens, image.metadata))
            end -= image.tokens + 1
        return places[::-1]
