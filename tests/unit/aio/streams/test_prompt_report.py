"""Log-probabilities of a prompt, from pieces that arrive in order, repeatedly, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from vsched.aio.streams import PromptReport, PromptToken
from vsched.wire import PromptPiece

TOKENS = [7, 8, 9, 10, 11]


def piece(start: int, count: int, *, top: int = 2, shift: float = 0.0) -> PromptPiece:
    """A report on `count` positions, whose values follow from the positions."""
    at = np.arange(start, start + count)
    best = at[:, None] + np.arange(top)
    return PromptPiece(
        number=1,
        start=start,
        logprobs=(-at - shift).astype(np.float32).tobytes(),
        ranks=(at + 1).astype(np.int32).tobytes(),
        top_ids=best.astype(np.int32).tobytes(),
        top_logprobs=(-best / 8).astype(np.float32).tobytes(),
    )


def reported(at: int, *, top: int = 2) -> PromptToken:
    best = [(at + one, -(at + one) / 8) for one in range(top)]
    return PromptToken(TOKENS[at], -at, at + 1, best)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("cuts", [[4], [1, 3], [2, 1, 1]])
def test_prompt_report_joins_pieces(cuts: list[int], top: int) -> None:
    report = PromptReport(TOKENS, top)
    start = 1
    for count in cuts:
        report.take(piece(start, count, top=top))
        start += count
    assert list(report.tokens()) == [reported(at, top=top) for at in range(1, 5)]


def test_prompt_report_keeps_earlier_values() -> None:
    """After a loss, chunks begin at position 0 again and may be cut elsewhere."""
    report = PromptReport(TOKENS, 2)
    report.take(piece(1, 2))
    report.take(piece(1, 1, shift=0.5))
    report.take(piece(1, 3, shift=0.5))
    report.take(piece(4, 1))
    found = list(report.tokens())
    assert [one.logprob for one in found] == [-1, -2, -3.5, -4]


def test_prompt_report_refuses_a_gap() -> None:
    report = PromptReport(TOKENS, 2)
    report.take(piece(1, 1))
    with pytest.raises(ValueError, match="position 3 of a prompt is told of before 2"):
        report.take(piece(3, 1))


def test_prompt_report_is_read_when_it_is_whole() -> None:
    report = PromptReport(TOKENS, 2)
    report.take(piece(1, 3))
    with pytest.raises(ValueError, match="4 of 5 prompt tokens are known"):
        list(report.tokens())


def test_prompt_report_of_one_token_has_nothing_to_tell() -> None:
    assert list(PromptReport([7], 2).tokens()) == []
