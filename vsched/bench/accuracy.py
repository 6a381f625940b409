"""Accuracy under every setting: one exam, sat greedily by real engines, answers compared item by item."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from PIL import Image

from vsched.bench.exam import Question
from vsched.bench.interval import Share
from vsched.bench.variants import Variant, merged_sets
from vsched.config import load_config
from vsched.engine import Engine
from vsched.errors import CheckpointError, ConfigError, RequestFailed, RequestRefused
from vsched.types import SamplingParams

ANSWER_TOKENS = 16
"""Most tokens of an answer: words and numbers are shorter, so whatever does not end by itself is wrong."""
Advance = Callable[[int], None]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back; `error` says why nothing did."""

    text: str = ""
    token_ids: list[int] = []
    prompt_tokens: int = 0
    error: str = ""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A question that is worth looking at: it was answered wrongly, or other than under the first setting."""

    task: str
    conversation: int
    turn: int
    question: str
    expected: str
    reference: str
    answer: str
    pass_number: int = 1


class TaskAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Right answers of one task, with Wilson's 95 % interval."""

    task: str
    right: int
    total: int
    low: float
    high: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """An exam under one setting.

    Attributes:
        tasks: Of the first pass.
        changed: Answers of any pass that are not those of the first pass of the first setting, token for token.
        image_tokens: Tokens of an image: mean and most.
        tokens_cached: Prompt tokens that the prefix cache spared; `images_encoded` of `images_asked` were encoded.
        impossible: Why no engine could be started so; empty where one could.
    """

    name: str
    summary: str
    sets: list[str]
    clamp: int
    starved: bool
    tasks: list[TaskAccuracy] = []
    changed: list[Item] = []
    wrong: list[Item] = []
    image_tokens: tuple[float, int] = (0.0, 0)
    prompt_tokens: int = 0
    tokens_cached: int = 0
    images_asked: int = 0
    images_encoded: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    impossible: str = ""

    @property
    def share(self) -> Share:
        """Of all tasks together."""
        return Share(sum(one.right for one in self.tasks), sum(one.total for one in self.tasks))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    model: str
    dtype: str
    created: str
    load: float
    clients: int
    questions: int
    outcomes: list[Outcome]


class _Sitting(msgspec.Struct):
    """What one engine gave: answers by pass, in the order of the questions, and its counters after it all."""

    answers: list[list[Answer]]
    image_tokens: list[int]
    statistics: dict[str, Any]
    seconds: float


def is_right(question: Question, answer: Answer) -> bool:
    """Return whether an answer is the expected one; only white space around it is forgiven."""
    return not answer.error and answer.text.strip() == question.expected


def grade(questions: Sequence[Question], answers: Sequence[Answer]) -> list[TaskAccuracy]:
    """Return the accuracy of each task, in the order in which they come."""
    marks: dict[str, list[bool]] = {}
    for question, answer in zip(questions, answers, strict=True):
        marks.setdefault(question.task, []).append(is_right(question, answer))
    grades = []
    for task, rights in marks.items():
        share = Share(sum(rights), len(rights))
        low, high = share.interval
        grades.append(
            TaskAccuracy(task=task, right=share.right, total=share.total, low=low, high=high)
        )
    return grades


def compare(
    questions: Sequence[Question],
    reference: Sequence[Answer],
    passes: Sequence[Sequence[Answer]],
) -> list[Item]:
    """Return every question that some pass answered other than the reference, token for token."""
    return [
        _item(question, before, after, number)
        for number, answers in enumerate(passes, 1)
        for question, before, after in zip(questions, reference, answers, strict=True)
        if (before.token_ids, before.error) != (after.token_ids, after.error)
    ]


def _item(question: Question, before: Answer, after: Answer, number: int = 1) -> Item:
    return Item(
        task=question.task,
        conversation=question.conversation,
        turn=question.turn,
        question=question.text,
        expected=question.expected,
        reference=before.error or before.text,
        answer=after.error or after.text,
        pass_number=number,
    )


def offenders(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the settings that changed an answer and are no clamp."""
    return [one for one in outcomes if one.changed and not one.clamp]


async def measure_accuracy(
    path: str,
    *,
    conversations: Sequence[Sequence[Question]],
    variants: Sequence[Variant],
    own: Sequence[str] = (),
    clients: int,
    begun: Callable[[Variant, int], Advance],
) -> Report:
    """Sit the exam under each setting; the first is what the others are compared with.

    `begun` is told each setting and how many answers it will take, and returns what is told of answers that came.

    Raises:
        CheckpointError, ConfigError: When no engine starts under the first setting. Another that cannot be, such as
            more ranks than the model can be shared by, is reported as impossible.
    """
    questions = list(itertools.chain.from_iterable(conversations))
    outcomes: list[Outcome] = []
    reference: list[Answer] = []
    longest_tokens = 0
    for variant in variants:
        sets = merged_sets(variant, own, path=path, longest_tokens=longest_tokens)
        advance = begun(variant, variant.passes * len(questions))
        facts: dict[str, Any] = {
            "name": variant.name,
            "summary": variant.summary,
            "sets": list(variant.sets),
            "clamp": variant.clamp,
            "starved": variant.starved,
        }
        try:
            sitting = await _sit(sets, conversations, variant.passes, clients, advance)
        except (CheckpointError, ConfigError) as error:
            if not reference:
                raise
            outcomes.append(Outcome(**facts, impossible=str(error)))
            continue
        if not reference:
            reference = sitting.answers[0]
            longest_tokens = ANSWER_TOKENS + max(one.prompt_tokens for one in reference)
        outcomes.append(_outcome(facts, questions, reference, sitting))
    config = load_config(
        None, sets=merged_sets(variants[0], own, path=path, longest_tokens=0), environ={}
    ).config
    return Report(
        model=config.model.served_name,
        dtype=config.model.dtype,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        load=os.getloadavg()[0],
        clients=clients,
        questions=len(questions),
        outcomes=outcomes,
    )


def _outcome(
    facts: dict[str, Any],
    questions: Sequence[Question],
    reference: Sequence[Answer],
    sitting: _Sitting,
) -> Outcome:
    first, tokens = sitting.answers[0], sitting.image_tokens
    generate, passes = sitting.statistics["generate"], len(sitting.answers)
    return Outcome(
        **facts,
        tasks=grade(questions, first),
        changed=compare(questions, reference, sitting.answers),
        wrong=[
            _item(question, before, after)
            for question, before, after in zip(questions, reference, first, strict=True)
            if not is_right(question, after)
        ],
        image_tokens=(sum(tokens) / len(tokens), max(tokens)) if tokens else (0.0, 0),
        prompt_tokens=sum(one.prompt_tokens for answers in sitting.answers for one in answers),
        tokens_cached=generate["tokens_cached"],
        images_asked=passes * sum(len(question.images) for question in questions),
        images_encoded=sitting.statistics["encode"]["items_encoded"],
        preemptions=generate["preemptions"],
        seconds=round(sitting.seconds, 2),
    )


async def _sit(
    sets: Sequence[str],
    conversations: Sequence[Sequence[Question]],
    passes: int,
    clients: int,
    advance: Advance,
) -> _Sitting:
    """Sit the exam `passes` times in one engine."""
    config = load_config(None, sets=sets, environ={}).config
    async with Engine(config) as engine:
        began_s = time.perf_counter()
        answers = [await _ask_all(engine, conversations, clients, advance) for _ in range(passes)]
        return _Sitting(
            answers=answers,
            image_tokens=_image_tokens(engine, conversations),
            statistics=engine.statistics(),
            seconds=time.perf_counter() - began_s,
        )


async def _ask_all(
    engine: Engine,
    conversations: Sequence[Sequence[Question]],
    clients: int,
    advance: Advance,
) -> list[Answer]:
    """Hold so many conversations at a time, the turns of each in order; return all answers in order."""
    answers: list[list[Answer]] = [[] for _ in conversations]
    waiting = iter(zip(conversations, answers, strict=True))

    async def hold() -> None:
        for conversation, own in waiting:
            for question in conversation:
                own.append(await _ask(engine, question))
                advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(hold())
    return list(itertools.chain.from_iterable(answers))


_numbers = itertools.count()


async def _ask(engine: Engine, question: Question) -> Answer:
    try:
        generation = await engine.generate(
            prompt=engine.preprocessor.render(question.messages),
            images=question.images,
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0),
            request_id=f"exam-{next(_numbers)}",
        )
        text: list[str] = []
        token_ids: list[int] = []
        async for delta in generation:
            text.append(delta.text)
            token_ids += delta.token_ids
    except (RequestRefused, RequestFailed) as error:
        return Answer(error=error.message)
    return Answer(text="".join(text), token_ids=token_ids, prompt_tokens=generation.prompt_tokens)


def _image_tokens(engine: Engine, conversations: Sequence[Sequence[Question]]) -> list[int]:
    """Return the tokens of each image, as this engine resizes it."""
    urls = dict.fromkeys(url for questions in conversations for url in questions[-1].images)
    tokens = []
    for url in urls:
        with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
            tokens.append(engine.preprocessor.plan_image(*image.size).tokens)
    return tokens
