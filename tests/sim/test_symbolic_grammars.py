from __future__ import annotations

import msgspec
import pytest

from vsched.errors import RequestRefused
from vsched.sim.ranks.symbolic_model import (
    SymbolicGrammars,
    allowed_tokens,
    held_answer,
    next_tokens,
)
from vsched.types import FinishReason

CHOICES = ((20, 21, 30), (20, 21, 31, 40), (22,))


def grammar(*texts: str) -> str:
    return msgspec.json.encode({"choice": texts}).decode()


def test_choice_is_followed_to_its_end() -> None:
    matcher = SymbolicGrammars().matcher(grammar("20 21 30", "20 21 31 40", "22"))
    assert allowed_tokens(matcher.mask) == [20, 22]
    assert matcher.follow([20, 21]) is None
    assert allowed_tokens(matcher.mask) == [30, 31]
    assert matcher.follow([31]) is None
    assert matcher.follow([40]) is FinishReason.STOP


@pytest.mark.parametrize(
    "bad", ["", "[]", grammar(), grammar(""), grammar("x"), grammar("3"), grammar("20", "20 21")]
)
def test_invalid_token_choices_are_refused(bad: str) -> None:
    with pytest.raises(RequestRefused, match="Remedy"):
        SymbolicGrammars().check(bad)


def test_answers_are_held_to_a_choice_and_depend_on_the_prompt() -> None:
    choices = {tuple(held_answer([16, prompt], (), 9, CHOICES)) for prompt in range(16, 60)}
    assert choices == set(CHOICES)
    assert held_answer([16, 17], (), 2, CHOICES) == held_answer([16, 17], (), 9, CHOICES)[:2]
    assert next_tokens(CHOICES, (20, 21)) == [30, 31]
    assert len(held_answer([16, 17], (), 9, ())) == 9
