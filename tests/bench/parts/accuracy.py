"""`python -m tests.bench.parts accuracy`: one held-out question set under every setting, over HTTP.

All settings must leave every answer as it is, except a maximum number of tokens per image. A question is one turn of a
conversation. Earlier turns contain the correct answers instead of the model's: so each question is the same under
every setting, and a changed answer counts once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from demo_training.interval import Share
from vsched.api.server import running_server
from vsched.bench.load.client import BenchClient
from vsched.checkpoint_tools import CheckpointTools, ExamTurn, load_tools
from vsched.cli.demo.exam import data_url, is_answer, user_message
from vsched.config import load_config
from vsched.errors import ConfigError, VschedError
from vsched.terminal.options import JsonOption, SetOption, write_json

ANSWER_TOKENS = 16
"""Maximum tokens of an answer: right answers are shorter, so longer ones are wrong."""
ANSWER_S = 600.0
"""Timeout of a question."""
CHANGES_SHOWN = 5

COMMON = (
    "model.dtype=float32",
    "generate.slots=32",
    'generate.memory={use="pinned", tokens=16384}',
)
"""Common to all settings.

In bfloat16 the last bits of a row's logits depend on its batch, so two almost equally likely
answers may swap, which would hide the effect of a setting. A fixed KV cache size saves every start
the search for one.
"""
BLOCK_TOKENS = 4
"""KV block size for forced preemption: so small that even a short answer needs another block.

The KV cache then holds only the longest request, or a few short ones, while many wait.
"""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A named setting.

    Attributes:
        passes: Number of exam runs in one engine: two for settings of caches, the second with all
            pictures cached.
        clamp: Maximum tokens of an image; 0 for no limit. Only this may change an answer.
        starved: Whether the KV cache is so small that requests must be preempted.
    """

    name: str
    summary: str
    sets: tuple[str, ...] = ()
    passes: int = 1
    clamp: int = 0
    starved: bool = False


def _chunks(tokens: int) -> Variant:
    return Variant(
        name=f"chunk-{tokens}",
        summary=f"prompts cut into chunks of {tokens} tokens, images too",
        sets=(f"generate.chunk_tokens={tokens}",),
    )


REFERENCE = Variant(
    name="default", summary="both caches, chunks of 512, images as chunks need them", passes=2
)
NO_EMBEDDING_CACHE = "encode.eviction.use=none"
NO_PREFIX_CACHE = "generate.prefix_cache=false"
UNCLAMPED = (
    REFERENCE,
    Variant(
        name="no-embedding-cache",
        summary="no embedding outlives its request",
        sets=(NO_EMBEDDING_CACHE,),
        passes=2,
    ),
    Variant(
        name="no-prefix-cache",
        summary="no KV block outlives its request; embeddings do",
        sets=(NO_PREFIX_CACHE,),
        passes=2,
    ),
    Variant(
        name="no-cache",
        summary="neither cache",
        sets=(NO_EMBEDDING_CACHE, NO_PREFIX_CACHE),
        passes=2,
    ),
    _chunks(16),
    _chunks(48),
    Variant(
        name="eager",
        summary="images encoded on arrival; no prefix cache",
        sets=("encode.encoding.use=eager", NO_PREFIX_CACHE),
    ),
    Variant(
        name="combined",
        summary="all images of a request encoded as one; no prefix cache",
        sets=("encode.encoding.use=combined", NO_PREFIX_CACHE),
    ),
    Variant(
        name="tensor-parallel-2",
        summary="two ranks share the model, in both stages",
        sets=("encode.tensor_parallel=2", "generate.tensor_parallel=2"),
    ),
    Variant(
        name="preempted",
        summary=f"a KV cache of the longest request, in blocks of {BLOCK_TOKENS} tokens",
        sets=(f"generate.block_size={BLOCK_TOKENS}",),
        passes=2,
        starved=True,
    ),
)
"""All settings without an image token limit; the first is the reference."""


def clamped(tokens: int) -> Variant:
    """Return the setting with at most `tokens` tokens per image."""
    return Variant(
        name=f"clamp-{tokens}",
        summary=f"at most {tokens} tokens an image",
        sets=(f"encode.admission.max_tokens={tokens}",),
        clamp=tokens,
    )


def choose(names: Sequence[str], clamps: Iterable[int]) -> list[Variant]:
    """Return the named settings, by default all, and the token limits, largest first.

    The reference is always included.

    Raises:
        ConfigError: When a name is unknown.
    """
    known = {variant.name: variant for variant in UNCLAMPED}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--only: {unknown[0]!r} is not one of {', '.join(known)}")
    wanted = [REFERENCE.name, *names] if names else list(known)
    chosen = [variant for name, variant in known.items() if name in wanted]
    return [*chosen, *(clamped(tokens) for tokens in sorted(set(clamps), reverse=True))]


def merged_sets(
    variant: Variant, own: Sequence[str], *, path: str, longest_tokens: int
) -> list[str]:
    """Return all assignments for a setting.

    `own` comes from the command line, `longest_tokens` is the length of the longest request. The
    command line overrides the common settings, and the setting overrides both.
    """
    said = [_key(assignment) for assignment in own]
    common = [
        assignment
        for assignment in COMMON
        if not any(
            key == _key(assignment) or key.startswith(f"{_key(assignment)}.") for key in said
        )
    ]
    sets = [*common, *own, f"model.path={path}", *variant.sets]
    if variant.starved:
        blocks = -(-longest_tokens // BLOCK_TOKENS)
        sets.append(f'generate.memory={{use="pinned", tokens={blocks * BLOCK_TOKENS}}}')
    return sets


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


CHAINED = "conversation"
"""Task name of conversations composed of questions from several tasks."""
CHAINED_TURNS = 3
CHAINED_SEED = 1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation; `messages` and `images` include all earlier turns."""

    task: str
    conversation: int
    turn: int
    text: str
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
            text=turn.question,
            expected=turn.answer,
            messages=messages,
            images=images,
        )
        messages = [*messages, {"role": "assistant", "content": turn.answer}]


class ExamAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response; `error` is the reason if there is no answer."""

    text: str = ""
    prompt_tokens: int = 0
    error: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that differs from that under the first setting."""

    task: str
    conversation: int
    turn: int
    expected: str
    reference: str
    answer: str
    pass_number: int


class VariantResult(msgspec.Struct, frozen=True, kw_only=True):
    """An exam under one setting.

    Attributes:
        tasks: Right answers and number of questions by task, in the first pass.
        changed: Answers of any pass that differ from the first pass of the first setting in any
            character.
        failed: Number of questions, over all passes, with an error instead of an answer.
        tokens_cached: Prompt tokens from the prefix cache; `images_encoded` of `images_asked` were
            encoded.
        impossible: Why no engine could start with this setting; empty if one did.
    """

    variant: Variant
    tasks: dict[str, tuple[int, int]] = {}
    changed: list[Change] = []
    failed: int = 0
    prompt_tokens: int = 0
    tokens_cached: int = 0
    images_asked: int = 0
    images_encoded: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    impossible: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether a question has no answer, or one that differs without a limit on image tokens."""
        return bool(self.failed or (self.changed and not self.variant.clamp))

    @property
    def is_undisturbed(self) -> bool:
        """Whether preemptions that the setting should have caused are missing: its results mean nothing."""
        return self.variant.starved and not self.impossible and not self.preemptions


class Sitting(msgspec.Struct):
    """Results of one engine: answers by pass, in the order of the questions, and its counters at the end."""

    answers: list[list[ExamAnswer]]
    statistics: dict[str, Any]
    seconds: float


def is_right(question: Question, answer: ExamAnswer) -> bool:
    """Return True if an answer is the expected one, ignoring surrounding white space."""
    return not answer.error and is_answer(answer.text, question.expected)


def grade(
    questions: Sequence[Question], answers: Sequence[ExamAnswer]
) -> dict[str, tuple[int, int]]:
    """Return right answers and questions by task, in order of first occurrence."""
    marks: dict[str, list[bool]] = {}
    for question, answer in zip(questions, answers, strict=True):
        marks.setdefault(question.task, []).append(is_right(question, answer))
    return {task: (sum(rights), len(rights)) for task, rights in marks.items()}


def compare(
    questions: Sequence[Question],
    reference: Sequence[ExamAnswer],
    passes: Sequence[Sequence[ExamAnswer]],
) -> list[Change]:
    """Return every answer that differs from the reference in some pass."""
    return [
        Change(
            task=question.task,
            conversation=question.conversation,
            turn=question.turn,
            expected=question.expected,
            reference=before.error or before.text,
            answer=after.error or after.text,
            pass_number=number,
        )
        for number, answers in enumerate(passes, 1)
        for question, before, after in zip(questions, reference, answers, strict=True)
        if (before.text, before.error) != (after.text, after.error)
    ]


async def measure_accuracy(
    path: str,
    *,
    conversations: Sequence[Sequence[Question]],
    variants: Sequence[Variant],
    own: Sequence[str] = (),
    clients: int,
    answered: Callable[[Variant], None],
) -> list[VariantResult]:
    """Run the exam under each setting; the first is the reference. `answered` is called for each answer.

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
        try:
            sitting = await _sit(sets, conversations, variant, clients, answered)
        except VschedError as error:
            if not reference:
                raise
            outcomes.append(VariantResult(variant=variant, impossible=str(error)))
            continue
        if not reference:
            reference = sitting.answers[0]
            longest_tokens = ANSWER_TOKENS + max(one.prompt_tokens for one in reference)
        every = list(itertools.chain.from_iterable(sitting.answers))
        generate = sitting.statistics["generate"]
        outcomes.append(
            VariantResult(
                variant=variant,
                tasks=grade(questions, sitting.answers[0]),
                changed=compare(questions, reference, sitting.answers),
                failed=sum(bool(one.error) for one in every),
                prompt_tokens=sum(one.prompt_tokens for one in every),
                tokens_cached=generate["tokens_cached"],
                images_asked=variant.passes * sum(len(one.images) for one in questions),
                images_encoded=sitting.statistics["encode"]["items_encoded"],
                preemptions=generate["preemptions"],
                seconds=round(sitting.seconds, 2),
            )
        )
    return outcomes


async def _sit(
    sets: Sequence[str],
    conversations: Sequence[Sequence[Question]],
    variant: Variant,
    clients: int,
    answered: Callable[[Variant], None],
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
                    answered(variant)

        passes = []
        for _ in range(variant.passes):
            answers: list[list[ExamAnswer]] = [[] for _ in conversations]
            waiting = iter(zip(conversations, answers, strict=True))
            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(hold(waiting))
            passes.append(list(itertools.chain.from_iterable(answers)))
        return Sitting(passes, running.engine.statistics(), time.perf_counter() - began_s)


async def _ask(client: BenchClient, model: str, question: Question) -> ExamAnswer:
    body = {
        "model": model,
        "messages": question.messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = await client.chat(msgspec.json.encode(body))
    if sample.error is not None:
        return ExamAnswer(error=sample.error)
    return ExamAnswer(text=sample.text, prompt_tokens=sample.prompt_tokens)


def accuracy(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Folder of the checkpoint; the trained one of the repository."),
    ] = "",
    assignments: SetOption = None,
    count: Annotated[int, typer.Option(min=1, help="Conversations per task.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 32,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A limit on image tokens.", show_default="24, 12, 6"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A setting next to the first, in place of all.", show_default="all"),
    ] = None,
    out: JsonOption = None,
) -> None:
    """Ask a server one held-out question set under every setting.

    Exits with 1 if a setting other than an image token limit changed an answer, if a question got
    no answer, or if a setting meant to cause preemptions caused none.
    """
    console = Console(width=None if Console().is_terminal else 200, highlight=False)
    own = assignments or []
    variants = choose(only or [], (budget or []) if only else (budget or [24, 12, 6]))
    plugin = load_config(None, sets=own, environ={}).config.generate.plugin
    examiner = load_tools(plugin, "exam_tasks", path="generate.plugin")
    path = checkpoint or examiner.trained_checkpoint()
    if not path:
        raise ConfigError("CHECKPOINT is missing. Remedy: give a folder, or run from a clone")
    conversations = draw_questions(examiner, count)
    with Progress(console=console, transient=True) as progress:
        total = sum(map(len, conversations))
        tasks = {
            one.name: progress.add_task(one.name, total=total * one.passes) for one in variants
        }
        outcomes = asyncio.run(
            measure_accuracy(
                path,
                conversations=conversations,
                variants=variants,
                own=own,
                clients=clients,
                answered=lambda one: progress.advance(tasks[one.name]),
            )
        )
    show(outcomes, console)
    if out is not None:
        write_json(out, {"load": os.getloadavg()[0], "questions": total, "outcomes": outcomes})
    if any(one.is_fault or one.is_undisturbed for one in outcomes):
        raise typer.Exit(1)


def show(outcomes: Sequence[VariantResult], console: Console) -> None:
    """Print the table, the first changes of each setting, and the conclusions."""
    table = Table(title="right answers, % (Wilson's 95 % interval)", title_justify="left")
    columns = [*outcomes[0].tasks, "changed", "failed", "cached", "encoded", "preempted", "s"]
    for name in ("setting", *columns):
        table.add_column(name, no_wrap=True)
    for one in outcomes:
        table.add_row(
            one.variant.name,
            *(Share(*right).text() for right in one.tasks.values()),
            *(str(len(one.changed)), str(one.failed)),
            f"{100 * one.tokens_cached / max(one.prompt_tokens, 1):.0f} %",
            f"{one.images_encoded}/{one.images_asked}",
            *(str(one.preemptions), f"{one.seconds:.1f}"),
        )
    console.print(table)
    for one in outcomes:
        for item in one.changed[:CHANGES_SHOWN]:
            where = f"{one.variant.name}: {item.task} {item.conversation}, turn {item.turn + 1}"
            said = (
                f"{item.reference[:24]!r} became {item.answer[:24]!r}; right is {item.expected!r}"
            )
            console.print(f"{where}: {said}", markup=False)
    for line in conclusions(outcomes):
        console.print(line, markup=False)


def conclusions(outcomes: Sequence[VariantResult]) -> list[str]:
    """Return the conclusions from the figures, and their limits."""
    lines = []
    for one in outcomes:
        if one.impossible:
            lines.append(f"{one.variant.name}: not possible: {one.impossible}")
        if one.is_undisturbed:
            lines.append(f"{one.variant.name}: nothing was preempted; raise --clients or --count")
        if one.is_fault:
            lines.append(
                f"FAILED: {one.variant.name}: {len(one.changed)} changed, {one.failed} without an answer"
            )
    same = [one for one in outcomes if not (one.changed or one.variant.clamp or one.impossible)]
    return [*lines, f"No answer changed under {len(same)} settings without a clamp."]
