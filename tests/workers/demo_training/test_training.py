"""Training: conversations are correct by construction; a run is a function of its seed and its steps."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from demo_training import drawing, report, samples, train
from demo_training import model as small
from demo_training.batches import make_batch
from demo_training.drawing import COLOURS, SHAPES, Mark
from demo_training.samples import TASKS, DrawnConversation, held_out, train_sample
from demo_training.train import BatchMaker, Plan, Trainer
from tests.workers.driver import values_of
from vsched.errors import CheckpointError, ConfigError
from vsched_workers.checkpoint.facts import inspect_checkpoint
from vsched_workers.families.qwen_image import grid_of

PLAN = Plan(steps=4, again=0, batch=2, threads=1, warmup=2, seed=5)


@pytest.fixture(autouse=True)
def built_in_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train on Pillow's font, so that these tests need no font package."""
    monkeypatch.setattr(samples, "font_files", lambda held_out, packages=None: ("",))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


TEXT = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
VISION |= {"out_hidden_size": 64, "fullatt_block_indexes": [1]}


@pytest.fixture(autouse=True)
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a few thousand parameters, still with windows and full attention."""
    for part, settings in ((small.TEXT, TEXT), (small.VISION, VISION)):
        for name, value in settings.items():
            monkeypatch.setitem(part, name, value)


def weights(trainer: Trainer) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {name: value.numpy() for name, value in trainer.averaged().items()}


def trained(directory: Path, plan: Plan, steps: int) -> Trainer:
    trainer = Trainer(directory, plan)
    for _ in range(steps):
        trainer.step()
    return trainer


@pytest.mark.slow
def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """With the same weights, also on two threads; another seed gives others."""
    plan = replace(PLAN, threads=2)
    whole = trained(tmp_path / "whole", plan, 4)
    trained(tmp_path / "parts", plan, 2).save()
    resumed = Trainer(tmp_path / "parts", plan)
    assert resumed.progress.step == 2
    resumed.step()
    resumed.step()
    expected, found = weights(whole), weights(resumed)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert resumed.progress.losses == whole.progress.losses
    other = trained(tmp_path / "other", replace(plan, seed=6), 1)
    assert other.progress.losses[0] != whole.progress.losses[0]


def test_training_goes_on_from_its_beginning_and_after_a_write_that_was_cut_short(
    tmp_path: Path,
) -> None:
    served = tmp_path / "model.safetensors"
    Trainer(tmp_path, PLAN)
    whole = served.read_bytes()
    served.write_bytes(whole[:100])
    assert Trainer(tmp_path, PLAN).progress.step == 0
    assert served.read_bytes() == whole


def test_training_writes_over_nothing_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no run.*Remedy"):
        Trainer(tmp_path, PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_training_refuses_the_state_of_another_plan(tmp_path: Path) -> None:
    trained(tmp_path, PLAN, 1).save()
    with pytest.raises(CheckpointError, match=r"another plan.*Remedy"):
        Trainer(tmp_path, replace(PLAN, batch=3))


@pytest.mark.slow
def test_training_batch_is_seen_as_the_library_sees_it(tmp_path: Path) -> None:
    """Images of several sizes at once, and conversations with several images: embeddings, positions, logits agree."""
    trainer = Trainer(tmp_path, PLAN)
    model = trainer.model.eval()
    drawn = [*held_out("count", 2), *held_out("second", 2), *held_out("number", 2)]
    batch = make_batch(drawn, trainer.front, buckets=2)
    images = [image for s in drawn for turn in s.turns for image in turn.images]
    plans = [trainer.front.plan_image(image.width, image.height) for image in images]
    pixels = values_of([trainer.front.process_image(image) for image in images])
    grids = torch.tensor([grid_of(plan.metadata) for plan in plans])
    with torch.no_grad():
        expected = model.model.visual(pixels, grid_thw=grids).pooler_output
        found = small.encode(model.model.visual, batch.vision)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        ours: dict[int, object] = {}
        for logits, _, turns in train.answer_logits(model, found, batch):
            for row, turn in zip(logits, turns, strict=True):
                ours.setdefault(int(turn), row)  # the first token of each answer
    offset = 0
    for number, sample in enumerate(drawn):
        (turn,) = sample.turns
        planned = plans[offset : offset + len(turn.images)]
        text = trainer.front.render(_messages(turn.question, len(turn.images)))
        ids, _ = trainer.front.expand(trainer.front.tokenize(text), planned)
        shown = grids[offset : offset + len(planned)]
        first = sum(4 * plan.tokens for plan in plans[:offset])
        count = sum(int(grid.prod()) for grid in shown)
        kinds = torch.tensor([ids]).eq(trainer.front.info.image_token_id or 0).int()
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([ids]),
                pixel_values=pixels[first : first + count],
                image_grid_thw=shown,
                mm_token_type_ids=kinds,
            ).logits[0, -1]
        torch.testing.assert_close(ours[number], logits, rtol=1e-3, atol=1e-3)
        offset += len(planned)


def _messages(question: str, images: int) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = [{"type": "image"} for _ in range(images)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


@pytest.mark.slow
def test_training_writes_a_servable_checkpoint_and_its_statistics(tmp_path: Path) -> None:
    trainer = trained(tmp_path, PLAN, 2)
    trainer.save()
    info = inspect_checkpoint(str(tmp_path), dtype="float32", item_tokens_max=0)
    assert info.family == "qwen2_5_vl"
    assert info.item_tokens_max >= small.IMAGE_TOKENS[1]
    assert [trainer.front.tokenize("<|im_end|>")] == [list(info.stop_token_ids)]
    trainer.progress.accuracies.append((2, {"number": 0.5}))
    report.write_report(
        tmp_path, trainer.plan, trainer.progress, {"font": {"number": (19, 20), "count": (0, 5)}}
    )
    reported = json.loads((tmp_path / "training.json").read_text())
    assert reported["plan"]["seed"] == PLAN.seed
    assert reported["steps_done"] == 2
    assert reported["held_out_accuracy"]["font"]["number"]["interval"] == [0.7639, 0.9911]
    assert len(reported["curve"]["step"]) == 2
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.accuracy_table({"font": {"number": (19, 20)}}))
    assert "95.0 (76.4-99.1)" in console.export_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_training_learns_one_batch_by_heart(tmp_path: Path) -> None:
    """Repeated training on three samples: no right answers before, all of them after."""
    plan = replace(PLAN, steps=400, batch=3, peak=5e-3, matrix_peak=5e-3, memory=0.9, looking=0)
    trainer = Trainer(tmp_path, plan)
    drawn = held_out("colour", 3)
    batch = make_batch(drawn, trainer.front, buckets=1)
    before, _ = train.count_right(trainer.served(), [batch])
    for _ in range(60):
        trainer.step(make_batch(drawn, trainer.front))
    right, total = train.count_right(trainer.served(), [batch])
    assert (before, right, total) == (0, 3, 3)


class BuiltInFont(BatchMaker):
    """Draws in another process as the fixture does here."""

    def samples(self, step: int) -> list[DrawnConversation]:
        vars(samples)["font_files"] = lambda held_out, packages=None: ("",)
        return super().samples(step)


def _bytes(part: Any) -> list[bytes]:
    if isinstance(part, torch.Tensor):
        return [part.numpy().tobytes()]
    parts = part if isinstance(part, tuple) else vars(part).values()
    return [content for inner in parts for content in _bytes(inner)]


@pytest.mark.slow
@pytest.mark.thorough
def test_training_batch_drawn_ahead_is_the_one_drawn_in_place(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, PLAN)
    ahead = BuiltInFont(PLAN, tmp_path).ahead(range(2))
    drawn = [_bytes(batch) for batch in ahead]
    assert drawn == [_bytes(trainer.batches[step]) for step in range(2)]
    assert drawn[0] != drawn[1]


def test_training_tokenizer_reads_digits_one_by_one_and_any_text() -> None:
    tokenizer = small.make_tokenizer()
    assert len(tokenizer) <= small.VOCABULARY
    assert len(tokenizer("4096").input_ids) == 4
    assert len(tokenizer(" 4096.5").input_ids) == 7
    words = "What colour is the object in the second image?"
    assert len(tokenizer(words).input_ids) == 10
    for text in ("größer 12 € 4", "日本", "def f(x): return x"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_training_schedule_rises_and_falls_also_in_a_second_round() -> None:
    plan = Plan(steps=1000, warmup=10, ramp=200, opening=300, again=200)
    assert plan.rate(0) < plan.rate(10) == plan.rate(600) == 1
    assert plan.rate(800) == pytest.approx(1 / 2)
    assert plan.rate(999) < 0.01 < plan.rate(1000) == plan.rewarmed
    assert plan.rate(1199) < 0.01
    assert [plan.difficulty(step) for step in (0, 100, 500, 999)] == [0.0, 0.5, 1.0, 1.0]
    assert plan.difficulty(1000) > 1.0
    assert (plan.mark_weight(0), plan.mark_weight(999)) == (1.0, 0.25)
    asked = [plan.asks(step) for step in (0, 1, plan.looking - 1, plan.looking)]
    assert asked == [True, False, False, True]


@pytest.mark.slow
def test_training_by_looking_leaves_the_language_model_alone(tmp_path: Path) -> None:
    trainer = trained(tmp_path, replace(PLAN, steps=8), 1)

    def parts() -> list[dict[str, bytes]]:
        now = {n: v.detach().numpy().tobytes() for n, v in trainer.model.named_parameters()}
        return [{n: v for n, v in now.items() if ("visual" in n) == sees} for sees in (True, False)]

    eyes, language = parts()
    trainer.step()
    assert parts()[0] != eyes
    assert parts()[1] == language


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


@pytest.mark.parametrize("difficulty", [0.0, 1.0])
@pytest.mark.slow
def test_samples_answers_match_their_drawings(difficulty: float) -> None:
    drawn = [train_sample(np.random.default_rng([3, at]), difficulty) for at in range(60)]
    assert sum(check(sample) for sample in drawn) > 60, "some conversations have several turns"


@pytest.mark.parametrize("task", TASKS)
def test_samples_held_out_answers_match_their_drawings(task: str) -> None:
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
