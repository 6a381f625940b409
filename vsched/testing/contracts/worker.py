"""Contract suite for worker plug-ins, run behind the production ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    EncodeDecision,
    EncodeTask,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
    SwapCopies,
)
from vsched.testing.contracts.base import ContractBroken, demand, demand_members
from vsched.types import ArraySpec, Extent, ItemPlace, ModelInfo, SamplingParams
from vsched.wire import GenerateResult, Paused, RankReport, SizeKv
from vsched.worker.contract import (
    Arrays,
    Batch,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    ImagePlan,
    Preprocessor,
    Sampled,
    WorkerPlugin,
    WorkerSettings,
    extent_bytes,
    supports,
    view_arrays,
)
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.memory import DeviceMemory
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits
from vsched.worker.stage_rank import EncodeRank

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


BLOCK_SIZE = 4
PAGE_ROWS = 3
SLOTS = 4
ASKS_MAX = 5
PROMPT_MAX = 24
OUTPUTS_MAX = 8
LAYERS_MAX = 10_000
LEAK_BYTES = 32 << 20
"""Size of a KV cache that is built and dropped: a leak of it exceeds the measurement error."""
HUGE_BYTES = 1 << 50
"""More memory than any device has."""
SIDES = ((56, 56), (112, 56), (84, 112))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.2),
    SamplingParams(temperature=0.0, logprobs=2),
)


@dataclass(frozen=True)
class SampleImage:
    """An image as an encoder receives it; `arrays` are described by the plan."""

    plan: ImagePlan
    arrays: Arrays
    key: bytes = b""


def check_worker(
    plugin: WorkerPlugin,
    model: ModelInfo | str,
    *,
    seeds: Iterable[int] = range(10),
    settings: WorkerSettings | None = None,
    images: Sequence[SampleImage] | None = None,
    block_size: int = BLOCK_SIZE,
) -> None:
    """Check that a worker plug-in satisfies its contract, with one rank per stage.

    All required members must exist. Encoding writes all rows of an image into its pages and nothing
    anywhere else, and gives the same rows every time. Out of memory raises `DeviceOutOfMemory`, and
    dropping the KV cache frees its memory. Each seed draws requests and a schedule: the output
    tokens must equal those of each request running alone, for any chunking, concurrent requests,
    preemptions and shared prefixes.

    If the last bits of a step's results depend on its batch, tokens can differ by chance: load the
    model in float32, with the most exact settings that the plug-in has.

    Args:
        plugin: The module-level object that an entry point would name.
        model: The facts of a model, or the path of a checkpoint to inspect as float32.
        seeds: One schedule per seed, all with the same loaded workers.
        settings: Worker settings for loading.
        images: Images to encode and to use in prompts; by default pictures prepared by the
            plug-in's preprocessor. If empty, the encoder is not loaded.
        block_size: Tokens per KV block.

    Raises:
        ContractBroken: Names the requirement and the observed behaviour; the seed alone reproduces
            it.
    """
    name = type(plugin).__qualname__
    try:
        demand_members(plugin, WorkerPlugin, who=name)
        info = model
        if isinstance(info, str):
            info = plugin.inspect(info, dtype="float32", item_tokens_max=0)
        bench = _WorkerBench(plugin, info, settings or WorkerSettings(), images, block_size)
        for seed in seeds:
            try:
                bench.check(seed)
            except Exception as error:
                detail = error if isinstance(error, ContractBroken) else repr(error)
                raise ContractBroken(f"seed {seed}: {detail}") from error
        bench.end()
    except ContractBroken as error:
        raise ContractBroken(f"{name}: {error}") from error


def sample_images(plugin: WorkerPlugin, info: ModelInfo) -> list[SampleImage]:
    """Return small pictures prepared by the plug-in's preprocessor."""
    preprocessor = plugin.load_preprocessor(info)
    demand_members(preprocessor, Preprocessor, who="the result of `load_preprocessor`")
    made = []
    for number, (width, height) in enumerate(SIDES):
        noise = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
        plan = preprocessor.plan_image(width, height)
        arrays = preprocessor.process_image(Image.fromarray(noise))
        specs = {ArraySpec(name, one.dtype.name, one.shape) for name, one in arrays.items()}
        demand(
            specs == set(plan.arrays),
            f"`process_image` must return the arrays of `plan_image`, {plan.arrays}, and returned {specs}",
        )
        made.append(SampleImage(plan, arrays, b"sample %d" % number))
    return made


class _WorkerBench:
    """The loaded workers."""

    def __init__(
        self,
        plugin: WorkerPlugin,
        info: ModelInfo,
        settings: WorkerSettings,
        images: Sequence[SampleImage] | None,
        block_size: int,
    ) -> None:
        self.info = info
        self.block_size = block_size
        self.images = sample_images(plugin, info) if images is None else list(images)
        self.numbers = itertools.count(1)
        self.encoder: EncodeWorker | None = None
        fractions: list[float] = []

        def progress(what: str, fraction: float) -> None:
            demand(isinstance(what, str), f"progress must name the current task, not {what!r}")
            fractions.append(fraction)

        if self.images:
            self.encoder = plugin.load_encoder(info, settings, progress)
            _check_loaded(self.encoder, EncodeWorker, "load_encoder")
        self.generator = plugin.load_generator(info, settings, progress)
        _check_loaded(self.generator, GenerateWorker, "load_generator")
        wrong = [one for one in fractions if not 0 <= one <= 1]
        demand(not wrong, f"progress must be from 0 to 1, and was {wrong[:1]}")
        item_tokens = max((one.plan.tokens for one in self.images), default=0)
        self.length_max = PROMPT_MAX + 2 * item_tokens + OUTPUTS_MAX
        self.blocks = (ASKS_MAX + 1) * (-(-self.length_max // block_size) + 1)
        _check_memory(self.generator, info, self._load(), self.blocks)
        # As in a restarted group: a KV cache that was proved before is built without touching it.
        self.generator.build_kv(blocks=self.blocks, block_size=block_size, touch=False)
        watch_steps(self.generator, info.vocab_size)
        self.swap_blocks = 0
        if plugin.swaps_kv(info, device=settings.device):
            demand(
                supports(self.generator, "build_swap"), "`swaps_kv` is True without `build_swap`"
            )
            self.swap_blocks = self.blocks // 2
            self.generator.build_swap(self.swap_blocks)

    def _load(self) -> StepLimits:
        return StepLimits(
            slots=SLOTS,
            batch_tokens=2 * PROMPT_MAX,
            chunk_tokens=PROMPT_MAX,
            context_tokens=self.length_max,
            block_size=self.block_size,
        )

    def check(self, seed: int) -> None:
        """Encode, run each request alone, and then all in a random schedule."""
        rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
        embeddings, pages = self._encode(rng)
        place = Place(
            worker=self.generator,
            embeddings=embeddings,
            plans=[image.plan for image in self.images],
            pages=pages,
            slots=SLOTS,
            blocks=self.blocks,
            block_size=self.block_size,
            swap_blocks=self.swap_blocks,
        )
        asks = self._draw(rng)
        expected = [run_alone(place, ask, next(self.numbers)) for ask in asks]
        first = next(self.numbers)
        self.numbers = itertools.count(first + len(asks))
        choices, events = run_together(place, asks, first, rng)
        for ask, alone, together in zip(asks, expected, choices, strict=True):
            demand(
                alone == together,
                f"a request of {len(ask.prompt)} tokens and {len(ask.images)} images with {ask.sampling} is answered "
                f"{alone} alone and {together} in a schedule with {events}",
            )

    def end(self) -> None:
        """Drop the KV cache, twice."""
        self.generator.drop_graphs()
        self.generator.drop_kv()
        self.generator.drop_kv()

    # --- encode ---

    def _encode(self, rng: random.Random) -> tuple[npt.NDArray[np.uint8], list[list[int]]]:
        """Encode all images in random batches over random pages; return the arena's content."""
        counts = [-(-image.plan.tokens // PAGE_ROWS) for image in self.images]
        spare = 3
        free = rng.sample(range(sum(counts) + spare), sum(counts) + spare)
        pages = [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + spare, PAGE_ROWS, self.info.embedding_row_bytes)
        arenas = [
            np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()
            for _ in range(2)
        ]
        if self.encoder is None:
            return arenas[0], pages
        order = rng.sample(range(len(self.images)), len(self.images))
        cut = rng.randint(1, len(order))
        # The same batches over different initial bytes reveal unwritten ones. Also layer by layer,
        # if the encoder can pause.
        for layers, arena in enumerate(arenas):
            for batch in (order[:cut], order[cut:]):
                if batch:
                    self._encode_batch(self.encoder, arena, batch, pages, layers)
        for image, own in zip(self.images, pages, strict=True):
            rows = [arena[own].reshape(-1, shape[2])[: image.plan.tokens] for arena in arenas]
            demand(
                np.array_equal(rows[0], rows[1]),
                f"`encode` must write all {image.plan.tokens} rows of an image, and the same ones every time",
            )
        arenas[0].flags.writeable = False
        return arenas[0], pages

    def _encode_batch(
        self,
        encoder: EncodeWorker,
        arena: npt.NDArray[np.uint8],
        batch: Sequence[int],
        pages: Sequence[Sequence[int]],
        layers: int,
    ) -> None:
        tasks = [
            EncodeTask(
                self.images[index].key,
                self.images[index].plan.tokens,
                Extent(index, extent_bytes(self.images[index].plan.arrays)),
                list(pages[index]),
                self.images[index].plan.arrays,
                self.images[index].plan.metadata,
            )
            for index in batch
        ]
        before = arena.copy()
        worker = _Overheard(encoder)
        rank = EncodeRank(worker, arena, self._read)
        received: RankReport | None = rank.apply(EncodeDecision(1, tasks, layers=layers))
        pauses = 0
        while isinstance(received, Paused):
            pauses += 1
            demand(pauses < LAYERS_MAX, f"`advance` has not finished after {pauses} layers")
            received = rank.go_on(1, layers)
        if worker.error is not None:
            raise ContractBroken(f"`encode` failed: {worker.error!r}") from worker.error
        others = np.ones(len(arena), np.bool_)
        others[[page for index in batch for page in pages[index]]] = False
        touched = np.flatnonzero((arena != before).any(axis=(1, 2)) & others).tolist()
        demand(not touched, f"`encode` wrote to page {touched[:1]}, which is none of its images'")

    def _read(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return the read-only arrays of an image, as in an arena."""
        image = self.images[extent.offset]
        content = np.zeros(extent.size, np.uint8)
        for name, view in view_arrays(image.plan.arrays, content).items():
            view[...] = image.arrays[name]
        content.flags.writeable = False
        return content

    # --- requests ---

    def _draw(self, rng: random.Random) -> list[ScheduledRequest]:
        """Draw requests; some have a prefix of an earlier one."""
        asks: list[ScheduledRequest] = []
        for _ in range(rng.randint(2, ASKS_MAX)):
            prompt: list[int] = []
            images: list[tuple[int, int]] = []
            if asks and rng.random() < 0.5:
                model = rng.choice(asks)
                prompt, images = list(model.prompt), list(model.images)
            room = max(2, PROMPT_MAX - sum(token != self.info.image_token_id for token in prompt))
            for _ in range(0 if images or not self.images else rng.choice([0, 1, 1, 2])):
                prompt += self._text(rng, rng.randint(1, max(1, room // 4)))
                image = rng.randrange(len(self.images))
                images.append((len(prompt), image))
                prompt += [self.info.placeholder] * self.images[image].plan.tokens
            if len(prompt) < self.length_max - OUTPUTS_MAX:
                most = min(room // 2, self.length_max - OUTPUTS_MAX - len(prompt))
                prompt += self._text(rng, rng.randint(1, max(1, most)))
            sampling = msgspec.structs.replace(
                rng.choice(SAMPLINGS), max_tokens=rng.randint(1, OUTPUTS_MAX), ignore_eos=True
            )
            asks.append(ScheduledRequest(prompt=prompt, images=images, sampling=sampling))
        return asks

    def _text(self, rng: random.Random, count: int) -> list[int]:
        special = {self.info.image_token_id, *self.info.stop_token_ids}
        drawn: list[int] = []
        while len(drawn) < count:
            token = rng.randrange(self.info.vocab_size)
            if token not in special:
                drawn.append(token)
        return drawn


class _Overheard(EncodeWorker):
    """An encoder that keeps its last exception, since its rank replaces it with a message for clients."""

    def __init__(self, worker: EncodeWorker) -> None:
        self.weights_bytes = worker.weights_bytes
        self.error: Exception | None = None
        self.pauses = worker.pauses
        self._worker = worker

    def device_memory(self) -> DeviceMemory:
        """Return the memory of its device."""
        return self._worker.device_memory()

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode a batch."""
        with self._listening():
            self._worker.encode(jobs, embeddings)

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Begin a batch that is encoded layer by layer."""
        with self._listening():
            self._worker.begin(jobs, embeddings)

    def advance(self, layers: int) -> bool:
        """Encode some layers of the batch."""
        with self._listening():
            return self._worker.advance(layers)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise


def _check_loaded(worker: EncodeWorker | GenerateWorker, protocol: type, method: str) -> None:
    demand_members(worker, protocol, who=f"the result of `{method}`")
    demand_members(worker.device_memory(), DeviceMemory, who="the result of `device_memory`")
    weights = worker.weights_bytes
    demand(isinstance(weights, int) and weights >= 0, f"`weights_bytes` is {weights!r}")


def _check_memory(worker: GenerateWorker, info: ModelInfo, load: StepLimits, blocks: int) -> None:
    """Build KV caches as the engine does when it searches for their size: each is proved and dropped."""
    sizing = KvBuilder(worker, info, load)
    least = blocks * load.block_size
    tokens = max(least, LEAK_BYTES // info.kv_bytes_per_token // load.block_size * load.block_size)
    huge = HUGE_BYTES // info.kv_bytes_per_token // load.block_size * load.block_size
    for size, headroom_bytes, outcome in (
        (tokens, 0, "fits"),
        (huge, 0, "out_of_memory"),
        (tokens, 0, "fits"),
        (least, HUGE_BYTES, "out_of_memory"),
        (least, 0, "fits"),
    ):
        _carry_out(
            sizing, SizeKv(size, profile=outcome == "fits", headroom_bytes=headroom_bytes), outcome
        )
    worker.drop_graphs()
    worker.drop_kv()


def _carry_out(sizing: KvBuilder, order: SizeKv, outcome: str) -> None:
    """Build a KV cache and check the outcome."""
    size = f"with a KV cache of {order.tokens} tokens and headroom of {order.headroom_bytes} bytes"
    try:
        sized = sizing.carry_out(order)
    except Exception as error:
        fits = outcome == "fits"
        doing = "the hardest steps failed" if fits else "out of memory must be DeviceOutOfMemory"
        raise ContractBroken(f"{size}, {doing}: {error!r}") from error
    demand(sized.outcome == outcome, f"{size}: {sized.outcome}, not {outcome}. {sized.message}")
