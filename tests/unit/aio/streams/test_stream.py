"""From tokens to deltas: stop strings across tokens, merging, and one end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.patience import patience
from vsched.aio.streams import (
    ChoiceInputs,
    OutputDelta,
    StopMatcher,
    TokenLogprob,
    TokenStream,
)
from vsched.errors import RequestFailed
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stopped", "flushed"),
    [
        ((), ["ab", "c"], ["ab", "c"], False, ""),
        (("x",), ["ab", "cxd"], ["ab", "c"], True, ""),
        (("END",), ["some E", "N", "D more"], ["some ", "", ""], True, ""),
        (("END",), ["some E", "N", "T"], ["some ", "", "ENT"], False, ""),
        (("END",), ["EEN", "D"], ["E", ""], True, ""),
        (("END",), ["a EN"], ["a "], False, "EN"),
        (("bc", "abcd"), ["ab", "cd"], ["", "a"], True, ""),
        (("cd", "bc"), ["abcd"], ["a"], True, ""),
        (("\n\n",), ["a\n", "b\n", "\nc"], ["a", "\nb", ""], True, ""),
        (("aab",), ["aa", "a", "b"], ["", "a", ""], True, ""),
    ],
)
def test_stop_matcher_finds_stop_strings_across_pieces(
    stops: tuple[str, ...],
    pieces: list[str],
    out: list[str],
    stopped: bool,
    flushed: str,
) -> None:
    """Text that may begin a stop string is held back until that is decided."""
    matcher = StopMatcher(stops)
    results = [matcher.push(piece) for piece in pieces]
    assert [text for text, _ in results] == out
    assert results[-1][1] is stopped
    assert not any(found for _, found in results[:-1])
    assert matcher.flush() == flushed


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


@pytest.mark.parametrize(
    ("stops", "exempt", "rest", "out"),
    [
        (("b",), "ab", "cbd", "abc"),
        (("bc",), "ab", "cd", "a"),  # it ends after them
        (("b", "abx"), "ab", "cb", "abc"),  # held back because of the longer one
        (("b",), "ab", "", "ab"),
    ],
)
def test_stop_matcher_finds_no_stop_string_that_ends_in_exempt_text(
    stops: tuple[str, ...], exempt: str, rest: str, out: str
) -> None:
    for pieces in ([exempt], list(exempt)):
        matcher = StopMatcher(stops)
        said = ""
        for piece in pieces:
            text, stopped = matcher.push(piece, exempt=True)
            assert not stopped
            said += text
        assert said + matcher.push(rest)[0] + matcher.flush() == out


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
    """Calls of a generation to its replica."""

    def __init__(self) -> None:
        self.stops: list[tuple[str, FinishReason]] = []
        self.ends = 0

    def on_stop(self, request_id: str, reason: FinishReason) -> None:
        self.stops.append((request_id, reason))

    def on_end(self) -> None:
        self.ends += 1


def generation(
    *,
    stop: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    include_stop: bool = False,
    min_tokens: int = 0,
    logprobs: bool = False,
    prompt_only: bool = False,
) -> tuple[TokenStream, Ended]:
    ended = Ended()
    made = TokenStream(
        ChoiceInputs(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(
                stop=stop,
                include_stop=include_stop,
                min_tokens=min_tokens,
                logprobs=1 if logprobs else None,
                prompt_only=prompt_only,
            ),
            stop_token_ids=stop_token_ids,
            on_stop=ended.on_stop,
            on_end=ended.on_end,
        ),
        lambda **_: Letters(),
    )
    return made, ended


def finish(
    reason: FinishReason = FinishReason.LENGTH, *, message: str = "", code: str = ""
) -> Finish:
    return Finish("r", 1, reason, RequestTimes(cached_tokens=2), message, code)


async def read(made: TokenStream) -> list[OutputDelta]:
    async with patience():
        return [delta async for delta in made]


async def test_generation_merges_what_comes_faster_than_it_is_read() -> None:
    made, _ = generation()
    for token in (0, 1, 2):
        made.push(token, None)
    delta = await anext(made)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", [0, 1, 2], None)
    made.push(3, None)
    made.finish(finish())
    assert await read(made) == [OutputDelta("d", [3], finish_reason="length")]
    assert (made.output_tokens, made.cached_tokens) == (4, 2)


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
async def test_generation_one_by_one_has_the_same_deltas_however_fast_they_come(
    at_once: int,
) -> None:
    """Each delta has one token with its text and log-probability; the last has the held-back text, and the end."""
    made, _ = generation(stop=("ex",), logprobs=True, stop_token_ids=frozenset({9}))
    made.one_by_one()
    found: list[OutputDelta] = []
    for index, token in enumerate((0, 1, 4, 2, 4, 9)):
        made.push(token, TokenLogprob(token, -1.0, []))
        if index == 5:
            made.finish(finish(FinishReason.STOP))
        if (index + 1) % at_once == 0:
            while (delta := made.take()) is not None:
                found.append(delta)
    texts = ["a", "b", "", "ec", "", "e"]
    assert [(one.text, one.token_ids) for one in found] == list(
        zip(texts, [[0], [1], [4], [2], [4], [9]], strict=True)
    )
    assert [one.logprobs for one in found] == [
        [TokenLogprob(token, -1.0, [])] for token in (0, 1, 4, 2, 4, 9)
    ]
    assert [one.finish_reason for one in found] == [None] * 5 + ["stop"]


ONE, BC = frozenset({1}), ("bc",)
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


@pytest.mark.parametrize(
    ("options", "tokens", "ended", "expected"),
    [
        # The stop string, which the text then ends with, or the text of the stop token.
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
async def test_generation_ends_its_text_at_what_stopped_it(
    options: dict[str, Any], tokens: list[int], ended: FinishReason, expected: tuple[object, ...]
) -> None:
    made, _ = generation(**options)
    for token in tokens:
        made.push(token, None)
    made.finish(finish(ended))
    (delta,) = await read(made)
    text, count, reason, stop_string = expected
    assert (delta.text, delta.finish_reason, delta.stop_string) == (text, reason, stop_string)
    assert delta.token_ids == tokens[: made.output_tokens]
    assert made.output_tokens == count
    assert made.reason == reason


async def test_generation_stop_string_across_tokens_ends_it() -> None:
    """The text ends before the stop string, the replica is informed, and later tokens are dropped."""
    made, ended = generation(stop=("bc",))
    for token in (0, 1, 2, 3):
        made.push(token, None)
    assert ended.stops == [("r", FinishReason.STOP)]
    made.finish(finish(FinishReason.STOP))
    assert await read(made) == [OutputDelta("a", [0, 1, 2], finish_reason="stop", stop_string="bc")]
    assert made.output_tokens == 3
    assert made.reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("min_tokens", "tokens", "text"),
    [(0, 1, ""), (1, 4, "abc"), (3, 4, "abc"), (4, 5, "ab"), (9, 5, "abcab")],
)
async def test_generation_finds_no_stop_string_before_min_tokens(
    min_tokens: int, tokens: int, text: str
) -> None:
    """As in vLLM: the token that completes a stop string must come after the first `min_tokens`."""
    made, ended = generation(stop=("a", "cab"), min_tokens=min_tokens)
    for token in (0, 1, 2, 0, 1)[:tokens]:
        made.push(token, None)
    stopped = len(text) < tokens
    assert bool(ended.stops) is stopped
    made.finish(finish())
    (delta,) = await read(made)
    assert (delta.text, delta.finish_reason) == (text, "stop" if stopped else "length")


async def test_generation_held_text_goes_out_at_the_end() -> None:
    """The beginning of a stop string that was never completed, and half a character."""
    made, _ = generation(stop=("bcd",))
    for token in (0, 1, 2):
        made.push(token, None)
    assert (await anext(made)).text == "a"
    made.push(99, None)
    made.finish(finish())
    assert "".join(delta.text for delta in await read(made)) == "bc?"


async def test_generation_logprobs_go_with_their_tokens() -> None:
    made, _ = generation(logprobs=True)
    first, second = (TokenLogprob(token, -0.5, [(token, -0.5)]) for token in (0, 1))
    made.push(0, first)
    assert (await anext(made)).logprobs == [first]
    made.push(1, second)
    made.finish(finish())
    assert [delta.logprobs for delta in await read(made)] == [[second]]


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        (FinishReason.ERROR, "encode_failed", 500),
        (FinishReason.ERROR, "grammar_failed", 400),
        (FinishReason.ABORT, "cleared", 503),
        (FinishReason.ABORT, "stopping", 503),
    ],
)
async def test_generation_error_reaches_the_reader(
    reason: FinishReason, code: str, status: int
) -> None:
    """The failure reaches the caller, once."""
    made, ended = generation()
    made.push(0, None)
    made.finish(finish(reason, message="why", code=code))
    with pytest.raises(RequestFailed, match="why") as caught:
        await anext(made)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert await read(made) == []
    assert ended.ends == 1


async def test_generation_abort_asks_once_it_matters() -> None:
    """Leaving frees the resources of the request; after its end there is nothing to free."""
    made, ended = generation()
    made.push(0, None)
    made.abort()
    assert ended.stops == [("r", FinishReason.ABORT)]
    made.finish(finish(FinishReason.ABORT))
    made.abort()
    assert len(ended.stops) == 1
    assert [delta.finish_reason for delta in await read(made)] == ["abort"]


async def test_generation_has_exactly_one_end() -> None:
    """A second terminal reply is a programming error; tokens after the first are dropped."""
    made, ended = generation()
    made.finish(finish())
    made.push(0, None)
    with pytest.raises(AssertionError, match="two terminal replies"):
        made.finish(finish())
    assert await read(made) == [OutputDelta("", [], finish_reason="length")]
    assert await read(made) == []
    assert ended.ends == 1


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_generation_of_a_prompt_alone_has_no_output(reason: FinishReason) -> None:
    """The token sampled at the end of every prompt is dropped, even if it is a stop token."""
    made, ended = generation(
        stop=("a",), stop_token_ids=frozenset({0}), logprobs=True, prompt_only=True
    )
    made.push(0, None)
    made.finish(finish(reason))
    (delta,) = await read(made)
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", [], [])
    assert (delta.finish_reason, made.output_tokens, ended.ends) == ("length", 0, 1)
    assert not ended.stops
