"""A sample of the comparison that `python -m tests.parity` makes in full."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parity.__main__ import BEGIN, END, PAGE, SEEING_BEGIN, SEEING_END
from tests.parity.architectures import ARCHITECTURES, FAMILY_SIZES, REFUSED, SAMPLE
from tests.parity.compare import compare, refusal_of
from tests.parity.vision_architectures import (
    VISION_ARCHITECTURES,
    VISION_REFUSED,
    VISION_SAMPLE,
    save_model,
)
from tests.parity.vision_compare import compare_vision
from vsched.errors import CheckpointError
from vsched_workers.plugin import plugin


@pytest.mark.parametrize("name", SAMPLE)
def test_answers_are_those_of_generate(name: str) -> None:
    """In one step, in chunks, after preemptions, and over the blocks of an earlier request."""
    assert compare(name).equal


@pytest.mark.parametrize("name", VISION_SAMPLE)
def test_answers_about_images_are_those_of_generate(name: str) -> None:
    assert compare_vision(name).equal


def test_features_that_cannot_be_given_to_a_model_are_told_before_weights_are_read(
    tmp_path: Path,
) -> None:
    """Its prompts have tokens around images, which get features of their own."""
    save_model("ovis2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="features of its tower for tokens of the text"):
        plugin.inspect(str(tmp_path), dtype="float32", item_tokens_max=0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "attention of its own"),
        ("diffllama", "attend more than once"),
        ("doge", "masks of its own"),
        ("mamba2", "no layer that attends"),
        ("zaya", "a state of a kind that is not known"),
        ("llama4_text", "temperatures"),
    ],
)
def test_what_cannot_be_equal_is_refused_before_weights_are_read(name: str, why: str) -> None:
    assert re.search(why, refusal_of(name))


def test_page_has_a_row_for_every_architecture_and_all_are_equal() -> None:
    compared = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", compared, re.MULTILINE))
    assert set(rows) == {*FAMILY_SIZES, *ARCHITECTURES, *REFUSED}, "run `python -m tests.parity`"
    for name in (*FAMILY_SIZES, *ARCHITECTURES):
        assert re.fullmatch(
            r"(fused|modules|generic)( \| yes){4} \| (yes|one rank) \| yes", rows[name]
        ), name


def test_page_has_a_row_for_every_architecture_that_takes_images_and_all_are_equal() -> None:
    compared = PAGE.read_text().partition(SEEING_BEGIN)[2].partition(SEEING_END)[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", compared, re.MULTILINE))
    wanted = {*FAMILY_SIZES, *VISION_ARCHITECTURES} - {*VISION_REFUSED}
    assert set(rows) == wanted, "run `python -m tests.parity images`"
    for name, found in rows.items():
        path = "fused|modules" if name in FAMILY_SIZES else "generic"
        assert re.fullmatch(rf"({path})( \| yes){{5}}", found), name
