"""The generate worker against transformers' own generate, on checkpoints of both families."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.driver import Driver, Question, Running, Stage, drawn_image
from tests.workers.reference import Reference

Stages = Callable[..., Stage]
References = Callable[[str], Reference]


def crowd() -> list[Question]:
    """Return questions of none to three images of different sizes."""
    return [
        Question("What is in the image?", [drawn_image(1, 90, 60)]),
        Question("How many objects are there in the picture? Answer with a single word."),
        Question(
            "Compare the two images.",
            [drawn_image(2, 64, 64), drawn_image(3, 200, 70), drawn_image(4, 31, 150)],
        ),
        Question("", [drawn_image(5, 140, 140)]),
    ]


def expected(stage: Stage, reference: Reference, questions: list[Question]) -> list[list[int]]:
    return [
        reference.generate(stage.prompt(question)[0], question.images, question.count)
        for question in questions
    ]


def outputs(running: list[Running]) -> list[list[int]]:
    return [each.output for each in running]


@pytest.mark.parametrize("chunk", [5, 48, 1000])
@pytest.mark.parametrize("attention", ["exact", "auto"])
def test_step_equals_generate(
    stages: Stages, references: References, size: str, chunk: int, attention: str
) -> None:
    """E19, E4: chunks that split images, packed and mixed with decode, give the tokens of `generate`."""
    stage = stages(size, attention)
    questions = crowd()
    found = Driver(stage, chunk=chunk, seed=chunk).run(questions, arrivals=2)
    assert outputs(found) == expected(stage, references(size), questions)
