"""Conversations about generated pictures, for training the small model and measuring its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from PIL import Image

from demo_training.drawing import (
    BUILT_IN_FONT,
    COLOURS,
    DIGITS_MAX,
    OBJECTS_MAX,
    SHAPES,
    Mark,
    Picture,
    draw_number,
    draw_objects,
    draw_page,
    font_files,
)

TASKS = ("number", "colour", "shape", "count", "second")

READ = (
    "What number is in the image?",
    "Read the number.",
    "What number is this?",
    "Which number do you see?",
    "What is the number in the picture?",
    "Please read the number in the image.",
)
FIRST_DIGIT = ("What is the first digit?", "Which digit comes first?")
LAST_DIGIT = ("What is the last digit?", "Which digit comes last?")
LENGTH = ("How many digits are there?", "How many digits does the number have?")
COLOUR = (
    "What colour is the object?",
    "What colour is it?",
    "Which colour do you see?",
    "Name the colour of the object in the image.",
    "What is the colour of the {shape}?",
)
SHAPE = (
    "What shape is the object?",
    "What shape is it?",
    "Which shape do you see?",
    "Name the shape in the image.",
    "What is the shape of the {colour} object?",
)
DESCRIBE = ("Describe the object.", "What is in the image?")
COUNT = (
    "How many objects are there?",
    "How many {shapes} are there?",
    "Count the objects in the image.",
    "How many {shapes} do you see?",
)
WHICH_NUMBER = (
    "What number is in the {which} image?",
    "Read the number in the {which} picture.",
)
WHICH_COLOUR = (
    "What colour is the object in the {which} image?",
    "What is the colour of the {which} object?",
)
WHICH_SHAPE = (
    "What shape is the object in the {which} image?",
    "What is the shape of the {which} object?",
)
PLURALS = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """A question, the images shown before it, and its answer.

    Attributes:
        marks: The contents of each image; used in training only.
    """

    images: tuple[Image.Image, ...]
    question: str
    answer: str
    marks: tuple[tuple[Mark, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnConversation:
    """A conversation of one task."""

    task: str
    turns: tuple[DrawnTurn, ...]


_Asked: TypeAlias = dict[str, tuple[tuple[str, ...], str]]
"""Question wordings and answer by task."""


@dataclass
class _Scene:
    """A picture and the questions that may be asked about it."""

    picture: Picture
    requested: _Asked = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


def _shown(turn: DrawnTurn, pictures: Sequence[Picture]) -> DrawnTurn:
    """Return the turn with these pictures shown before its question."""
    images = tuple(picture.image for picture in pictures)
    return replace(turn, images=images, marks=tuple(picture.marks for picture in pictures))


class _Author:
    """Generates samples from one random stream."""

    def __init__(self, rng: np.random.Generator, fonts: tuple[str, ...], difficulty: float) -> None:
        self.rng = rng
        self.fonts = fonts
        self.difficulty = difficulty

    def pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(self.rng.integers(len(choices)))]

    def grown(self, least: int, most: int) -> int:
        """Return a limit that grows with the difficulty, up to 1."""
        return least + round((most - least) * min(1.0, self.difficulty))

    def number(self, least: int) -> _Scene:
        most = self.grown(2, DIGITS_MAX)
        length = int(self.rng.integers(min(least, most), most + 1))
        text = "".join(str(digit) for digit in self.rng.integers(0, 10, size=length))
        if length > 1 and text[0] == "0":
            text = str(self.rng.integers(1, 10)) + text[1:]
        picture = draw_number(self.rng, text, self.fonts, self.difficulty)
        requested: _Asked = {
            "number": (READ, text),
            "first": (FIRST_DIGIT, text[0]),
            "last": (LAST_DIGIT, text[-1]),
            "length": (LENGTH, str(length)),
        }
        return _Scene(picture, requested)

    def thing(self) -> _Scene:
        colour, shape = self.pick(tuple(COLOURS)), self.pick(SHAPES)
        requested: _Asked = {
            "colour": (COLOUR, colour),
            "shape": (SHAPE, shape),
            "describe": (DESCRIBE, f"{colour} {shape}"),
        }
        picture = draw_objects(self.rng, [(colour, shape)], self.difficulty)
        return _Scene(picture, requested, {"shape": shape, "colour": colour})

    def things(self) -> _Scene:
        most = self.grown(3, OBJECTS_MAX)
        count = int(self.rng.integers(1, most + 1))
        shape, colour = self.pick(SHAPES), self.pick(tuple(COLOURS))
        alike = self.rng.random() < 0.5
        objects = [(colour if alike else self.pick(tuple(COLOURS)), shape) for _ in range(count)]
        picture = draw_objects(self.rng, objects, self.difficulty)
        requested: _Asked = {"count": (COUNT, str(count))}
        return _Scene(picture, requested, {"shapes": PLURALS[shape], "shape": shape})

    def turn(self, scene: _Scene, task: str, *, show: bool) -> DrawnTurn:
        wordings, answer = scene.requested[task]
        question = self.pick(wordings).format(**scene.words)
        return _shown(DrawnTurn((), question, answer), [scene.picture] if show else [])

    def one_image(self, scene: _Scene, tasks: list[str]) -> DrawnConversation:
        turns = [self.turn(scene, task, show=index == 0) for index, task in enumerate(tasks)]
        return DrawnConversation(tasks[0], tuple(turns))

    def pair(self, *, turns: int) -> DrawnConversation:
        """Write questions about the first or the second of two images; the opening one is about the second."""
        makers: list[Callable[[], _Scene]] = [self.thing, lambda: self.number(3)]
        kind = int(self.rng.integers(2))
        other = kind if self.rng.random() < 0.8 else 1 - kind
        scenes = [makers[other](), makers[kind]()]
        pictures = [scene.picture for scene in scenes]
        written: list[DrawnTurn] = []
        for index in range(turns):
            requested = self.which(scenes, 1 if index == 0 else int(self.rng.integers(2)))
            written.append(_shown(requested, pictures if index == 0 else []))
        return DrawnConversation("second", tuple(written))

    def which(self, scenes: Sequence[_Scene], place: int) -> DrawnTurn:
        """Ask about the first or the second of the images so far."""
        scene = scenes[place]
        choices = {"number": WHICH_NUMBER, "colour": WHICH_COLOUR, "shape": WHICH_SHAPE}
        task = self.pick(tuple(name for name in choices if name in scene.requested))
        question = self.pick(choices[task]).format(which=("first", "second")[place])
        return DrawnTurn((), question, scene.requested[task][1])

    def conversation(self, turns: int) -> DrawnConversation:
        """Write turns with an image each; a later one may ask about an earlier image instead."""
        scenes: list[_Scene] = []
        written: list[DrawnTurn] = []
        for _ in range(turns):
            kind = int(self.rng.integers(3))
            makers: list[Callable[[], _Scene]] = [lambda: self.number(3), self.thing, self.things]
            scene = makers[kind]()
            earlier = [
                place for place, known in enumerate(scenes[:2]) if "count" not in known.requested
            ]
            scenes.append(scene)
            if earlier and self.rng.random() < 0.3:
                place = earlier[int(self.rng.integers(len(earlier)))]
                show = [scene.picture] if self.rng.random() < 0.5 else []
                if not show:
                    scenes.pop()
                written.append(_shown(self.which(scenes, place), show))
            else:
                task = ("number", self.pick(("colour", "shape")), "count")[kind]
                written.append(self.turn(scene, task, show=True))
        return DrawnConversation("conversation", tuple(written))

    def shuffled(self, tasks: tuple[str, ...], count: int) -> list[str]:
        order = self.rng.permutation(len(tasks))[:count]
        return [tasks[index] for index in order]


def train_sample(rng: np.random.Generator, difficulty: float) -> DrawnConversation:
    """Write a training conversation; difficulty goes from 0 (short, large, plain) to 1, or slightly above."""
    author = _Author(rng, font_files(held_out=False), difficulty)
    kind = rng.random()
    if kind < 0.42:
        extra = author.shuffled(("first", "last", "length"), int(rng.integers(0, 3)))
        tasks = ["number", *extra]
        if rng.random() < 0.3:
            tasks.reverse()
        return author.one_image(author.number(1 if rng.random() < 0.2 else 3), tasks)
    if kind < 0.55:
        tasks = author.shuffled(("colour", "shape", "describe"), int(rng.integers(2, 4)))
        return author.one_image(author.thing(), tasks)
    if kind < 0.77:
        return author.one_image(author.things(), ["count"])
    if kind < 0.90:
        return author.pair(turns=int(rng.integers(1, 4)))
    return author.conversation(int(rng.integers(2, 4)))


def looking_samples(rng: np.random.Generator, difficulty: float) -> list[DrawnConversation]:
    """Draw pictures without a question: pages of digits, and some numbers and objects."""
    author = _Author(rng, font_files(held_out=False), difficulty)
    pictures = [draw_page(rng, author.fonts, difficulty) for _ in range(14)]
    pictures += [author.number(3).picture for _ in range(5)]
    pictures += [author.thing().picture for _ in range(2)]
    pictures += [author.things().picture for _ in range(3)]
    return [
        DrawnConversation("looking", (_shown(DrawnTurn((), "", ""), [picture]),))
        for picture in pictures
    ]


def page_sample(rng: np.random.Generator, difficulty: float) -> DrawnConversation:
    """Draw one page of digits, without a question."""
    picture = draw_page(rng, font_files(held_out=False), difficulty)
    return DrawnConversation("looking", (_shown(DrawnTurn((), "", ""), [picture]),))


def held_out(
    task: str, count: int, *, seed: int = 0, packages: tuple[str, ...] = (BUILT_IN_FONT,)
) -> list[DrawnConversation]:
    """Write questions of one task in fonts that are not used for training; deterministic.

    Args:
        task: One of `TASKS`.
        count: Number of samples; a smaller count gives the beginning of a larger one.
        seed: Another seed gives other pictures.
        packages: Of `drawing.HELD_OUT_FONTS`; the default needs nothing besides Pillow.
    """
    fonts = font_files(held_out=True, packages=packages)
    samples = []
    for index in range(count):
        # Four parts: a seed of training has two.
        rng = np.random.default_rng([seed, TASKS.index(task), index, 0x7E57])
        author = _Author(rng, fonts, 1.0)
        if task == "number":
            samples.append(author.one_image(author.number(3), ["number"]))
        elif task == "count":
            samples.append(author.one_image(author.things(), ["count"]))
        elif task == "second":
            samples.append(author.pair(turns=1))
        else:
            samples.append(author.one_image(author.thing(), [task]))
    return samples
