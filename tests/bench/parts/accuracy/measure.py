"""Accuracy under every setting: one exam, decoded greedily on real servers, compared question by question."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from PIL import Image

from demo_training.interval import Share
from tests.bench.parts.accuracy.questions import Question
from tests.bench.parts.accuracy.variants import Variant, merged_sets
from vsched.api.server import running_server
from vsched.bench.load.client import BenchClient
from vsched.cli.demo_command import is_answer
from vsched.config import load_config
from vsched.engine import Engine
from vsched.errors import RequestRefused, VschedError

ANSWER_TOKENS = 16
"""Maximum tokens of an answer: right answers are shorter, so longer ones are wrong."""
ANSWER_S = 600.0
"""Timeout of a question."""
Advance = Callable[[int], None]


class ExamAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response; `error` is the reason if there is no answer."""

    text: str = ""
    prompt_tokens: int = 0
    error: str = ""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A question of interest: answered wrongly, or differently than under the first setting."""

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


class VariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """An exam under one setting.

    Attributes:
        tasks: Results of the first pass.
        changed: Answers of any pass that differ from the first pass of the first setting in any
            character.
        failed: Number of questions, over all passes, with an error instead of an answer.
        image_tokens: Mean and maximum tokens of an image.
        tokens_cached: Prompt tokens from the prefix cache; `images_encoded` of `images_asked` were
            encoded.
        impossible: Why no engine could start with this setting; empty if one did.
    """

    name: str
    summary: str
    sets: list[str]
    clamp: int
    starved: bool
    tasks: list[TaskAccuracy] = []
    changed: list[Item] = []
    wrong: list[Item] = []
    failed: int = 0
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
        """Right answers over all tasks."""
        return Share(sum(one.right for one in self.tasks), sum(one.total for one in self.tasks))


class AccuracyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the `--json` report."""

    model: str
    dtype: str
    created: str
    load: float
    clients: int
    questions: int
    outcomes: list[VariantResult]


class _Sitting(msgspec.Struct):
    """Results of one engine: answers by pass, in the order of the questions, and its counters at the end."""

    answers: list[list[ExamAnswer]]
    image_tokens: list[int]
    statistics: dict[str, Any]
    seconds: float


def is_right(question: Question, answer: ExamAnswer) -> bool:
    """Return True if an answer is the expected one, ignoring surrounding white space."""
    return not answer.error and is_answer(answer.text, question.expected)


def grade(questions: Sequence[Question], answers: Sequence[ExamAnswer]) -> list[TaskAccuracy]:
    """Return the accuracy of each task, in order of first occurrence."""
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
    reference: Sequence[ExamAnswer],
    passes: Sequence[Sequence[ExamAnswer]],
) -> list[Item]:
    """Return every question with an answer that differs from the reference in some pass."""
    return [
        _item(question, before, after, number)
        for number, answers in enumerate(passes, 1)
        for question, before, after in zip(questions, reference, answers, strict=True)
        if (before.text, before.error) != (after.text, after.error)
    ]


def _item(question: Question, before: ExamAnswer, after: ExamAnswer, number: int = 1) -> Item:
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


def offenders(outcomes: Sequence[VariantResult]) -> list[VariantResult]:
    """Return the settings with an unanswered question, or with a changed answer and no image token limit."""
    return [one for one in outcomes if one.failed or (one.changed and not one.clamp)]


def undisturbed(report: AccuracyReport) -> list[VariantResult]:
    """Return the settings that should have caused preemptions but caused none: their results mean nothing."""
    return [
        one for one in report.outcomes if one.starved and not one.impossible and not one.preemptions
    ]


async def measure_accuracy(
    path: str,
    *,
    conversations: Sequence[Sequence[Question]],
    variants: Sequence[Variant],
    own: Sequence[str] = (),
    clients: int,
    started: Callable[[Variant, int], Advance],
) -> AccuracyReport:
    """Run the exam under each setting, over HTTP; the first setting is the reference.

    `started` is called with each setting and its number of answers, and returns a callback for the
    number of new answers.

    Raises:
        VschedError: When no server starts under the first setting. Other impossible settings, such
            as more ranks than the model supports, are reported as impossible.
    """
    questions = list(itertools.chain.from_iterable(conversations))
    outcomes: list[VariantResult] = []
    reference: list[ExamAnswer] = []
    longest_tokens = 0
    for variant in variants:
        sets = merged_sets(variant, own, path=path, longest_tokens=longest_tokens)
        advance = started(variant, variant.passes * len(questions))
        facts: dict[str, Any] = {
            "name": variant.name,
            "summary": variant.summary,
            "sets": list(variant.sets),
            "clamp": variant.clamp,
            "starved": variant.starved,
        }
        try:
            sitting = await _sit(sets, conversations, variant.passes, clients, advance)
        except VschedError as error:
            if not reference:
                raise
            outcomes.append(VariantResult(**facts, impossible=str(error)))
            continue
        if not reference:
            reference = sitting.answers[0]
            longest_tokens = ANSWER_TOKENS + max(one.prompt_tokens for one in reference)
        outcomes.append(_outcome(facts, questions, reference, sitting))
    config = load_config(
        None, sets=merged_sets(variants[0], own, path=path, longest_tokens=0), environ={}
    ).config
    return AccuracyReport(
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
    reference: Sequence[ExamAnswer],
    sitting: _Sitting,
) -> VariantResult:
    first, tokens = sitting.answers[0], sitting.image_tokens
    generate, passes = sitting.statistics["generate"], len(sitting.answers)
    return VariantResult(
        **facts,
        tasks=grade(questions, first),
        changed=compare(questions, reference, sitting.answers),
        wrong=[
            _item(question, before, after)
            for question, before, after in zip(questions, reference, first, strict=True)
            if not is_right(question, after)
        ],
        failed=sum(bool(one.error) for answers in sitting.answers for one in answers),
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
    """Run the exam `passes` times on one server."""
    config = load_config(None, sets=[*sets, "server.port=0"], environ={}).config
    async with running_server(config) as running:
        began_s = time.perf_counter()
        desk = _Desk(BenchClient(running.url, timeout_s=ANSWER_S), running.engine.model_name)
        answers = [await _ask_all(desk, conversations, clients, advance) for _ in range(passes)]
        return _Sitting(
            answers=answers,
            image_tokens=_image_tokens(running.engine, conversations),
            statistics=running.engine.statistics(),
            seconds=time.perf_counter() - began_s,
        )


async def _ask_all(
    desk: _Desk,
    conversations: Sequence[Sequence[Question]],
    clients: int,
    advance: Advance,
) -> list[ExamAnswer]:
    """Run `clients` conversations at a time, the turns of each in order; return all answers in order."""
    answers: list[list[ExamAnswer]] = [[] for _ in conversations]
    waiting = iter(zip(conversations, answers, strict=True))

    async def hold() -> None:
        for conversation, own in waiting:
            for question in conversation:
                own.append(await desk.ask(question))
                advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(hold())
    return list(itertools.chain.from_iterable(answers))


class _Desk:
    """Client for questions to one server and model."""

    def __init__(self, client: BenchClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, question: Question) -> ExamAnswer:
        """Return the answer, or the error."""
        body = {
            "model": self._model,
            "messages": question.messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample = await self._client.chat(msgspec.json.encode(body))
        if sample.error is not None:
            return ExamAnswer(error=sample.error)
        return ExamAnswer(text=sample.text, prompt_tokens=sample.prompt_tokens)


def _image_tokens(engine: Engine, conversations: Sequence[Sequence[Question]]) -> list[int]:
    """Return the tokens of each image after resizing by this engine."""
    urls = dict.fromkeys(url for questions in conversations for url in questions[-1].images)
    tokens = []
    for url in urls:
        with (
            Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image,
            contextlib.suppress(RequestRefused),  # reported as refused with its questions
        ):
            tokens.append(engine.preprocessor.plan_image(*image.size).tokens)
    return tokens
