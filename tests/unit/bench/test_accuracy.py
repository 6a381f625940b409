from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from PIL import Image

from tests.bench.parts import accuracy
from tests.bench.parts.accuracy import (
    CHAINED,
    REFERENCE,
    UNCLAMPED,
    ExamAnswer,
    Question,
    Sitting,
    Variant,
    VariantResult,
    choose,
    clamped,
    conclusions,
    draw_questions,
    measure_accuracy,
    merged_sets,
)
from vsched.checkpoint_tools import CheckpointTools, ExamTurn
from vsched.config import load_config
from vsched.errors import CheckpointError, ConfigError

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


def test_exam_reports_turns_before_with_their_right_answers() -> None:
    opening, following = questions()[4]
    assert (opening.task, opening.turn, len(opening.images)) == ("pair", 0, 2)
    assert (following.turn, following.images) == (1, opening.images)
    assert [message["role"] for message in following.messages] == ["user", "assistant", "user"]
    assert following.messages[:1] == opening.messages
    assert following.messages[1]["content"] == "two"
    kinds = [part["type"] for part in opening.messages[0]["content"]]
    assert kinds == ["image_url", "image_url", "text"]


def test_exam_chains_turns_of_several_tasks_with_an_image_each() -> None:
    chains = [turns for turns in questions() if turns[0].task == CHAINED]
    assert [[turn.expected for turn in turns] for turns in chains] == [
        ["number", "colour", "number"],
        ["colour", "number", "colour"],
    ]
    assert [len(turn.images) for turn in chains[0]] == [1, 2, 3]
    alone = {url for turns in questions() if turns[0].task != CHAINED for url in turns[-1].images}
    assert not alone & set(chains[0][-1].images), "a picture of another task is cached already"


# --- grading and comparing ---


def answered(requested: Sequence[Question], **wrong: str) -> list[ExamAnswer]:
    texts = [wrong.get(question.task, question.expected) for question in requested]
    return [ExamAnswer(text=text, prompt_tokens=9) for text in texts]


def flat(count: int = 2) -> list[Question]:
    return list(itertools.chain.from_iterable(questions(count)))


def test_grade_counts_by_task_and_forgives_only_white_space() -> None:
    requested = flat()
    assert accuracy.grade(requested, answered(requested, number="number.")) == {
        "number": (0, 2),
        "colour": (2, 2),
        "pair": (4, 4),
        CHAINED: (6, 6),
    }
    assert accuracy.is_right(requested[0], ExamAnswer(text=" number\n"))
    assert not accuracy.is_right(requested[0], ExamAnswer(text="number", error="lost"))


def test_compare_finds_other_answers_in_any_pass_to_the_letter() -> None:
    requested = flat()
    before = answered(requested)
    after = list(before)
    after[1] = msgspec.structs.replace(before[1], text=before[1].text + " ")
    after[2] = ExamAnswer(error="refused")
    found = accuracy.compare(requested, before, [before, after])
    assert [(one.task, one.conversation, one.pass_number) for one in found] == [
        ("number", 1, 2),
        ("colour", 0, 2),
    ]
    assert (found[1].reference, found[1].answer) == ("colour", "refused")


def test_a_change_without_a_clamp_is_a_fault_and_missing_preemptions_are_reported() -> None:
    item = accuracy.compare(flat(1)[:1], answered(flat(1)[:1]), [[ExamAnswer()]])
    chunked, starved = choose(["chunk-16", "preempted"], [])[1:]
    outcomes = [
        VariantResult(variant=REFERENCE),
        VariantResult(variant=chunked, changed=item),
        VariantResult(variant=clamped(4), changed=item),
        VariantResult(variant=starved),
    ]
    assert [one.is_fault for one in outcomes] == [False, True, False, False]
    assert conclusions(outcomes) == [
        "FAILED: chunk-16: 1 changed, 0 without an answer",
        "preempted: nothing was preempted; raise --clients or --count",
        "No answer changed under 2 settings without a clamp.",
    ]


# --- settings ---


def test_choose_keeps_the_reference_first_and_clamps_last() -> None:
    assert [one.name for one in choose(["preempted", "no-cache"], [4, 16, 4])] == [
        "default",
        "no-cache",
        "preempted",
        "clamp-16",
        "clamp-4",
    ]
    assert choose([], [])[0] is REFERENCE
    assert len(choose([], [])) == len(UNCLAMPED) == len({one.name for one in UNCLAMPED})
    with pytest.raises(ConfigError, match="'fly' is not one of default, no-embedding-cache"):
        choose(["fly"], [])


@pytest.mark.parametrize("variant", [*UNCLAMPED, clamped(8)], ids=lambda one: one.name)
def test_settings_load(variant: Any) -> None:
    sets = merged_sets(variant, ["generate.threads=1"], path="x", longest_tokens=30)
    config = load_config(None, sets=sets, environ={}).config
    assert config.model.dtype == "float32"
    assert config.generate.memory["tokens"] == (32 if variant.starved else 16384)
    own = ["model.dtype=bfloat16", "generate.memory.use=auto-profile"]
    if not variant.starved:
        sets = merged_sets(variant, own, path="x", longest_tokens=30)
        config = load_config(None, sets=sets, environ={}).config
        assert config.model.dtype == "bfloat16"
        assert config.generate.memory == {"use": "auto-profile"}


# --- measuring, without engines ---


async def test_measure_compares_all_with_the_first_and_reports_the_impossible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversations = questions()
    requested = flat()
    seen: list[list[str]] = []

    async def sit(
        sets: Sequence[str], _: Any, variant: Variant, clients: int, told: Any
    ) -> Sitting:
        seen.append(list(sets))
        if "generate.tensor_parallel=2" in sets:
            raise CheckpointError("3 heads")
        wrong = {"colour": "x"} if "chunk" in str(sets) else {}
        counters = {
            "generate": {"tokens_cached": 5, "preemptions": 2},
            "encode": {"items_encoded": 7},
        }
        return Sitting([answered(requested, **wrong)] * variant.passes, counters, 1.0)

    monkeypatch.setattr(accuracy, "_sit", sit)
    found = await measure_accuracy(
        "checkpoints/mine",
        conversations=conversations,
        variants=choose(["chunk-16", "tensor-parallel-2", "preempted"], [4]),
        clients=3,
        answered=lambda variant: None,
    )
    by_name = {one.variant.name: one for one in found}
    assert {name: len(one.changed) for name, one in by_name.items()} == {
        "default": 0,
        "chunk-16": 2,
        "tensor-parallel-2": 0,
        "preempted": 0,
        "clamp-4": 0,
    }
    assert [one.answer for one in by_name["chunk-16"].changed] == ["x", "x"]
    assert by_name["tensor-parallel-2"].impossible == "3 heads"
    assert by_name["default"].prompt_tokens == 2 * 9 * len(requested)
    # 9 prompt tokens and the longest answer, in blocks of 4.
    assert 'generate.memory={use="pinned", tokens=28}' in seen[3]
