"""Contract suite for worker plug-ins, run behind the production ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.kernel import SchedulerLimits
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.plugins import resolve_policy
from vsched.sim.ranks.stepped import SteppedArena, SteppedGenerator
from vsched.testing.cluster import ModelCluster, default_policies
from vsched.testing.contracts.base import ContractBroken, demand
from vsched.types import ArraySpec, Extent, MediaItem, ModelInfo, Request, SamplingParams
from vsched.wire import Paused, RankReport, SizeKv
from vsched.worker.contract import (
    Arrays,
    Batch,
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
from vsched.worker.sizing import KvBuilder
from vsched.worker.spec import StepLimits
from vsched.worker.stage_rank import EncodeRank


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


class _WorkerCluster(ModelCluster):
    """A scheduler whose generate group runs a worker of a plug-in."""

    def __init__(
        self,
        worker: GenerateWorker,
        rows: Mapping[bytes, npt.NDArray[np.uint8]],
        limits: SchedulerLimits,
        mode: str,
    ) -> None:
        self._worker = worker
        self._rows = rows
        preemption = resolve_policy("preemption", {"use": "youngest", "mode": mode})
        super().__init__(limits, default_policies(preemption=preemption))

    def make_arena(self) -> SteppedArena:
        """Return the embeddings of the images, which "encoding" copies to the pages that the kernel has chosen."""
        return SteppedArena(self.limits, self._rows)

    def make_rank(self, _: SteppedGenerator) -> GenerateRank:
        """Return an empty rank with the worker."""
        return GenerateRank(
            self._worker,
            self.arena.embeddings,
            slots=self.limits.slots,
            context_tokens=self.limits.context_tokens,
            block_size=self.limits.block_size,
            swap_blocks=self.limits.swap_blocks,
        )


BLOCK_SIZE = 4
PAGE_ROWS = 3
SLOTS = 4
RESTARTS = 0.03
"""Probability of a restart of the ranks instead of a step."""
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

    Raises:
        ContractBroken: Names the requirement and the observed behaviour; the seed alone reproduces
            it.
    """
    name = type(plugin).__qualname__
    try:
        _demand_kind(plugin, WorkerPlugin, "the plug-in")
        info = model
        if isinstance(info, str):
            info = plugin.inspect(info, dtype="float32", item_tokens_max=0)
        bench = _WorkerBench(plugin, info, settings or WorkerSettings(), images)
        for seed in seeds:
            try:
                bench.check(seed)
            except Exception as error:
                detail = error if isinstance(error, ContractBroken) else repr(error)
                raise ContractBroken(f"seed {seed}: {detail}") from error
        bench.drop_kv()
    except ContractBroken as error:
        raise ContractBroken(f"{name}: {error}") from error


def sample_images(plugin: WorkerPlugin, info: ModelInfo) -> list[SampleImage]:
    """Return small pictures prepared by the plug-in's preprocessor."""
    preprocessor = plugin.load_preprocessor(info)
    _demand_kind(preprocessor, Preprocessor, "the result of `load_preprocessor`")
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
    ) -> None:
        self.info = info
        self.images = sample_images(plugin, info) if images is None else list(images)
        self.encoder: EncodeWorker | None = None
        fractions: list[float] = []

        def progress(what: str, fraction: float) -> None:
            demand(isinstance(what, str), f"progress must name the current task, not {what!r}")
            fractions.append(fraction)

        if self.images:
            self.encoder = plugin.load_encoder(info, settings, progress)
            _check_loaded(self.encoder, EncodeWorker, "load_encoder")
            self.encode_errors = _keep_errors(self.encoder)
        self.generator = plugin.load_generator(info, settings, progress)
        _check_loaded(self.generator, GenerateWorker, "load_generator")
        wrong = [one for one in fractions if not 0 <= one <= 1]
        demand(not wrong, f"progress must be from 0 to 1, and was {wrong[:1]}")
        item_tokens = max((one.plan.tokens for one in self.images), default=0)
        self.length_max = PROMPT_MAX + 2 * item_tokens + OUTPUTS_MAX
        self.blocks = (ASKS_MAX + 1) * (-(-self.length_max // BLOCK_SIZE) + 1)
        _check_memory(self.generator, info, self._load(), self.blocks)
        # As in a restarted group: a KV cache that was proved before is built without touching it.
        self.generator.build_kv(blocks=self.blocks, block_size=BLOCK_SIZE, touch=False)
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
            block_size=BLOCK_SIZE,
        )

    def check(self, seed: int) -> None:
        """Encode, run each request alone, and then all in a random schedule."""
        rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._rows = self._encode(rng)
        requests = self._draw(rng)
        expected = [self._run_alone(request) for request in requests]
        outputs, preemptions = self._run_together(requests, rng)
        for request, alone in zip(requests, expected, strict=True):
            together = outputs[request.request_id]
            demand(
                alone == together,
                f"a request of {len(request.prompt_token_ids)} tokens and {len(request.items)} images with "
                f"{request.sampling} is answered {alone} alone and {together} in a schedule of {len(requests)} "
                f"requests with {preemptions} preemptions",
            )

    def _limits(self, **changes: Any) -> SchedulerLimits:
        limits = SchedulerLimits(
            block_size=BLOCK_SIZE,
            blocks=self.blocks,
            slots=SLOTS,
            batch_tokens=self.length_max + SLOTS,
            chunk_tokens=self.length_max,
            context_tokens=self.length_max,
            page_rows=PAGE_ROWS,
            pages=2 * sum(-(-image.plan.tokens // PAGE_ROWS) for image in self.images) + 1,
            swap_blocks=self.swap_blocks,
            prefix_cache=False,
        )
        return msgspec.structs.replace(limits, **changes)

    def _run_alone(self, request: Request) -> list[int]:
        """Return the output of a request that runs alone: one chunk, then token by token."""
        cluster = _WorkerCluster(self.generator, self._rows, self._limits(), "recompute")
        cluster.submit(request)
        cluster.drain()
        return cluster.outputs[request.request_id]

    def _run_together(
        self, requests: Sequence[Request], rng: random.Random
    ) -> tuple[dict[str, list[int]], int]:
        """Return the outputs of requests in one random schedule, in which ranks restart, and its preemptions."""
        lengths = (len(one.prompt_token_ids) + one.sampling.max_tokens for one in requests)
        # Few blocks, so that requests are preempted and freed blocks are soon reused.
        least = max(-(-length // BLOCK_SIZE) for length in lengths) + 1
        limits = self._limits(
            blocks=min(least + rng.choice([0, 1, 2, 4, 8, 100]), self.blocks),
            chunk_tokens=rng.choice([1, 2, 3, 5, 7, 16, 1000]),
            batch_tokens=SLOTS + rng.choice([1, 4, 9, 20, 1000]),
            prefix_cache=rng.random() < 0.8,
        )
        mode = rng.choice(["recompute", "swap"] if self.swap_blocks else ["recompute"])
        cluster = _WorkerCluster(self.generator, self._rows, limits, mode)
        for request in requests:
            cluster.submit(request)
            for _ in range(rng.randrange(12)):
                self._act(cluster, rng)
        while cluster.busy("encode") or cluster.busy("generate"):
            self._act(cluster, rng)
        cluster.drain()
        (group,) = cluster.kernel.generators
        return cluster.outputs, group.statistics()["preemptions"]

    def _act(self, cluster: ModelCluster, rng: random.Random) -> None:
        """Run a pending step, or restart the ranks of the generate group."""
        if rng.random() < RESTARTS:
            cluster.lose("generate", planned=True)
            cluster.restore_group("generate")
        elif cluster.busy("encode") and (rng.random() < 0.5 or not cluster.busy("generate")):
            cluster.run_encode()
        elif cluster.busy("generate"):
            cluster.run_generate()

    def drop_kv(self) -> None:
        """Drop the KV cache, twice."""
        self.generator.drop_graphs()
        self.generator.drop_kv()
        self.generator.drop_kv()

    # --- encode ---

    def _encode(self, rng: random.Random) -> dict[bytes, npt.NDArray[np.uint8]]:
        """Encode all images in random batches over random pages; return the rows of each by its key in requests."""
        if self.encoder is None:
            return {}
        counts = [-(-image.plan.tokens // PAGE_ROWS) for image in self.images]
        spare = 3
        free = rng.sample(range(sum(counts) + spare), sum(counts) + spare)
        pages = [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + spare, PAGE_ROWS, self.info.embedding_row_bytes)
        arenas = [
            np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()
            for _ in range(2)
        ]
        order = rng.sample(range(len(self.images)), len(self.images))
        cut = rng.randint(1, len(order))
        # The same batches over different initial bytes reveal unwritten ones. Also layer by layer,
        # if the encoder can pause.
        for layers, arena in enumerate(arenas):
            for batch in (order[:cut], order[cut:]):
                if batch:
                    self._encode_batch(self.encoder, arena, batch, pages, layers)
        found = {}
        for index, (image, own) in enumerate(zip(self.images, pages, strict=True)):
            rows = [arena[own].reshape(-1, shape[2])[: image.plan.tokens] for arena in arenas]
            demand(
                np.array_equal(rows[0], rows[1]),
                f"`encode` must write all {image.plan.tokens} rows of an image, and the same ones every time",
            )
            found[_key(index)] = rows[0]
        return found

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
        rank = EncodeRank(encoder, arena, self._read)
        received: RankReport | None = rank.apply(EncodeDecision(1, tasks, layers=layers))
        pauses = 0
        while isinstance(received, Paused):
            pauses += 1
            demand(pauses < LAYERS_MAX, f"`advance` has not finished after {pauses} layers")
            received = rank.go_on(1, layers)
        for error in self.encode_errors:
            raise ContractBroken(f"`encode` failed: {error!r}") from error
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

    def _draw(self, rng: random.Random) -> list[Request]:
        """Draw requests; some have a prefix of an earlier one."""
        requests: list[Request] = []
        for _ in range(rng.randint(2, ASKS_MAX)):
            prompt: list[int] = []
            items: list[MediaItem] = []
            if requests and rng.random() < 0.5:
                model = rng.choice(requests)
                prompt, items = [*model.prompt_token_ids], [*model.items]
            room = max(2, PROMPT_MAX - sum(token != self.info.image_token_id for token in prompt))
            for _ in range(0 if items or not self.images else rng.choice([0, 1, 1, 2])):
                prompt += self._text(rng, rng.randint(1, max(1, room // 4)))
                index = rng.randrange(len(self.images))
                plan = self.images[index].plan
                items.append(
                    MediaItem(
                        key=_key(index),
                        tokens=plan.tokens,
                        offset=len(prompt),
                        metadata=plan.metadata,
                        extent=Extent(0, 16),
                    )
                )
                prompt += [self.info.placeholder] * plan.tokens
            if len(prompt) < self.length_max - OUTPUTS_MAX:
                most = min(room // 2, self.length_max - OUTPUTS_MAX - len(prompt))
                prompt += self._text(rng, rng.randint(1, max(1, most)))
            sampling = msgspec.structs.replace(
                rng.choice(SAMPLINGS), max_tokens=rng.randint(1, OUTPUTS_MAX), ignore_eos=True
            )
            requests.append(
                Request(
                    request_id=f"r{len(requests)}",
                    prompt_token_ids=prompt,
                    items=tuple(items),
                    sampling=sampling,
                )
            )
        return requests

    def _text(self, rng: random.Random, count: int) -> list[int]:
        special = {self.info.image_token_id, *self.info.stop_token_ids}
        drawn: list[int] = []
        while len(drawn) < count:
            token = rng.randrange(self.info.vocab_size)
            if token not in special:
                drawn.append(token)
        return drawn


def _key(index: int) -> bytes:
    """Return the key of an image in requests."""
    return b"image %d" % index


def _keep_errors(worker: EncodeWorker) -> list[Exception]:
    """Return a list of the exceptions that an encoder will raise: its rank replaces them with a message for clients."""
    errors: list[Exception] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def keep_error(*args: Any) -> Any:
            try:
                return call(*args)
            except Exception as error:
                errors.append(error)
                raise

        return keep_error

    for name in ("encode", "begin", "advance"):
        setattr(worker, name, watched(getattr(worker, name)))
    return errors


def _demand_kind(subject: object, kind: type, what: str) -> None:
    demand(isinstance(subject, kind), f"{what} must be a {kind.__module__}.{kind.__qualname__}")


def _check_loaded(worker: EncodeWorker | GenerateWorker, protocol: type, method: str) -> None:
    _demand_kind(worker, protocol, f"the result of `{method}`")
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
