"""`python -m tests.bench.parts accuracy`: one held-out question set under every setting, over HTTP.

All settings must leave every answer as it is, except a maximum number of tokens per image. A question is one turn of a
conversation. Earlier turns contain the correct answers instead of the model's: so each question is the same under
every setting, and a changed answer counts once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from demo_training.interval import Share
from vsched.api.server import running_server
from vsched.bench.load.client import BenchClient, chat_body
from vsched.checkpoint_tools import CheckpointTools, ExamTurn, load_tools
from vsched.cli.demo_command import data_url, is_answer, user_message
from vsched.config import load_config
from vsched.errors import ConfigError
from vsched.terminal.options import SetOption

ANSWER_TOKENS = 16
"""Maximum tokens of an answer: right answers are shorter, so longer ones are wrong."""
ANSWER_S = 600.0
"""Timeout of a question."""
CHANGES_SHOWN = 5
BLOCK_TOKENS = 4
"""KV block size for forced preemption: so small that even a short answer needs another block.

The KV cache then holds only the longest request, or a few short ones, while many wait.
"""
COMMON = (
    "model.dtype=float32",
    "generate.slots=32",
    'generate.memory={use="pinned", tokens=16384}',
)
"""Common to all settings; the command line overrides them.

In bfloat16 the last bits of a row's logits depend on its batch, so two almost equally likely answers may swap, which
would hide the effect of a setting. A fixed KV cache size saves every start the search for one.
"""


class Variant(NamedTuple):
    """A setting of the server.

    `passes` is the number of exams in one engine: two for caches, the second with all pictures cached. If it is
    `starved`, the KV cache is so small that requests must be preempted. Only a `clamp`, a maximum number of tokens of
    an image, may change an answer.
    """

    name: str
    sets: tuple[str, ...]
    passes: int = 1
    starved: bool = False
    clamp: bool = False


NO_EMBEDDING_CACHE = "encode.eviction.use=none"
NO_PREFIX_CACHE = "generate.prefix_cache=false"
VARIANTS = (
    Variant("default", (), passes=2),  # the reference
    Variant("no-embedding-cache", (NO_EMBEDDING_CACHE,), passes=2),
    Variant("no-prefix-cache", (NO_PREFIX_CACHE,), passes=2),
    Variant("no-cache", (NO_EMBEDDING_CACHE, NO_PREFIX_CACHE), passes=2),
    *(Variant(f"chunk-{tokens}", (f"generate.chunk_tokens={tokens}",)) for tokens in (16, 48)),
    Variant("eager", ("encode.encoding.look_ahead_chunks=100", NO_PREFIX_CACHE)),
    Variant("tensor-parallel-2", ("encode.tensor_parallel=2", "generate.tensor_parallel=2")),
    Variant("preempted", (f"generate.block_size={BLOCK_TOKENS}",), passes=2, starved=True),
    *(
        Variant(f"clamp-{tokens}", (f"encode.admission.max_tokens={tokens}",), clamp=True)
        for tokens in (24, 12, 6)
    ),
)


def settings_of(variant: Variant, own: Sequence[str], path: str, longest_tokens: int) -> list[str]:
    """Return the assignments of a variant; a starved one has room for the longest request."""
    sets = [*COMMON, *own, f"model.path={path}", *variant.sets]
    if variant.starved:
        tokens = -(-longest_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        sets.append(f'generate.memory={{use="pinned", tokens={tokens}}}')
    return sets


CHAINED = "conversation"
"""Task name of conversations composed of questions from several tasks."""
CHAINED_TURNS = 3
CHAINED_SEED = 1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation; `messages` and `images` include all earlier turns."""

    task: str
    conversation: int
    turn: int
    expected: str
    messages: list[dict[str, Any]]
    images: list[str]


def draw_questions(examiner: CheckpointTools, count: int) -> list[list[Question]]:
    """Return conversations as questions: `count` per task, and as many with mixed tasks and images."""
    drawn = [(task, examiner.exam(task, count)) for task in examiner.exam_tasks()]
    drawn.append((CHAINED, draw_chains(examiner, count)))
    return [
        list(_questions(task, number, conversation))
        for task, conversations in drawn
        for number, conversation in enumerate(conversations)
    ]


def draw_chains(examiner: CheckpointTools, count: int) -> list[tuple[ExamTurn, ...]]:
    """Return conversations in which each turn has its own image and another task than the previous turn."""
    pools = [examiner.exam(task, count, seed=CHAINED_SEED) for task in examiner.exam_tasks()]
    # Questions about "the first image" would change their meaning in a conversation with more
    # images.
    plain = [pool for pool in pools if all(len(turns[0].images) == 1 for turns in pool)]
    return [
        tuple(plain[(number + turn) % len(plain)][number][0] for turn in range(CHAINED_TURNS))
        for number in range(count if plain else 0)
    ]


def _questions(task: str, number: int, conversation: Sequence[ExamTurn]) -> Iterator[Question]:
    messages: list[dict[str, Any]] = []
    images: list[str] = []
    for index, turn in enumerate(conversation):
        images = [*images, *map(data_url, turn.images)]
        messages = [*messages, user_message(turn)]
        yield Question(
            task=task,
            conversation=number,
            turn=index,
            expected=turn.answer,
            messages=messages,
            images=images,
        )
        messages = [*messages, {"role": "assistant", "content": turn.answer}]


class ExamAnswer(NamedTuple):
    """A response; `error` is the reason if there is no answer."""

    text: str = ""
    prompt_tokens: int = 0
    error: str = ""


class Sitting(NamedTuple):
    """Results of one engine: answers by pass, in the order of the questions, and its counters at the end."""

    variant: Variant
    answers: list[list[ExamAnswer]]
    statistics: dict[str, Any]
    seconds: float


class Result(NamedTuple):
    """An exam under one setting.

    Attributes:
        tasks: Right answers and number of questions by task, in the first pass.
        changed: Answers of any pass that differ from the first pass of the first setting in any character.
        failed: Number of questions, over all passes, with an error instead of an answer.
        fault: What is wrong; a limit on image tokens may change answers.
    """

    tasks: dict[str, tuple[int, int]]
    changed: list[str]
    failed: int
    fault: str


def grade(questions: Sequence[Question], reference: Sequence[ExamAnswer], sat: Sitting) -> Result:
    """Compare the answers with the right ones, and with those under the first setting."""
    marks: dict[str, list[bool]] = {}
    for question, answer in zip(questions, sat.answers[0], strict=True):
        right = not answer.error and is_answer(answer.text, question.expected)
        marks.setdefault(question.task, []).append(right)
    changed = [
        f"{question.task} {question.conversation}, turn {question.turn + 1}, pass {number}: "
        f"{(before.error or before.text)[:24]!r} became {(after.error or after.text)[:24]!r}; "
        f"right is {question.expected!r}"
        for number, answers in enumerate(sat.answers, 1)
        for question, before, after in zip(questions, reference, answers, strict=True)
        if (before.text, before.error) != (after.text, after.error)
    ]
    failed = sum(bool(one.error) for answers in sat.answers for one in answers)
    fault = ""
    if failed or (changed and not sat.variant.clamp):
        fault = f"{len(changed)} changed, {failed} without an answer"
    elif sat.variant.starved and not sat.statistics["generate"]["preemptions"]:
        fault = "nothing was preempted; raise --clients or --count"
    tasks = {task: (sum(rights), len(rights)) for task, rights in marks.items()}
    return Result(tasks, changed, failed, fault)


async def sit(
    sets: Sequence[str], conversations: Sequence[Sequence[Question]], variant: Variant, clients: int
) -> Sitting:
    """Run all passes of the exam on one server, `clients` conversations at a time."""
    config = load_config(None, sets=[*sets, "server.port=0"], environ={}).config
    async with running_server(config) as running:
        began_s = time.perf_counter()
        client = BenchClient(running.url, timeout_s=ANSWER_S)

        async def hold(waiting: Iterator[tuple[Sequence[Question], list[ExamAnswer]]]) -> None:
            for conversation, own in waiting:
                for question in conversation:
                    own.append(await _ask(client, running.engine.model_name, question))

        passes = []
        for _ in range(variant.passes):
            answers: list[list[ExamAnswer]] = [[] for _ in conversations]
            waiting = iter(zip(conversations, answers, strict=True))
            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(hold(waiting))
            passes.append(list(itertools.chain.from_iterable(answers)))
        seconds = time.perf_counter() - began_s
        return Sitting(variant, passes, running.engine.statistics(), seconds)


async def _ask(client: BenchClient, model: str, question: Question) -> ExamAnswer:
    sample = await client.chat(chat_body(model, question.messages, ANSWER_TOKENS, {}))
    if sample.error is not None:
        return ExamAnswer(error=sample.error)
    return ExamAnswer(sample.text, sample.prompt_tokens)


def accuracy(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder of the checkpoint; the trained one of the repository.")
    ] = "",
    assignments: SetOption = None,
    count: Annotated[int, typer.Option(min=1, help="Conversations per task.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 32,
) -> None:
    """Ask a server one held-out question set under every setting.

    Exits with 1 if a setting other than an image token limit changed an answer, if a question got
    no answer, or if a setting meant to cause preemptions caused none.
    """
    console = Console(width=None if Console().is_terminal else 200, highlight=False)
    own = assignments or []
    plugin = load_config(None, sets=own, environ={}).config.generate.plugin
    examiner = load_tools(plugin, "exam_tasks", path="generate.plugin")
    path = checkpoint or examiner.trained_checkpoint()
    if not path:
        raise ConfigError("CHECKPOINT is missing. Remedy: give a folder, or run from a clone")
    conversations = draw_questions(examiner, count)
    questions = list(itertools.chain.from_iterable(conversations))
    tasks = dict.fromkeys(question.task for question in questions)
    names = ("setting", *tasks, "changed", "failed", "cached", "encoded", "preempted", "s")
    table = Table(*names, title="right answers, % (Wilson's 95 % interval)")
    results: dict[str, Result] = {}
    reference: list[ExamAnswer] = []
    images = sum(len(one.images) for one in questions)
    for variant in VARIANTS:
        console.print(f"{variant.name} …")
        longest = ANSWER_TOKENS + max((one.prompt_tokens for one in reference), default=0)
        sets = settings_of(variant, own, path, longest)
        sat = asyncio.run(sit(sets, conversations, variant, clients))
        reference = reference or sat.answers[0]
        result = results[variant.name] = grade(questions, reference, sat)
        generate, encode = sat.statistics["generate"], sat.statistics["encode"]
        prompt_tokens = sum(one.prompt_tokens for answers in sat.answers for one in answers)
        table.add_row(
            variant.name,
            *(Share(*right).text() for right in result.tasks.values()),
            *(str(len(result.changed)), str(result.failed)),
            f"{100 * generate['tokens_cached'] / max(prompt_tokens, 1):.0f} %",
            f"{encode['items_encoded']}/{images * variant.passes}",
            *(str(generate["preemptions"]), f"{sat.seconds:.1f}"),
        )
    console.print(table)
    for name, result in results.items():
        for change in result.changed[:CHANGES_SHOWN]:
            console.print(f"{name}: {change}", markup=False)
        if result.fault:
            console.print(f"FAILED: {name}: {result.fault}", markup=False)
    if any(result.fault for result in results.values()):
        raise typer.Exit(1)
