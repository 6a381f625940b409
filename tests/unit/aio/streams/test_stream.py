"""From tokens to deltas: stop strings, merging, one end; and the table of live streams: no stream harms another."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.patience import patience
from tests.unit.rank.worker_groups import Text, read
from vsched.aio.streams import (
    ChoiceInputs,
    OutputDelta,
    PromptReport,
    PromptToken,
    StopMatcher,
    StreamTable,
    TokenLogprob,
    TokenStream,
)
from vsched.errors import RequestFailed
from vsched.kernel.commands import Finish, RequestTimes
from vsched.kernel.events import Drafted
from vsched.types import FinishReason, SamplingParams
from vsched.wire import GenerateResult, PromptPiece, SlotLogprob


@pytest.mark.parametrize(
    "stops", [("STOP",), ("\n\n", "###"), ("aba", "bab"), ("tw", "e\n two"), ("n", "one")]
)
def test_stop_matcher_gives_the_same_however_the_text_is_cut(stops: tuple[str, ...]) -> None:
    """The stop string that is complete first counts, even if several overlap."""
    text = "one\n two ## aab STO ab STOP three ### abab \n\n four"
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    expected = text[: min(ends)[1]]
    for size in range(1, len(text)):
        matcher = StopMatcher(stops)
        out = ""
        for start in range(0, len(text), size):
            piece, stopped = matcher.push_text(text[start : start + size])
            out += piece
            if stopped:
                break
        assert out == expected


class Letters:
    """Token n is the n-th letter; 99 is half a character, which is held back."""

    def __init__(self) -> None:
        self._half = False

    def push(self, token_ids: Sequence[int]) -> str:
        self._half = token_ids[-1] == 99
        return "".join(chr(97 + token) for token in token_ids if token < 26)

    def flush(self) -> str:
        return "?" if self._half else ""


class Made:
    """A stream, and its calls to its replica."""

    def __init__(self, *, stop_token_ids: frozenset[int] = frozenset(), **sampling: Any) -> None:
        self.stops: list[tuple[str, FinishReason]] = []
        self.ends = 0
        inputs = ChoiceInputs(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(**sampling),
            stop_token_ids=stop_token_ids,
            on_stop=lambda *stop: self.stops.append(stop),
            on_end=self._on_end,
        )
        self.stream = TokenStream(inputs, lambda **_: Letters())

    def _on_end(self) -> None:
        self.ends += 1

    def push(self, *tokens: int) -> None:
        for token in tokens:
            self.stream.push_token(token, None)

    def finish(
        self, reason: FinishReason = FinishReason.LENGTH, *, message: str = "", code: str = ""
    ) -> None:
        times = RequestTimes(cached_tokens=2)
        self.stream.push_finish(Finish("r", 1, reason, times, message, code))

    async def read(self) -> list[OutputDelta]:
        async with patience():
            return [delta async for delta in self.stream]


async def test_generation_merges_tokens_that_come_faster_than_they_are_read() -> None:
    made = Made()
    made.push(0, 1, 2)
    delta = await anext(made.stream)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", [0, 1, 2], None)
    made.push(3)
    made.finish()
    assert await made.read() == [OutputDelta("d", [3], finish_reason="length")]
    assert (made.stream.output_tokens, made.stream.cached_tokens) == (4, 2)


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
async def test_generation_one_by_one_has_equal_deltas_however_fast_they_come(at_once: int) -> None:
    """Each delta has one token with its text and log-probability; the last has the held-back text, and the end."""
    made = Made(stop=("ex",), logprobs=1, stop_token_ids=frozenset({9}))
    made.stream.one_by_one()
    tokens = [0, 1, 4, 2, 4, 9]
    found: list[OutputDelta] = []
    for index, token in enumerate(tokens, 1):
        made.stream.push_token(token, TokenLogprob(token, -1.0, []))
        if index == len(tokens):
            made.finish(FinishReason.STOP)
        if index % at_once == 0:
            while (delta := made.stream.take()) is not None:
                found.append(delta)
    assert [one.text for one in found] == ["a", "b", "", "ec", "", "e"]
    assert [one.token_ids for one in found] == [[token] for token in tokens]
    assert [one.logprobs for one in found] == [[TokenLogprob(token, -1.0, [])] for token in tokens]
    assert [one.finish_reason for one in found] == [None] * 5 + ["stop"]


ONE, BC = frozenset({1}), ("bc",)
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


@pytest.mark.parametrize(
    ("options", "tokens", "ended", "expected"),
    [
        # The text ends before the stop string, or with it, or with the text of the stop token; none counts after it.
        ({"stop": BC}, [0, 1, 2, 3], STOP, ("a", 3, "stop", "bc")),
        ({"stop": BC, "include_stop": True}, [0, 1, 2, 3], ABORT, ("abc", 3, "abort", "bc")),
        ({"stop_token_ids": ONE, "include_stop": True}, [0, 1], STOP, ("ab", 2, "stop", None)),
        # A stop token is counted and not shown.
        ({"stop_token_ids": ONE}, [0, 1], STOP, ("a", 2, "stop", None)),
        # The last permitted token completes a stop string.
        ({"stop": BC}, [0, 1, 2], LENGTH, ("a", 3, "stop", "bc")),
        # The detokenizer held the stop string back.
        ({"stop": ("?",)}, [0, 99], LENGTH, ("a", 2, "stop", "?")),
    ],
)
async def test_generation_ends_its_text_at_the_stop_string(
    options: dict[str, Any],
    tokens: list[int],
    ended: FinishReason,
    expected: tuple[str, int, str, str | None],
) -> None:
    """The replica is informed of a stop string, once."""
    made = Made(**options)
    made.push(*tokens)
    assert made.stops == [("r", STOP)] * (options.get("stop") == BC)
    made.finish(ended)
    (delta,) = await made.read()
    text, count, reason, stop_string = expected
    assert (delta.text, delta.finish_reason, delta.stop_string) == (text, reason, stop_string)
    assert delta.token_ids == tokens[:count]
    assert made.stream.output_tokens == count
    assert made.stream.reason == reason


@pytest.mark.parametrize(
    ("min_tokens", "tokens", "text"),
    [(0, 1, ""), (1, 2, "a"), (3, 4, "abc"), (4, 5, "ab"), (9, 5, "abcab")],
)
async def test_generation_stops_after_min_tokens(min_tokens: int, tokens: int, text: str) -> None:
    """As in vLLM: the token that completes a stop string must come after the first `min_tokens`."""
    made = Made(stop=("a", "b", "cab"), min_tokens=min_tokens)
    made.push(*(0, 1, 2, 0, 1)[:tokens])
    stopped = len(text) < tokens
    assert bool(made.stops) is stopped
    made.finish()
    (delta,) = await made.read()
    assert (delta.text, delta.finish_reason) == (text, "stop" if stopped else "length")


async def test_generation_held_text_goes_out_at_the_end() -> None:
    """The beginning of a stop string that was never completed, and half a character."""
    made = Made(stop=("bcd",))
    made.push(0, 1, 2)
    assert (await anext(made.stream)).text == "a"
    made.push(99)
    made.finish()
    assert "".join(delta.text for delta in await made.read()) == "bc?"


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        (FinishReason.ERROR, "encode_failed", 500),
        (FinishReason.ERROR, "grammar_failed", 400),
        (ABORT, "cleared", 503),
        (ABORT, "stopping", 503),
    ],
)
async def test_error_reaches_the_reader(reason: FinishReason, code: str, status: int) -> None:
    made = Made()
    made.push(0)
    made.finish(reason, message="why", code=code)
    with pytest.raises(RequestFailed, match="why") as caught:
        await anext(made.stream)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert await made.read() == []
    assert made.ends == 1


async def test_generation_abort_asks_once_it_matters() -> None:
    """Leaving frees the resources of the request; after its end there is nothing to free."""
    made = Made()
    made.push(0)
    made.stream.abort()
    made.finish(ABORT)
    made.stream.abort()
    assert made.stops == [("r", ABORT)]
    assert [delta.finish_reason for delta in await made.read()] == ["abort"]


async def test_generation_has_exactly_one_end() -> None:
    """A second terminal reply is a programming error; tokens after the first are dropped."""
    made = Made()
    made.finish()
    made.push(0)
    with pytest.raises(AssertionError, match="two terminal replies"):
        made.finish()
    assert await made.read() == [OutputDelta("", [], finish_reason="length")]
    assert await made.read() == []
    assert made.ends == 1


@pytest.mark.parametrize("reason", [LENGTH, STOP])
async def test_generation_of_a_prompt_alone_has_no_output(reason: FinishReason) -> None:
    """The token sampled at the end of every prompt is dropped, even if it is a stop token."""
    made = Made(stop=("a",), stop_token_ids=frozenset({0}), logprobs=1, prompt_only=True)
    made.push(0)
    made.finish(reason)
    (delta,) = await made.read()
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", [], [])
    assert (delta.finish_reason, made.stream.output_tokens, made.ends) == ("length", 0, 1)
    assert not made.stops


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
        self.streams.deliver_step(GenerateResult(1, tokens, numbers, [], list(logprobs), 0))

    def finish(self, number: int) -> None:
        reason, times = FinishReason.LENGTH, RequestTimes()
        self.streams.deliver_finish(Finish(f"r{number}", number, reason, times))

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
async def test_stream_table_sorts_tokens(pairs: Pairs, first: list[int], second: list[int]) -> None:
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
        piece = PromptPiece(1, start, one, array("i", [1]).tobytes(), b"", b"")
        table.streams.deliver_report([piece])
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
    table.streams.deliver_step(result)
    await asyncio.sleep(0)
    found = [one for one in taken if one is not None]
    assert [one.token_ids for one in found] == [[7], [9], [10]]
    reported = [[(each.token_id, each.logprob) for each in one.logprobs or ()] for one in found]
    assert reported == [[(7, -1.0)], [(9, -2.0)], [(10, -3.0)]]
    assert table.generations[1].output_tokens == 3
    table.streams.deliver_step(result)
    table.generations[1].subscribe(None)
    table.streams.deliver_step(result)
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

    table.streams.deliver_report([reported(1, 1), reported(2, 2), reported(3, 1), reported(9, 1)])
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


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("cuts", [[4], [1, 3], [2, 1, 1]])
def test_prompt_report_joins_pieces(cuts: list[int], top: int) -> None:
    report = PromptReport(PROMPT, top)
    start = 1
    for count in cuts:
        report.add_piece(prompt_piece(start, count, top=top))
        start += count
    assert list(report.tokens()) == [
        PromptToken(PROMPT[at], -at, at + 1, [(at + one, -(at + one) / 8) for one in range(top)])
        for at in range(1, 5)
    ]


def test_prompt_report_keeps_earlier_values() -> None:
    """After a loss, chunks begin at position 0 again and may be cut elsewhere."""
    report = PromptReport(PROMPT, 2)
    report.add_piece(prompt_piece(1, 2))
    report.add_piece(prompt_piece(1, 1, shift=0.5))
    report.add_piece(prompt_piece(1, 3, shift=0.5))
    report.add_piece(prompt_piece(4, 1))
    found = list(report.tokens())
    assert [one.logprob for one in found] == [-1, -2, -3.5, -4]


def test_prompt_report_is_read_when_it_is_complete() -> None:
    report = PromptReport(PROMPT, 2)
    report.add_piece(prompt_piece(1, 1))
    with pytest.raises(ValueError, match="position 3 of a prompt is reported before 2"):
        report.add_piece(prompt_piece(3, 1))
    report.add_piece(prompt_piece(2, 2))
    with pytest.raises(ValueError, match="4 of 5 prompt tokens are known"):
        list(report.tokens())
