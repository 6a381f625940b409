"""Exam questions, drawn before any measurement starts.

A question is one turn of a conversation. Earlier turns contain the correct answers instead of the
model's: so each question is the same under every setting, and a changed answer counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from vsched.checkpoint_tools import CheckpointTools, ExamTurn
from vsched.cli.demo_command import data_url, user_message

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
