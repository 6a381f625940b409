"""The table of live streams, and the log-probabilities of their prompts: no stream harms another."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from tests.unit.rank.worker_groups import Text, read
from vsched.aio.streams import (
    ChoiceInputs,
    OutputDelta,
    PromptReport,
    PromptToken,
    StreamTable,
    TokenStream,
)
from vsched.errors import RequestFailed
from vsched.kernel.commands import Finish, RequestTimes
from vsched.kernel.events import Drafted
from vsched.types import FinishReason, SamplingParams
from vsched.wire import GenerateResult, PromptPiece, SlotLogprob

Pairs = Sequence[tuple[int, int]]


class Table:
    """A table of streams `r1`, `r2`, …, numbered so."""

    def __init__(self, count: int, *, logprobs: int | None = None) -> None:
        self.broken: list[str] = []
        self.ends: list[str] = []
        self.end_error: Exception | None = None
        self.streams = StreamTable(self.broken.append)
        self.generations: dict[int, TokenStream] = {}
        for number in range(1, count + 1):
            inputs = ChoiceInputs(
                request_id=f"r{number}",
                prompt_token_ids=[1] * 5,
                sampling=SamplingParams(logprobs=logprobs),
                on_stop=lambda *_: None,
                on_end=partial(self._on_end, f"r{number}"),
            )
            self.generations[number] = TokenStream(inputs, lambda **_: Text())
            self.streams.add(number, self.generations[number])

    def _on_end(self, name: str) -> None:
        self.ends.append(name)
        if self.end_error is not None:
            raise self.end_error

    def emit(self, pairs: Pairs, logprobs: Sequence[SlotLogprob] = ()) -> None:
        """Emit a token for each (number, token), by slot."""
        numbers, tokens = (array("i", column).tobytes() for column in zip(*pairs, strict=True))
        self.streams.emit(GenerateResult(1, tokens, numbers, [], list(logprobs), 0))

    def finish(self, number: int) -> None:
        reason, times = FinishReason.LENGTH, RequestTimes()
        self.streams.finish(Finish(f"r{number}", number, reason, times))

    async def tokens(self, number: int) -> list[int]:
        return await read(self.generations[number])


@pytest.mark.parametrize(
    ("pairs", "first", "second"),
    [
        ([(1, 7), (2, 8), (-1, -1)], [7], [8]),
        ([(2, 8), (1, 7)], [7], [8]),
        ([(1, -1), (2, 0)], [], [0]),
        ([(3, 9), (0, 9), (1, 7)], [7], []),
    ],
    ids=["by slot", "other slots", "no token", "nobody's"],
)
async def test_stream_table_gives_each_stream_its_token(
    pairs: Pairs, first: list[int], second: list[int]
) -> None:
    """By the number of the request; tokens without a stream are dropped."""
    table = Table(2)
    table.emit(pairs)
    for number in (1, 2):
        table.finish(number)
    assert await table.tokens(1) == first
    assert await table.tokens(2) == second
    assert table.ends == ["r1", "r2"]


@pytest.mark.parametrize("finished", [False, True])
async def test_stream_table_reports_no_answer_before_all_of_its_prompt(finished: bool) -> None:
    """Once another choice completes the prompt report, waiting readers are called, even if their choice has ended."""
    table = Table(3)
    report = PromptReport([1] * 3, 0)
    for number in (1, 2):
        table.generations[number].prompt_report = report
    called: list[int] = []
    for number, stream in table.generations.items():
        stream.subscribe(partial(called.append, number))
    table.emit([(2, 8)])
    if finished:
        table.finish(2)
    for start in (1, 2):
        await asyncio.sleep(0)
        assert table.generations[2].take() is None
        called.clear()
        one = array("f", [-1.0]).tobytes()
        table.streams.report([PromptPiece(1, start, one, array("i", [1]).tobytes(), b"", b"")])
    await asyncio.sleep(0)
    assert called == [2]
    delta = table.generations[2].take()
    assert delta is not None
    assert delta.token_ids == [8]


async def test_stream_table_reports_a_failure_before_the_end_of_a_prompt_at_once() -> None:
    table = Table(1)
    table.generations[1].prompt_report = PromptReport([1] * 3, 0)
    table.streams.fail_all("lost", code="stopping")
    with pytest.raises(RequestFailed, match="lost"):
        table.generations[1].take()


async def test_stream_table_gives_the_tokens_of_drafts_one_by_one_with_their_logprobs() -> None:
    """Clients count tokens by events. Broken streams, and readers that iterate, get complete deltas as well."""
    table = Table(2, logprobs=1)
    taken: list[OutputDelta | None] = []
    table.generations[1].subscribe(lambda: taken.append(table.generations[1].take()))
    numbers, tokens = array("i", [2, 1]).tobytes(), array("i", [8, 7]).tobytes()
    logprobs = [SlotLogprob(1, -value, []) for value in (1.0, 2.0, 3.0)]
    drafted = [Drafted(1, 4, [9, 10])]
    result = GenerateResult(1, tokens, numbers, [], logprobs, 0, drafted=drafted)
    table.streams.emit(result)
    await asyncio.sleep(0)
    found = [one for one in taken if one is not None]
    assert [one.token_ids for one in found] == [[7], [9], [10]]
    reported = [[(each.token_id, each.logprob) for each in one.logprobs or ()] for one in found]
    assert reported == [[(7, -1.0)], [(9, -2.0)], [(10, -3.0)]]
    assert table.generations[1].output_tokens == 3
    table.streams.emit(result)
    table.generations[1].subscribe(None)
    table.streams.emit(result)
    table.finish(1)
    table.finish(2)
    assert await table.tokens(2) == [8, 8, 8]
    assert await table.tokens(1) == [10, 7, 9, 10]


async def test_stream_table_is_idle_when_the_last_has_ended() -> None:
    """A drain waits for exactly that, also past an end that raises."""
    table = Table(2)
    table.end_error = RuntimeError("a lease")
    idle = asyncio.ensure_future(table.streams.wait_idle())
    table.emit([(1, 7), (2, 8)])
    assert table.streams.request_ids(9) == ["r1", "r2"]
    assert table.streams.request_ids(1) == ["r1"]
    table.finish(1)
    await asyncio.sleep(0)
    assert not idle.done()
    assert table.streams.request_ids(9) == ["r2"]
    table.finish(2)
    await asyncio.sleep(0)
    assert idle.done()
    assert table.streams.request_ids(9) == []


async def test_stream_table_gives_each_prompt_its_report() -> None:
    """A gap ends the request; reports without a request are dropped."""
    table = Table(3)
    reports = [PromptReport([7, 8], 0), PromptReport([7, 8, 9], 0)]
    for number, report in enumerate(reports, 1):
        table.generations[number].prompt_report = report
    value = b"\0\0\0\0"

    def reported(number: int, start: int) -> PromptPiece:
        return PromptPiece(number, start, value, value, b"", b"")

    table.streams.report([reported(1, 1), reported(2, 2), reported(3, 1), reported(9, 1)])
    assert [one.token_id for one in reports[0].tokens()] == [8]
    assert table.broken == ["r2"]


PROMPT = [7, 8, 9, 10, 11]


def prompt_piece(start: int, count: int, *, top: int = 2, shift: float = 0.0) -> PromptPiece:
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


def prompt_token(at: int, *, top: int = 2) -> PromptToken:
    best = [(at + one, -(at + one) / 8) for one in range(top)]
    return PromptToken(PROMPT[at], -at, at + 1, best)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("cuts", [[4], [1, 3], [2, 1, 1]])
def test_prompt_report_joins_pieces(cuts: list[int], top: int) -> None:
    report = PromptReport(PROMPT, top)
    start = 1
    for count in cuts:
        report.take(prompt_piece(start, count, top=top))
        start += count
    assert list(report.tokens()) == [prompt_token(at, top=top) for at in range(1, 5)]


def test_prompt_report_keeps_earlier_values() -> None:
    """After a loss, chunks begin at position 0 again and may be cut elsewhere."""
    report = PromptReport(PROMPT, 2)
    report.take(prompt_piece(1, 2))
    report.take(prompt_piece(1, 1, shift=0.5))
    report.take(prompt_piece(1, 3, shift=0.5))
    report.take(prompt_piece(4, 1))
    found = list(report.tokens())
    assert [one.logprob for one in found] == [-1, -2, -3.5, -4]


def test_prompt_report_is_read_when_it_is_complete() -> None:
    report = PromptReport(PROMPT, 2)
    report.take(prompt_piece(1, 1))
    with pytest.raises(ValueError, match="position 3 of a prompt is reported before 2"):
        report.take(prompt_piece(3, 1))
    report.take(prompt_piece(2, 2))
    with pytest.raises(ValueError, match="4 of 5 prompt tokens are known"):
        list(report.tokens())
