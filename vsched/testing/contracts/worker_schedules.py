"""Random schedules for a generate worker: possible kernel decisions over random requests.

A schedule is executed by `GenerateRank`, as in production. It cuts prompts anywhere, mixes prefill
with decode, preempts and resumes requests (by recomputation or, if supported, by swapping), shares
the blocks of common prefixes, reuses freed blocks, and decides one step ahead of the results.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
    SwapCopies,
)
from vsched.testing.contracts.base import demand
from vsched.types import ItemPlace, SamplingParams
from vsched.wire import GenerateResult
from vsched.worker.contract import Batch, GenerateWorker, ImagePlan, Sampled
from vsched.worker.generate_rank import GenerateRank

PREEMPTIONS_MAX = 3
"""Maximum preemptions per request, so that schedules end."""


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """A request: its prompt, and its images as (offset, image index)."""

    prompt: list[int]
    images: list[tuple[int, int]]
    sampling: SamplingParams

    @property
    def length_max(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(frozen=True, kw_only=True)
class Place:
    """Environment of schedules: a worker with a KV cache, and encoded embeddings.

    Attributes:
        plans: The available images.
        pages: The pages of each image.
        swap_blocks: Number of swap blocks of the worker.
    """

    worker: GenerateWorker
    embeddings: npt.NDArray[np.uint8]
    plans: Sequence[ImagePlan]
    pages: Sequence[Sequence[int]]
    slots: int
    blocks: int
    block_size: int
    swap_blocks: int = 0


@dataclass
class _Request:
    """State of a request in the schedule: known results, and decisions beyond them.

    Attributes:
        planned: Number of tokens after all decisions are executed, unless it ends before.
        computed: Number of positions whose KV is computed by then.
        places: Its blocks in swap memory while it is swapped out; `kept` is the number of positions
            in them.
    """

    ask: ScheduledRequest
    number: int
    tokens: list[int]
    planned: int
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    decoding: bool = False
    finished: bool = False
    known_to_rank: bool = False
    returns_at: int = 0
    preemptions: int = 0
    places: list[int] = field(default_factory=list)
    kept: int = 0

    def content(self, length: int) -> list[tuple[int, int]]:
        """Return the content of the first positions: tokens, and the image index."""
        images = {offset: image + 1 for offset, image in self.ask.images}
        seen, content = 0, []
        for position, token in enumerate(self.tokens[:length]):
            seen = images.get(position, seen)
            content.append((token, seen))
        return content


def watch_steps(worker: GenerateWorker, vocabulary: int) -> None:
    """Replace `step` of a worker by one that checks its outputs, and that its inputs stay unchanged."""
    step = worker.step

    def watched(batch: Batch) -> Sampled:
        arrays = {
            "decode_slots": batch.decode_slots,
            "decode_tokens": batch.decode_tokens,
            "decode_positions": batch.decode_positions,
            "block_tables": batch.block_tables,
        }
        before = {name: array.copy() for name, array in arrays.items()}
        tokens = [one.sequence.tokens[: one.stop].copy() for one in batch.chunks]
        sampled = step(batch)
        for name, array in arrays.items():
            demand(np.array_equal(array, before[name]), f"`step` wrote to `{name}` of its batch")
        for chunk, known in zip(batch.chunks, tokens, strict=True):
            same = np.array_equal(chunk.sequence.tokens[: chunk.stop], known)
            demand(same, "`step` wrote to the tokens of a sequence")
        rows = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
        _check_tokens(sampled.tokens, rows, vocabulary)
        return sampled

    worker.step = watched  # type: ignore[method-assign]


def _check_tokens(tokens: npt.NDArray[np.int32], rows: int, vocabulary: int) -> None:
    demand(
        isinstance(tokens, np.ndarray) and tokens.dtype == np.int32,
        f"`step` must return tokens as int32, not {getattr(tokens, 'dtype', type(tokens))}",
    )
    demand(
        tokens.shape == (rows,),
        f"`step` must return a token for each of {rows} rows, and returned {tokens.shape}",
    )
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    demand(not len(wrong), f"`step` returned a token outside the vocabulary: {wrong[:1]}")


def run_alone(place: Place, ask: ScheduledRequest, number: int) -> list[int]:
    """Return the output of a request that runs alone: one chunk, then token by token."""
    request = _Request(ask, number, list(ask.prompt), len(ask.prompt))
    schedule = Schedule(place, [request], random.Random(0), plain=True)  # noqa: S311
    return schedule.run()[0]


def run_together(
    place: Place, asks: Sequence[ScheduledRequest], first_number: int, rng: random.Random
) -> tuple[list[list[int]], str]:
    """Return the outputs of requests in one random schedule, and the counts of its events."""
    requests = [
        _Request(ask, first_number + index, list(ask.prompt), len(ask.prompt))
        for index, ask in enumerate(asks)
    ]
    schedule = Schedule(place, requests, rng, plain=False)
    choices = schedule.run()
    counts = ", ".join(f"{count} {what}" for what, count in sorted(schedule.events.items()))
    return choices, counts


class Schedule:
    """Makes decisions, executes them on the rank, and processes the results, sometimes one step late.

    Attributes:
        events: Counts of events by name.
    """

    def __init__(
        self, place: Place, requests: list[_Request], rng: random.Random, *, plain: bool
    ) -> None:
        self.events: Counter[str] = Counter()
        self._place = place
        self._requests = requests
        self._rng = rng
        self._plain = plain
        self._step = 0
        self._free_slots = rng.sample(range(place.slots), place.slots)
        self._uses: Counter[int] = Counter()
        self._free_places = rng.sample(range(place.swap_blocks), place.swap_blocks)
        self._out: list[int] = []
        self._back: list[int] = []
        self._context = max(one.ask.length_max for one in requests)
        # No more blocks than can be in use, so that freed blocks are soon reused.
        most = min(place.slots, len(requests)) * -(-self._context // place.block_size)
        self._free_blocks = rng.sample(range(place.blocks), most)
        self._rank = GenerateRank(
            place.worker,
            place.embeddings,
            slots=place.slots,
            context_tokens=self._context,
            block_size=place.block_size,
            swap_blocks=place.swap_blocks,
        )

    def run(self) -> list[list[int]]:
        """Run every request to its end; return the outputs, in order."""
        late: GenerateResult | None = None
        while late is not None or not all(one.finished and one.slot < 0 for one in self._requests):
            result = self._rank.apply(self._decide())
            if late is not None:
                self._learn(late)
            late = None
            if not self._plain and self._rng.random() < 0.7:
                late = result
            else:
                self._learn(result)
        return [one.tokens[len(one.ask.prompt) :] for one in self._requests]

    def _learn(self, result: GenerateResult) -> None:
        tokens = np.frombuffer(result.tokens, np.int32)
        numbers = np.frombuffer(result.numbers, np.int32)
        by_number = {one.number: one for one in self._requests}
        for slot in np.flatnonzero(tokens >= 0).tolist():
            by_number[int(numbers[slot])].tokens.append(int(tokens[slot]))
        for one in result.finished:
            by_number[one.number].finished = True

    def _decide(self) -> GenerateDecision:
        self._step += 1
        left = self._let_go()
        forgotten = []
        for one in self._requests:
            if one.finished and one.known_to_rank and one.slot < 0:
                one.known_to_rank = False
                forgotten.append(one.number)
        joined = self._let_in()
        grown = self._grow()
        swaps = SwapCopies(self._out, self._back) if self._out or self._back else None
        self._out, self._back = [], []
        chunks = self._cut()
        decision = GenerateDecision(self._step, forgotten, left, joined, grown, chunks, swaps=swaps)
        if sum(one.decoding for one in self._requests) > 1:
            self.events["steps with several decodes"] += 1
        return decision

    # --- slots ---

    def _let_go(self) -> list[Leave]:
        left = []
        for one in self._requests:
            if one.slot < 0:
                continue
            preempted = not self._plain and one.preemptions < PREEMPTIONS_MAX
            preempted = preempted and self._rng.random() < 0.12
            if not one.finished and not preempted:
                continue
            # Sometimes as after a restart: the rank forgets the request and receives it again in
            # full.
            keep = not one.finished and self._rng.random() < 0.7
            left.append(Leave(one.number, one.slot, keep))
            one.known_to_rank = keep
            if keep and self._place.swap_blocks and self._rng.random() < 0.5:
                self._swap_out(one)
            self._free_slots.append(one.slot)
            self._release(one.blocks)
            one.slot, one.blocks, one.decoding, one.computed = -1, [], False, 0
            if not one.finished:
                one.preemptions += 1
                one.returns_at = self._step + 2  # the result of the last step is known by then
                self.events["preemptions" if keep else "restarts"] += 1
        return left

    def _let_in(self) -> list[Join]:
        joined = []
        for one in self._requests:
            waits = one.slot < 0 and not one.finished and one.returns_at <= self._step
            if not waits or not self._free_slots or (not self._plain and self._rng.random() < 0.4):
                continue
            one.slot = self._free_slots.pop(self._rng.randrange(len(self._free_slots)))
            one.planned = length = len(one.tokens)
            one.blocks, one.computed = ([], 0) if one.places else self._shared(one)
            self._cover(one, length)
            self._swap_in(one)
            data = None if one.known_to_rank else self._data(one)
            one.known_to_rank = True
            joined.append(Join(one.number, one.slot, one.computed, length, list(one.blocks), data))
        return joined

    def _data(self, one: _Request) -> RequestData:
        places = [
            ItemPlace(offset, self._place.plans[image].tokens, self._place.plans[image].metadata)
            for offset, image in one.ask.images
        ]
        tokens = np.asarray(one.tokens, np.int32).tobytes()
        return RequestData(tokens, len(one.ask.prompt), places, one.ask.sampling, ())

    # --- memory ---

    def _shared(self, one: _Request) -> tuple[list[int], int]:
        """Return blocks of another request that hold a prefix of this one, and the length of that prefix."""
        if self._plain or self._rng.random() < 0.2:
            return [], 0
        size, best = self._place.block_size, 0
        blocks: list[int] = []
        content = one.content(len(one.tokens) - 1)  # the last token is always computed
        for donor in self._requests:
            if donor is one or donor.slot < 0:
                continue
            # Chunks of the previous decision are computed before those of this one.
            theirs = donor.content(min(donor.computed, len(donor.tokens)))
            common = 0
            while common < min(len(theirs), len(content)) and theirs[common] == content[common]:
                common += 1
            if common // size > best:
                best = common // size
                blocks = donor.blocks[:best]
        for block in blocks:
            self._uses[block] += 1
        self.events["shared prefixes"] += best > 0
        return list(blocks), best * size

    def _cover(self, one: _Request, length: int) -> int:
        """Allocate the blocks of a request's first `length` positions; return the number of new blocks."""
        new = -(-length // self._place.block_size) - len(one.blocks)
        for _ in range(new):
            block = self._free_blocks.pop()
            self._uses[block] = 1
            one.blocks.append(block)
        return max(new, 0)

    def _swap_out(self, one: _Request) -> None:
        """Swap out the computed blocks of a leaving request, if there is enough swap memory."""
        blocks = one.blocks[: -(-one.computed // self._place.block_size)]
        if not blocks or len(blocks) > len(self._free_places):
            return
        one.kept = one.computed
        one.places = [self._free_places.pop() for _ in blocks]
        for pair in zip(blocks, one.places, strict=True):
            self._out += pair
        self.events["swapped out"] += 1

    def _swap_in(self, one: _Request) -> None:
        """Swap in the blocks of a joining request; computation continues after them."""
        if not one.places:
            return
        one.computed = min(one.kept, one.planned - 1)
        count = -(-one.computed // self._place.block_size)
        for pair in zip(one.places[:count], one.blocks[:count], strict=True):
            self._back += pair
        self._free_places += one.places
        one.places = []

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free_blocks.append(block)
        if not self._plain:
            self._rng.shuffle(self._free_blocks)

    # --- step contents ---

    def _grow(self) -> list[int]:
        """Plan a token for each decoding request, including those whose end is not known yet."""
        grown: list[int] = []
        for one in self._requests:
            if one.decoding:
                if one.planned < self._context and self._cover(one, one.planned):
                    grown += [one.slot, one.blocks[-1]]
                one.computed = one.planned
                one.planned += 1
        return grown

    def _cut(self) -> list[ChunkPlan]:
        """Cut chunks off prompts; after the last chunk of the known tokens, a request decodes from the next step on."""
        chunks = []
        for one in self._requests:
            if one.slot < 0 or one.decoding or (not self._plain and self._rng.random() < 0.3):
                continue
            start, stop = one.computed, one.planned
            if not self._plain:
                stop = min(stop, start + self._rng.choice([1, 2, 3, 7, 16, 1000]))
            chunks.append(ChunkPlan(one.slot, start, stop, self._met(one.ask, start, stop)))
            one.computed = stop
            self.events["chunks"] += 1
            if stop == one.planned:
                one.decoding = True
                one.planned += 1
        if not self._plain:
            self._rng.shuffle(chunks)
        return chunks

    def _met(self, ask: ScheduledRequest, start: int, stop: int) -> list[ChunkItem]:
        """Return the images in a chunk."""
        place, met = self._place, []
        for offset, image in ask.images:
            tokens = place.plans[image].tokens
            if offset < stop and start < offset + tokens:
                met.append(ChunkItem(offset, tokens, list(place.pages[image])))
        return met
