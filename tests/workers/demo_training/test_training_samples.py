"""The training conversations of the small model: correct by construction, the same for the same seed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from demo_training import drawing, samples
from demo_training.drawing import COLOURS, SHAPES, Mark
from demo_training.samples import TASKS, DrawnConversation, held_out, train_sample
from vsched.errors import ConfigError


@pytest.fixture
def built_in_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on Pillow's font, so that these tests need no font package."""
    monkeypatch.setattr(samples, "font_files", lambda held_out, packages=None: ("",))


def expected(question: str, seen: list[tuple[Mark, ...]]) -> str:
    """Answer a question from the drawn marks, independent of the code that wrote the answer."""
    text = question.lower()
    place = 0 if "the first" in text and "digit" not in text else 1 if "second" in text else -1
    marks = seen[place]
    if marks[0].slot >= 0:
        number = "".join(str(mark.value) for mark in sorted(marks, key=lambda mark: mark.slot))
        if "many" in text:
            return str(len(number))
        if "digit" in text:
            return number[0] if "first" in text else number[-1]
        return number
    if "many" in text or "count" in text:
        return str(len(marks))
    (mark,) = marks
    colour, shape = list(COLOURS)[mark.value], SHAPES[mark.shape]
    if "describe" in text or "what is in" in text:
        return f"{colour} {shape}"
    # "What is the shape of the red object?" asks for a shape, "the colour of the star" for a colour.
    return colour if "colour" in text else shape


def check(sample: DrawnConversation) -> int:
    seen: list[tuple[Mark, ...]] = []
    for turn in sample.turns:
        assert len(turn.images) == len(turn.marks)
        seen += turn.marks
        assert turn.answer == expected(turn.question, seen), (turn.question, seen)
    return len(sample.turns)


@pytest.mark.usefixtures("built_in_fonts")
@pytest.mark.parametrize("difficulty", [0.0, 1.0])
@pytest.mark.slow
def test_samples_answers_say_what_was_drawn(difficulty: float) -> None:
    drawn = [train_sample(np.random.default_rng([3, at]), difficulty) for at in range(60)]
    assert sum(check(sample) for sample in drawn) > 60, "some conversations have several turns"


@pytest.mark.parametrize("task", TASKS)
def test_samples_held_out_answers_say_what_was_drawn(task: str) -> None:
    for sample in held_out(task, 5):
        assert sample.task == task
        check(sample)


@pytest.mark.slow
def test_samples_held_out_vary() -> None:
    """Numbers have three to six digits, counts go to nine."""
    answers = [sample.turns[0].answer for sample in held_out("number", 40)]
    assert {len(answer) for answer in answers} == {3, 4, 5, 6}
    assert all(re.fullmatch("[1-9][0-9]+", answer) for answer in answers)
    counts = {sample.turns[0].answer for sample in held_out("count", 80)}
    assert counts == {str(count) for count in range(1, 10)}


def test_drawing_marks_lie_in_the_picture_from_left_to_right() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        marks = drawing.draw_number(rng, "123456", ("",), 1.0).marks
        assert [mark.slot for mark in marks] == list(range(6))
        across = [mark.x for mark in marks]
        assert across == sorted(across)
        assert all(0 < mark.x < 1 and 0 < mark.y < 1 for mark in marks)


def test_drawing_a_mark_lies_on_its_object() -> None:
    """The pixel under the mark of a filled object has the object's colour."""
    rng = np.random.default_rng(6)
    for colour, paint in COLOURS.items():
        picture = drawing.draw_objects(rng, [(colour, "circle")], 0.0)
        (mark,) = picture.marks
        x, y = int(mark.x * picture.image.width), int(mark.y * picture.image.height)
        pixel = picture.image.getpixel((x, y))
        assert isinstance(pixel, tuple)
        assert max(abs(int(a) - b) for a, b in zip(pixel, paint, strict=True)) <= 16


def test_drawing_objects_do_not_touch() -> None:
    rng = np.random.default_rng(7)
    picture = drawing.draw_objects(rng, [("red", "circle")] * 9, 1.0)
    width, height = picture.image.size
    places = [(mark.x * width, mark.y * height) for mark in picture.marks]
    nearest = min(
        (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2
        for index, a in enumerate(places)
        for b in places[:index]
    )
    assert nearest > (2 * 6) ** 2


def test_fonts_held_out_are_not_trained_on() -> None:
    trained = {name for names in drawing.TRAINING_FONTS.values() for name in names}
    unseen = {name for names in drawing.HELD_OUT_FONTS.values() for name in names}
    assert not trained & unseen
    assert not set(drawing.TRAINING_FONTS) & set(drawing.HELD_OUT_FONTS)


def test_fonts_for_the_demo_need_no_package() -> None:
    assert drawing.font_files(held_out=True, packages=(drawing.BUILT_IN_FONT,)) == ("",)


def test_fonts_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drawing.TRAINING_FONTS, "no_such_fonts", ("A.ttf",))
    drawing.font_files.cache_clear()
    with pytest.raises(ConfigError, match=r"no_such_fonts.*pip install 'vsched\[training\]'"):
        drawing.font_files(held_out=False, packages=("no_such_fonts",))
