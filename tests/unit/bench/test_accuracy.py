"""Commands of `tests.bench`: which changed answers are faults, the settings that are compared, and the kernel."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from tests.bench import kernel
from tests.bench.parts.accuracy import (
    VARIANTS,
    ExamAnswer,
    Question,
    Result,
    Sitting,
    Variant,
    grade,
    settings_of,
)
from vsched.config import load_config

QUESTIONS = [
    Question(task=task, conversation=number, turn=0, expected=task, messages=[], images=[""])
    for task, number in (("number", 0), ("number", 1), ("colour", 0), ("pair", 0))
]


def answered(**wrong: str) -> list[ExamAnswer]:
    return [ExamAnswer(wrong.get(one.task, one.expected), 9) for one in QUESTIONS]


def graded(variant: Variant, *passes: Sequence[ExamAnswer], preemptions: int = 0) -> Result:
    counters = {"tokens_cached": 5, "preemptions": preemptions}
    statistics = {"generate": counters, "encode": {"items_encoded": 7}}
    given = [list(one) for one in passes] or [answered()]
    return grade(QUESTIONS, answered(), Sitting(variant, given, statistics, 1.0))


def test_answers_that_differ_in_a_character_or_fail_are_faults_in_any_pass() -> None:
    after = answered()
    after[1] = after[1]._replace(text="number ")
    after[2] = ExamAnswer(error="refused")
    result = graded(VARIANTS[0], answered(), after)
    assert result.changed == [
        "number 1, turn 1, pass 2: 'number' became 'number '; right is 'number'",
        "colour 0, turn 1, pass 2: 'colour' became 'refused'; right is 'colour'",
    ]
    assert result.fault == "2 changed, 1 without an answer"


def test_only_a_clamp_may_change_answers_and_preemptions_must_be_seen() -> None:
    known = {variant.name: variant for variant in VARIANTS}
    chunked, starved, clamped = (known[name] for name in ("chunk-16", "preempted", "clamp-6"))
    wrong = answered(pair="x")
    assert graded(chunked, wrong).fault
    assert not graded(clamped, wrong).fault
    assert graded(starved).fault.startswith("nothing was preempted")
    assert not graded(starved, preemptions=1).fault


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.name)
def test_settings_load(variant: Variant) -> None:
    """The command line overrides common settings; a starved cache holds the longest request, in whole blocks."""
    sets = settings_of(variant, ["model.dtype=bfloat16"], "x", 30)
    config = load_config(None, sets=sets, environ={}).config
    assert config.model.dtype == "bfloat16"
    assert config.generate.memory["tokens"] == (32 if variant.starved else 16384)


def test_the_command_prints_a_table_and_how_far_a_kernel_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    options = "--replicas 2 1 --running 1 --events 2 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["kernel", *options.split()])
    kernel.main(lines.append)
    assert [line.split("|")[1].strip() for line in lines[1:3]] == ["1", "2"]
    assert "One core drives" in lines[-1]
