"""A small scheduler that drives the workers through their contract alone, in place of kernel, rank and arena.

Chunks split images, prefill of one request shares a step with the decode of others, and blocks are allocated in a
shuffled order, so that nothing works only because it is contiguous or alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vsched.types import ItemPlace, ModelInfo, SamplingParams, Spans
from vsched.worker.contract import (
    Arrays,
    Batch,
    Chunk,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    ImagePlan,
    ItemPlan,
    ItemRows,
    Preprocessor,
    SequenceState,
    TokenLogprobs,
    VideoFacts,
    VideoPlan,
    VideoSampling,
    WorkerSettings,
)
from vsched_workers.families.qwen_image import PIXELS, flat_patches
from vsched_workers.families.qwen_levels import pixel_values
from vsched_workers.plugin import plugin

Checkpoints = Callable[[str], Path]
"""The fixture `checkpoints`: from a size to the folder of a checkpoint."""

BLOCK_SIZE = 4
ROWS_A_PAGE = 3
BLOCKS = 400
PAGES = 400
TABLE_BLOCKS = 120
SLOTS = 32


def drawn_image(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture with some structure, so that images differ in more than noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def values_of(images: Sequence[Arrays]) -> torch.Tensor:
    """Return the pixel values of images of a supported family, as computed by a rank."""
    assert all(arrays[PIXELS].dtype == np.uint8 for arrays in images)
    pixels = torch.from_numpy(np.concatenate([flat_patches(arrays) for arrays in images]))
    return pixel_values(pixels, images, torch.float32, temporal=2)


@dataclass(frozen=True)
class Clip:
    """A video, as its frames and their rate."""

    frames: Sequence[Image.Image]
    fps: float = 2.0

    @property
    def facts(self) -> VideoFacts:
        return VideoFacts(*self.frames[0].size, len(self.frames), self.fps)

    def plan(self, preprocessor: Preprocessor) -> VideoPlan:
        return preprocessor.plan_video(self.facts, VideoSampling(), frames_max=99, sample=False)

    def groups(self, preprocessor: Preprocessor) -> list[tuple[ImagePlan, Arrays]]:
        """Return plan and arrays of each frame group."""
        plan = self.plan(preprocessor)
        count = plan.group_frames
        return [
            (group, preprocessor.process_frames([self.frames[at] for at in places], plan.size))
            for index, group in enumerate(plan.groups)
            for places in [plan.frames[index * count : (index + 1) * count]]
        ]


def plan_of(preprocessor: Preprocessor, image: Image.Image | Clip) -> ItemPlan:
    """Return the plan of an image or a video."""
    if isinstance(image, Clip):
        return image.plan(preprocessor)
    return preprocessor.plan_image(*image.size)


def parts_of(
    preprocessor: Preprocessor, image: Image.Image | Clip
) -> list[tuple[ImagePlan, Arrays]]:
    """Return plan and arrays of an image, or of each frame group."""
    if isinstance(image, Clip):
        return image.groups(preprocessor)
    return [(preprocessor.plan_image(*image.size), preprocessor.process_image(image))]


@dataclass
class Question:
    """A request: text or token ids, images and `Clip`s before it, sampling parameters, and its adapter."""

    text: str | Sequence[int]
    images: Sequence[Any] = ()
    count: int = 12
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    adapter: int = 0


@dataclass
class Running:
    """A request in the driver."""

    sequence: SequenceState
    slot: int
    pages: list[list[int]]
    computed: int = 0
    budget: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens except the first, if requested."""

    @property
    def output(self) -> list[int]:
        return [int(token) for token in self.sequence.outputs]


def inspect(path: Path | str, dtype: str = "auto", item_tokens_max: int = 0) -> ModelInfo:
    return plugin.inspect(str(path), dtype=dtype, item_tokens_max=item_tokens_max)


DEFAULTS = WorkerSettings()


def load_generator(info: ModelInfo, settings: WorkerSettings = DEFAULTS, /, **changes: Any) -> Any:
    return plugin.load_generator(info, dataclasses.replace(settings, **changes), unreported)


def load_encoder(info: ModelInfo, settings: WorkerSettings = DEFAULTS, /, **changes: Any) -> Any:
    return plugin.load_encoder(info, dataclasses.replace(settings, **changes), unreported)


def unreported(_label: str, _fraction: float) -> None:
    """Take a report of progress."""


@dataclass
class Stage:
    """The loaded parts of one checkpoint."""

    info: ModelInfo
    preprocessor: Preprocessor
    vision: EncodeWorker | None
    generator: GenerateWorker

    @property
    def encoder(self) -> EncodeWorker:
        assert self.vision is not None, "a model of text alone"
        return self.vision

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        attention: str = "exact",
        dtype: str = "float32",
        settings: WorkerSettings = DEFAULTS,
        kv_dtype: str = "auto",
        **changes: Any,
    ) -> Stage:
        """Load a checkpoint; `changes` are to the settings."""
        info = inspect(path, dtype)
        if kv_dtype == "int8":
            info = info.with_int8_kv
        settings = dataclasses.replace(
            settings, attention=attention, slots=SLOTS, state_snapshots=SLOTS, **changes
        )
        kept_by = settings.ranks if info.shares_kv else 1
        share = msgspec.structs.replace(info, kv_bytes_per_token=info.kv_bytes_per_token // kept_by)
        generator = load_generator(share, settings)
        generator.build_kv(blocks=BLOCKS, block_size=BLOCK_SIZE)
        encoder = None
        if info.takes_images:
            encoder = load_encoder(info, settings)
        return cls(info, plugin.load_preprocessor(info), encoder, generator)

    def prompt(self, question: Question) -> tuple[list[int], list[Spans]]:
        """Return the expanded prompt and the placeholders of its images."""
        if not isinstance(question.text, str):
            return list(question.text), []
        content = [
            {"type": "video" if isinstance(each, Clip) else "image"} for each in question.images
        ]
        text = self.preprocessor.render(
            [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
        )
        plans = [plan_of(self.preprocessor, image) for image in question.images]
        return self.preprocessor.expand(self.preprocessor.tokenize(text), plans)


Stages = Callable[..., Stage]
"""The fixture `stages`: the loaded parts of a checkpoint, by its size, attention and data type."""


class Driver:
    """Runs questions to completion; `run` returns them in order."""

    def __init__(
        self,
        stage: Stage,
        *,
        chunk: int,
        seed: int = 0,
        embeddings: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Prepare for a stage; `embeddings` is shared memory of several ranks."""
        self.stage = stage
        self.chunk = chunk
        shuffle = random.Random(seed)
        self.blocks = shuffle.sample(range(BLOCKS), BLOCKS)
        self.pages = shuffle.sample(range(PAGES), PAGES)
        # Consecutive with seed 0: states of such slots are updated in place.
        self.slots = shuffle.sample(range(SLOTS), SLOTS) if seed else [*range(SLOTS)][::-1]
        self.restored: list[tuple[int, int]] = []
        self.tables = np.full((SLOTS, TABLE_BLOCKS), -1, dtype=np.int32)
        shape = (PAGES, ROWS_A_PAGE, stage.info.embedding_row_bytes)
        self.embeddings = np.zeros(shape, np.uint8) if embeddings is None else embeddings
        assert self.embeddings.shape == shape

    def run(
        self, questions: Sequence[Question], *, arrivals: int = 0, preempts: int = 0
    ) -> list[Running]:
        """Run all; every `arrivals` steps one question starts, every `preempts` steps one is preempted; 0 is never."""
        waiting = [self.start(number, question) for number, question in enumerate(questions)]
        every = list(waiting)
        active: list[Running] = []
        step = 0
        while waiting or active:
            if not arrivals:
                active, waiting = active + waiting, []
            elif waiting and step % arrivals == 0:
                active.append(waiting.pop(0))
            if preempts and active and step % preempts == preempts - 1:
                self.preempt(active[-1])
            self.step(active)
            active = [each for each in active if len(each.sequence.outputs) < each.budget]
            step += 1
        return every

    def start(self, number: int, question: Question) -> Running:
        """Preprocess and encode one question, and prepare its sequence."""
        prompt, spans = self.stage.prompt(question)
        parts = [
            part
            for image in question.images
            for part in parts_of(self.stage.preprocessor, image)
            if part[0].placeholders
        ]
        plans = [plan for plan, _ in parts]
        items = [
            ItemPlace(runs[0][0], plan.tokens, plan.metadata, runs, plan.kept or ())
            for runs, plan in zip(spans, plans, strict=True)
        ]
        tokens = np.zeros(len(prompt) + question.count + 1, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        sequence = SequenceState(
            number=number,
            tokens=tokens,
            length=len(prompt),
            prompt_length=len(prompt),
            items=items,
            sampling=question.sampling,
            stop_token_ids=frozenset(self.stage.info.stop_token_ids),
            adapter=question.adapter,
        )
        running = Running(
            sequence=sequence,
            slot=self.slots.pop(),
            pages=[self.take_pages(plan.tokens) for plan in plans],
            budget=question.count,
        )
        jobs = []
        for (plan, arrays), pages in zip(parts, running.pages, strict=True):
            for array in arrays.values():
                array.flags.writeable = False
            jobs.append(EncodeJob(b"", plan.tokens, arrays, plan.metadata, pages, question.adapter))
        if jobs:
            self.stage.encoder.encode(jobs, self.embeddings)
        self.stage.generator.prepare(sequence)
        return running

    def take_pages(self, tokens: int) -> list[int]:
        return [self.pages.pop() for _ in range(-(-tokens // ROWS_A_PAGE))]

    def cover(self, running: Running, length: int) -> None:
        """Allocate the blocks for `length` tokens of a request."""
        table = self.tables[running.slot]
        for index in range(-(-length // BLOCK_SIZE)):
            if table[index] < 0:
                table[index] = self.blocks.pop()

    def step(self, active: Sequence[Running]) -> None:
        decoding = [each for each in active if each.computed == each.sequence.length - 1]
        decoding = [each for each in decoding if len(each.sequence.outputs)]
        decoding.sort(key=lambda each: each.slot)
        prefilling = [each for each in active if each not in decoding]
        for each in decoding:
            self.cover(each, each.sequence.length)
        chunks = [self.next_chunk(each) for each in prefilling]
        rows = [*decoding, *(e for e, c in zip(prefilling, chunks, strict=True) if c.samples)]
        lengths = [each.sequence.length for each in decoding]
        embeddings = self.embeddings.view()
        embeddings.flags.writeable = False
        sampled = self.stage.generator.step(
            Batch(
                decode_slots=int32([each.slot for each in decoding]),
                decode_tokens=int32(
                    [each.sequence.tokens[n - 1] for each, n in zip(decoding, lengths, strict=True)]
                ),
                decode_positions=int32([n - 1 for n in lengths]),
                decode_sequences=[each.sequence for each in decoding],
                block_tables=self.tables,
                embeddings=embeddings,
                chunks=chunks,
                restored=self.restored,
                special=[
                    (row, each.sequence)
                    for row, each in enumerate(rows)
                    if each.sequence.is_special
                ],
            )
        )
        assert len(sampled.tokens) == len(rows)
        self.restored = []
        for each in decoding:
            each.computed += 1
        for each, chunk in zip(prefilling, chunks, strict=True):
            each.computed = chunk.stop
        for one in sampled.prompts:
            prefilling[one.chunk].reported += one.logprobs.tolist()
        for row, each in enumerate(rows):
            sequence = each.sequence
            sequence.tokens[sequence.length] = sampled.tokens[row]
            sequence.length += 1
            each.logprobs.extend(entry for entry in sampled.logprobs if entry.row == row)

    def next_chunk(self, running: Running) -> Chunk:
        start = running.computed
        stop = self.end_of_chunk(running, min(start + self.chunk, running.sequence.length))
        self.cover(running, stop)
        end = last_end(running.sequence)
        writes = [(end, running.sequence.number)] if start < end <= stop else []
        rows = []
        for index, place in enumerate(running.sequence.items):
            pages = running.pages[index]
            for position, row, count in place.rows(start, stop):
                rows.append(ItemRows(index, position - start, row, row + count, pages))
        return Chunk(
            slot=running.slot,
            sequence=running.sequence,
            start=start,
            stop=stop,
            samples=stop == running.sequence.length,
            items=rows,
            writes=writes if self.stage.info.state_bytes else (),
            reported=told_rows(running, stop),
        )

    def end_of_chunk(self, running: Running, stop: int) -> int:
        """Return the end of a chunk that should end at `stop`, extended to include a span that must not be split."""
        if self.stage.info.prompt_atomic:
            return max(stop, running.sequence.prompt_length)
        if self.stage.info.item_atomic:
            for place in running.sequence.items:
                for first, end in place.spans or ((place.offset, place.offset + place.tokens),):
                    stop = end if first < stop < end else stop
        return stop

    def adopt(self, running: Running, other: Running) -> int:
        """Share the blocks of a common prefix with an earlier request, like a prefix cache; return their tokens.

        At least one token is left to compute. Recurrent models continue from the snapshot at the last block boundary of
        the earlier prompt. Nothing is shared if blocks depend on later tokens.
        """
        if self.stage.info.prompt_atomic:
            return 0
        own, old = running.sequence, other.sequence
        known = zip(own.tokens[: own.length - 1], old.tokens[: other.computed], strict=False)
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], known)))
        blocks = common // BLOCK_SIZE
        if self.stage.info.state_bytes:
            end = last_end(old)
            blocks = end // BLOCK_SIZE if 0 < end <= common else 0
            if blocks:
                self.restored.append((running.slot, old.number))
        self.tables[running.slot, :blocks] = self.tables[other.slot, :blocks]
        running.computed = blocks * BLOCK_SIZE
        return running.computed

    def preempt(self, running: Running) -> None:
        """Free a request's blocks, so that it is recomputed, including its output."""
        table = self.tables[running.slot]
        self.blocks[:0] = [int(block) for block in table if block >= 0]
        table[:] = -1
        running.computed = 0


def told_rows(running: Running, stop: int) -> int:
    """Return the number of a chunk's rows up to `stop` with prompt log-probabilities not reported before."""
    sequence = running.sequence
    if sequence.sampling.prompt_logprobs is None:
        return 0
    assert running.computed <= len(running.reported), "what is adopted cannot be told of"
    reported = min(stop, sequence.prompt_length - 1) - running.computed
    return max(0, reported) if running.computed == len(running.reported) else 0


def last_end(sequence: SequenceState) -> int:
    """Return the last block boundary of a prompt that leaves a token to compute."""
    return (sequence.prompt_length - 1) // BLOCK_SIZE * BLOCK_SIZE


def int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def outputs(every: Sequence[Running]) -> list[list[int]]:
    return [each.output for each in every]


def reported(every: Sequence[Running]) -> list[tuple[list[int], str]]:
    """Return tokens and all digits of the log-probabilities of requests; the bits of their logits decide both."""
    return [(each.output, str([(one.logprob, one.top) for one in each.logprobs])) for each in every]


def encode_jobs(
    preprocessor: Preprocessor, images: Sequence[Image.Image], *, last_page: int
) -> list[EncodeJob]:
    """Return one job per image, each with its own pages in descending order."""
    jobs: list[EncodeJob] = []
    for image in images:
        plan = preprocessor.plan_image(*image.size)
        count = -(-plan.tokens // ROWS_A_PAGE)
        pages = list(range(last_page, last_page - count, -1))
        last_page -= count
        arrays = preprocessor.process_image(image)
        jobs.append(EncodeJob(b"", plan.tokens, arrays, plan.metadata, pages))
    return jobs
