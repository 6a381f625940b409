from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

import pytest
from PIL import Image

from tests.bench.parts.accuracy import (
    CHAINED,
    VARIANTS,
    ExamAnswer,
    Question,
    Result,
    Sitting,
    Variant,
    choose,
    draw_questions,
    grade,
    settings_of,
)
from vsched.checkpoint_tools import CheckpointTools, ExamTurn
from vsched.config import load_config

SIZE = (3, 2)


def picture(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", SIZE, level).save(buffer, "PNG")
    return buffer.getvalue()


class Drawn(CheckpointTools):
    """An examiner whose every picture is another one; "pair" shows two of them, then asks once more."""

    def trained_checkpoint(self) -> str:
        return ""

    def exam_tasks(self) -> Sequence[str]:
        return ("number", "colour", "pair")

    def exam(self, task: str, count: int, *, seed: int = 0) -> list[tuple[ExamTurn, ...]]:
        levels = itertools.count(100 * seed + 10 * self.exam_tasks().index(task))
        if task == "pair":
            return [
                (
                    ExamTurn((picture(next(levels)), picture(next(levels))), "Second?", "two"),
                    ExamTurn((), "First?", "one"),
                )
                for _ in range(count)
            ]
        return [(ExamTurn((picture(next(levels)),), f"{task}?", task),) for _ in range(count)]


def questions(count: int = 2) -> list[list[Question]]:
    return draw_questions(Drawn(), count)


# --- the exam ---


def test_exam_chains_turns_of_several_tasks_with_an_image_each() -> None:
    chains = [turns for turns in questions() if turns[0].task == CHAINED]
    assert [[turn.expected for turn in turns] for turns in chains] == [
        ["number", "colour", "number"],
        ["colour", "number", "colour"],
    ]
    assert [len(turn.images) for turn in chains[0]] == [1, 2, 3]
    alone = {url for turns in questions() if turns[0].task != CHAINED for url in turns[-1].images}
    assert not alone & set(chains[0][-1].images), "a picture of another task is cached already"


# --- grading ---


def answered(requested: Sequence[Question], **wrong: str) -> list[ExamAnswer]:
    return [ExamAnswer(wrong.get(one.task, one.expected), 9) for one in requested]


def graded(variant: Variant, *passes: list[ExamAnswer], preemptions: int = 0) -> Result:
    requested = list(itertools.chain.from_iterable(questions()))
    counters = {"tokens_cached": 5, "preemptions": preemptions}
    statistics = {"generate": counters, "encode": {"items_encoded": 7}}
    given = list(passes) or [answered(requested)]
    return grade(requested, answered(requested), Sitting(variant, given, statistics, 1.0))


def test_answers_that_differ_in_a_character_or_fail_are_faults_in_any_pass() -> None:
    requested = list(itertools.chain.from_iterable(questions()))
    after = answered(requested)
    after[1] = after[1]._replace(text="number ")
    after[2] = ExamAnswer(error="refused")
    result = graded(VARIANTS[0], answered(requested), after)
    assert result.changed == [
        "number 1, turn 1, pass 2: 'number' became 'number '; right is 'number'",
        "colour 0, turn 1, pass 2: 'colour' became 'refused'; right is 'colour'",
    ]
    assert result.fault == "2 changed, 1 without an answer"


def test_only_a_clamp_may_change_answers_and_preemptions_must_be_seen() -> None:
    requested = list(itertools.chain.from_iterable(questions()))
    chunked, starved, clamped = choose(["clamp-6", "chunk-16", "preempted"])[1:]
    wrong = answered(requested, pair="x")
    assert graded(chunked, wrong).fault
    assert not graded(clamped, wrong).fault
    assert graded(starved).fault.startswith("nothing was preempted")
    assert not graded(starved, preemptions=1).fault


# --- settings ---


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.name)
def test_settings_load(variant: Variant) -> None:
    """The command line overrides common settings; a starved cache holds the longest request, in whole blocks."""
    sets = settings_of(variant, ["model.dtype=bfloat16"], "x", 30)
    config = load_config(None, sets=sets, environ={}).config
    assert config.model.dtype == "bfloat16"
    assert config.generate.memory["tokens"] == (32 if variant.starved else 16384)
