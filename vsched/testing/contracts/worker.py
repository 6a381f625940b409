"""Contract suite for worker plug-ins, run behind the production ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.testing.contracts.base import ContractBroken, demand, demand_members
from vsched.testing.contracts.worker_schedules import (
    Place,
    ScheduledRequest,
    run_alone,
    run_together,
    watch_steps,
)
from vsched.types import ArraySpec, Extent, ModelInfo, SamplingParams
from vsched.wire import Paused, RankReport, SizeKv
from vsched.worker.contract import (
    Arrays,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    ImagePlan,
    Preprocessor,
    WorkerPlugin,
    WorkerSettings,
    extent_bytes,
    supports,
    view_arrays,
)
from vsched.worker.memory import DeviceMemory
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits
from vsched.worker.stage_rank import EncodeRank

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
