"""From tokens to deltas: stop strings across tokens, merging, and one end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.patience import patience
from vsched.aio.streams import ChoiceInputs, OutputDelta, StopMatcher, TokenLogprob, TokenStream
from vsched.errors import RequestFailed
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams


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
            piece, stopped = matcher.push(text[start : start + size])
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


class Ended:
    """Calls of a stream to its replica."""

    def __init__(self) -> None:
        self.stops: list[tuple[str, FinishReason]] = []
        self.ends = 0

    def on_stop(self, request_id: str, reason: FinishReason) -> None:
        self.stops.append((request_id, reason))

    def on_end(self) -> None:
        self.ends += 1


class Made(Ended):
    """A stream, and its calls to its replica."""

    def __init__(self, *, stop_token_ids: frozenset[int] = frozenset(), **sampling: Any) -> None:
        super().__init__()
        inputs = ChoiceInputs(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(**sampling),
            stop_token_ids=stop_token_ids,
            on_stop=self.on_stop,
            on_end=self.on_end,
        )
        self.stream = TokenStream(inputs, lambda **_: Letters())

    def push(self, *tokens: int) -> None:
        for token in tokens:
            self.stream.push(token, None)

    def finish(
        self, reason: FinishReason = FinishReason.LENGTH, *, message: str = "", code: str = ""
    ) -> None:
        times = RequestTimes(cached_tokens=2)
        self.stream.finish(Finish("r", 1, reason, times, message, code))

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
        made.stream.push(token, TokenLogprob(token, -1.0, []))
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
async def test_generation_finds_no_stop_string_before_min_tokens(
    min_tokens: int, tokens: int, text: str
) -> None:
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
