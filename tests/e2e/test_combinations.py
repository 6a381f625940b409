"""However admission, encoding and caching are configured, each client gets the tokens of `generate`."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.e2e.asking import TEXTS, Ask, data_url, drawn_image, read
from tests.e2e.conftest import assert_idle
from tests.e2e.in_process import InProcessEngine
from tests.e2e.tower import Tower
from tests.patience import patience, until
from tests.workers.reference import Reference
from vsched import Config, Engine, SamplingParams
from vsched.aio.streams import Generation
from vsched.media import ImageReference
from vsched.types import ModelInfo
from vsched.worker.contract import SequenceState
from vsched_workers.batching.sampling import SpecialRow, choose_tokens
from vsched_workers.plugin import plugin

pytestmark = pytest.mark.asyncio(loop_scope="package")

FAMILIES = ("nano25", "nano3")
THRASHING_PAGES = 4
"""Embedding pages for thrashing: exactly the pages of the images of the largest request."""
PAGE_ROWS = 64


def admissions(stage: str) -> dict[str, tuple[str, ...]]:
    """Return the admission policies of a stage with settings small enough to bind."""
    chosen = {
        "fifo": (),
        "token-budget": ("max_tokens=128", "max_items=3"),
        "priority": ("max_tokens=128", "max_items=2", "ageing_s=0.05"),
    }
    return {
        name: tuple(f"{stage}.admission.{each}" for each in (f"use={name}", *fields))
        for name, fields in chosen.items()
    }


FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "encoding": {
        "chunk-aware": (),
        "look-ahead": ("encode.encoding.look_ahead_chunks=1",),
        "eager": ("encode.encoding.look_ahead_chunks=100",),
    },
    "eviction": {
        "lru": (),
        "s3-fifo": ("encode.eviction.use=s3-fifo",),
        "none": ("encode.eviction.use=none",),
    },
    "embeddings": {"roomy": (), "thrashing": ()},
    "prefix": {"on": (), "off": ("generate.prefix_cache=false",)},
    "encode_admission": admissions("encode"),
    "generate_admission": admissions("generate"),
    "prefix_eviction": {
        "lru": (),
        "s3-fifo": ("generate.eviction.use=s3-fifo",),
        "none": ("generate.eviction.use=none",),
    },
    "features": {"raw": (), "brought": ("media.allow_embeddings=true",)},
    "family": dict.fromkeys(FAMILIES, ()),
}
"""Factor, its values, and the settings of each."""
Combination = dict[str, str]


def combination_of(row: str) -> Combination:
    """Return the combination of a value for each factor."""
    return dict(zip(FACTORS, row.split(), strict=True))


COMBINATIONS = [
    combination_of(row)
    for row in """\
        chunk-aware lru     roomy     on  fifo         fifo         lru     raw     nano25
        eager       lru     thrashing off priority     token-budget s3-fifo brought nano3
        look-ahead  s3-fifo thrashing off fifo         priority     none    raw     nano3
        eager       none    roomy     on  token-budget token-budget none    raw     nano25
        chunk-aware s3-fifo roomy     on  priority     priority     s3-fifo brought nano25
        look-ahead  none    thrashing on  token-budget fifo         s3-fifo raw     nano3
        look-ahead  none    thrashing off fifo         token-budget lru     brought nano25
        chunk-aware s3-fifo roomy     off token-budget token-budget lru     raw     nano3
        chunk-aware none    roomy     off priority     fifo         none    raw     nano25
        look-ahead  lru     roomy     on  token-budget fifo         none    brought nano3
        eager       s3-fifo roomy     on  fifo         fifo         lru     brought nano25
        look-ahead  lru     thrashing on  priority     priority     lru     raw     nano3
        chunk-aware none    thrashing off token-budget priority     s3-fifo brought nano25
        eager       lru     roomy     on  fifo         priority     s3-fifo raw     nano25
        """.strip().splitlines()
]
"""Each pair of values of any two factors is in one of them."""


def pairs(combination: Combination) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield every two (factor, value) of a combination."""
    return combinations(combination.items(), 2)


def settings_of(combination: Combination, info: ModelInfo) -> list[str]:
    """Return the settings of a combination."""
    found = [line for factor, value in combination.items() for line in FACTORS[factor][value]]
    if combination["embeddings"] == "thrashing":
        size = THRASHING_PAGES * PAGE_ROWS * info.embedding_row_bytes
        found.append(f"arena.embedding_bytes={size}")
    return found


EACH_FAMILY = [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.thorough)]
KV_TOKENS = 304
"""Not enough for both of `first_questions` at once, whatever the timing and the policies."""
WIDE = drawn_image(900, (300, 250))
IMAGES = [drawn_image(901 + number, size) for number, size in enumerate([(90, 60), (140, 100)] * 3)]
DRAWS = SamplingParams(temperature=1.1, top_p=0.9, seed=11, max_tokens=22, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.8, top_k=40, repetition_penalty=1.2, seed=12, max_tokens=70, ignore_eos=True
)


@dataclass(frozen=True)
class Conversation(Ask):
    """The turns of a chat so far: an image and a text each, and the answers."""

    texts: Sequence[str] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        for text, image in zip(self.texts, self.images, strict=True):
            if said:
                said.append({"role": "assistant", "content": "The first image is brighter."})
            said += Ask(text, [image]).messages
        return said


@dataclass(frozen=True)
class Question:
    """One request; the images at `brought` are sent as embeddings if that is allowed."""

    ask: Ask
    sampling: SamplingParams | None = None
    brought: tuple[int, ...] = ()
    priority: int = 0
    ttft_target_ms: int | None = None

    @property
    def chosen(self) -> SamplingParams:
        greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self.ask.count)
        return self.sampling or greedy


def first_questions() -> list[Question]:
    """Two questions that are being answered before the clients ask; one of the answers is preempted."""
    return [Question(Ask(TEXTS[3], count=70)), Question(Ask("Look: " + TEXTS[3]), PENALISED)]


def clients() -> list[list[Question]]:
    """Questions of each client, asked one after the other; the clients ask at the same time."""
    turns = [
        Question(Conversation(images=IMAGES[: turn + 1], count=14, texts=TEXTS[: turn + 1]))
        for turn in range(3)
    ]
    return [
        [Question(Ask(TEXTS[3], [IMAGES[3]], count=14))],
        [Question(Ask(TEXTS[0], [WIDE], count=24), priority=2), Question(Ask(TEXTS[4], [WIDE]))],
        [Question(Ask(TEXTS[2], IMAGES[3:6], count=26), ttft_target_ms=50)],
        [Question(Ask(TEXTS[2], [IMAGES[0], IMAGES[0], IMAGES[4]], count=22))],
        turns,
        [Question(Ask(TEXTS[4], [IMAGES[1], IMAGES[5], WIDE], count=16), brought=(0, 2))],
        [Question(Ask(TEXTS[1], IMAGES[2:4]), DRAWS, priority=1)],
        [Question(Ask(TEXTS[0], [IMAGES[2]]), DRAWS)],
    ]


class Drawn(LogitsProcessor):
    """Lets `generate` take the token that a seed draws from its logits."""

    def __init__(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._prompt_length = len(prompt)
        self._sampling = sampling

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = input_ids[0].numpy().astype(np.int32)
        state = SequenceState(
            number=0,
            tokens=tokens,
            length=len(tokens),
            prompt_length=self._prompt_length,
            items=[],
            sampling=self._sampling,
            stop_token_ids=frozenset(),
        )
        highest = scores.argmax(-1).numpy().astype(np.int32)
        row = SpecialRow(0, len(tokens), state)
        [token] = choose_tokens(highest, scores, [row]).tokens
        only = torch.full_like(scores, -torch.inf)
        only[0, int(token)] = 0.0
        return only


@dataclass(frozen=True)
class Sent:
    """A client's request, prepared once for all engines, and the output of `generate`."""

    question: Question
    prompt: str
    raw: list[ImageReference]
    brought: list[ImageReference]
    answer: list[int]


class Model:
    """A checkpoint and the questions of the clients."""

    def __init__(self, path: Path) -> None:
        self.info: ModelInfo = plugin.inspect(str(path), dtype="auto", item_tokens_max=0)
        self._tower, self._reference = Tower.load(str(path)), Reference(path)
        self.first = [self._sent(each) for each in first_questions()]
        self.clients = [[self._sent(each) for each in client] for client in clients()]

    def distinct(self, *, brought: bool) -> tuple[int, int]:
        """Number of distinct images, and of distinct embeddings."""
        sent = [sent for client in self.clients for sent in client]
        references = {one for each in sent for one in (each.brought if brought else each.raw)}
        urls = sum(isinstance(one, str) for one in references)
        return urls, len(references) - urls

    def _sent(self, question: Question) -> Sent:
        ask, sampling, preprocessor = question.ask, question.chosen, self._tower.preprocessor
        prompt = ask.prompt(preprocessor)
        drawn = [Drawn(prompt, sampling)] if question.sampling else []
        answer = self._reference.generate(
            prompt, ask.images, sampling.max_tokens, logits_processor=LogitsProcessorList(drawn)
        )
        raw: list[ImageReference] = [data_url(image) for image in ask.images]
        brought = list(raw)
        for index in question.brought:
            brought[index] = self._tower.embed(ask.images[index])
        return Sent(question, preprocessor.render(ask.messages), raw, brought, answer)


@pytest.fixture(scope="module")
def models(checkpoints: Callable[[str], Path]) -> Callable[[str], Model]:
    """Return the model of a family."""
    return functools.cache(lambda family: Model(checkpoints(family)))


async def check_answers(engine: Engine, model: Model, *, brought: bool) -> None:
    """Begin the first answers, then let all clients ask at the same time, and compare each answer."""

    async def begin(name: str, sent: Sent) -> Generation:
        return await engine.generate(
            prompt=sent.prompt,
            images=sent.brought if brought else sent.raw,
            sampling=sent.question.chosen,
            request_id=name,
            priority=sent.question.priority,
            ttft_target_ms=sent.question.ttft_target_ms,
        )

    async def check(name: str, sent: Sent, stream: Generation) -> None:
        assert (await read(stream)).token_ids == sent.answer, name

    async def ask(number: int, client: Sequence[Sent]) -> None:
        for turn, sent in enumerate(client):
            name = f"{number}-{turn}"
            await check(name, sent, await begin(name, sent))

    async with patience(), asyncio.TaskGroup() as group:
        started = [await begin(f"first-{n}", sent) for n, sent in enumerate(model.first)]
        await until(lambda: all(stream.output_tokens for stream in started), "both are running")
        for number, (sent, stream) in enumerate(zip(model.first, started, strict=True)):
            group.create_task(check(f"first-{number}", sent, stream))
        for number, client in enumerate(model.clients):
            group.create_task(ask(number, client))


def check_statistics(combination: Combination, counts: dict[str, Any], model: Model) -> None:
    """Fail if the counters of a combination contradict its values."""
    encode, generate = counts["encode"], counts["generate"]
    keeps = combination["eviction"] != "none"
    raw, brought = model.distinct(brought=combination["features"] == "brought")
    if combination["embeddings"] == "thrashing":
        assert (encode["cache_evictions"] > 0) == keeps
        assert encode["items_encoded"] > raw, "no image was encoded again"
    elif keeps:
        assert (encode["items_encoded"], encode["items_copied"]) == (raw, brought)
    assert (encode["items_copied"] > 0) == (brought > 0)
    assert (encode["cache_preemptions"] > 0) <= (combination["embeddings"] == "thrashing")
    assert generate["preemptions"] > 0, "no request was preempted"
    assert (generate["tokens_cached"] > 0) <= (combination["prefix"] == "on")
    assert (generate["prefix_evictions"] > 0) <= (combination["prefix"] == "on")


async def test_combinations_cover_every_pair() -> None:
    seen = {pair for combination in COMBINATIONS for pair in pairs(combination)}
    wanted = [
        ((one, value), (other, another))
        for one, other in combinations(FACTORS, 2)
        for value in FACTORS[one]
        for another in FACTORS[other]
    ]
    assert seen == set(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH_FAMILY)
async def test_every_combination_of_policies_equals_generate(
    family: str, models: Callable[[str], Model], configure: Callable[..., Config]
) -> None:
    """Cached, thrashing, preempted, sampled, with client embeddings, whatever the policies are."""
    model = models(family)
    steals = 0
    cached: dict[str, list[int]] = defaultdict(list)
    for combination in COMBINATIONS:
        if combination["family"] != family:
            continue
        try:
            counts = await serve(InProcessEngine, combination, model, configure)
        except BaseException as error:
            error.add_note(" ".join(combination.values()))
            raise
        steals += counts["encode"]["cache_preemptions"]
        if combination["prefix"] == "on":
            cached[combination["prefix_eviction"]].append(counts["generate"]["tokens_cached"])
    assert steals > 0, "no embedding was taken for an older request"
    assert mean(cached["none"]) < mean(cached["lru"])


async def serve(
    kind: type[Engine],
    combination: Combination,
    model: Model,
    configure: Callable[..., Config],
    *further: str,
) -> dict[str, Any]:
    """Check the answers of an engine of one combination; return its statistics."""
    memory = f'generate.memory={{use="pinned", tokens={KV_TOKENS}}}'
    settings = settings_of(combination, model.info)
    async with kind(configure(combination["family"], memory, *settings, *further)) as engine:
        await check_answers(engine, model, brought=combination["features"] == "brought")
        await assert_idle(engine)
        counts = engine.statistics()
    check_statistics(combination, counts, model)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH_FAMILY)
async def test_combination_with_rank_processes_equals_generate(
    family: str, models: Callable[[str], Model], configure: Callable[..., Config]
) -> None:
    """The same, with encoder and generator in processes of their own, at their own pace."""
    encoding = "look-ahead" if family == "nano25" else "eager"
    hostile = combination_of(
        f"{encoding} s3-fifo thrashing on priority priority s3-fifo brought {family}"
    )
    await serve(Engine, hostile, models(family), configure)
