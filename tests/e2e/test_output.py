"""Ends of outputs and their details, through the whole engine."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.e2e.asking import TEXTS, Answer, Ask, answer, begin, drawn_image, read
from vsched import Engine, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="package")

ASK = Ask(TEXTS[1], [drawn_image(400, (112, 84))])


def greedy(**changes: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
    return SamplingParams(**chosen | changes)


def sampled(**changes: Any) -> SamplingParams:
    return greedy(temperature=1.5, seed=11, **changes)


async def test_deltas_are_the_text_of_the_tokens(engine: Engine) -> None:
    """Random weights yield much broken UTF-8: pieces must still add up to the complete text."""
    found = await answer(engine, ASK, sampled(max_tokens=200))
    assert len(found.deltas) > 5
    assert found.text == engine.preprocessor.detokenize(found.token_ids)
    assert len(found.token_ids) == 200


async def test_max_tokens_ends_with_length(engine: Engine) -> None:
    for count in (1, 2, 17):
        found = await answer(engine, ASK, greedy(max_tokens=count))
        assert len(found.token_ids) == count
        assert found.finish_reason == "length"


async def test_stop_string_ends_before_it(engine: Engine) -> None:
    """The stop string is found across tokens, and is not part of the text."""
    whole = (await answer(engine, ASK, sampled(max_tokens=60))).text
    stop = whole[20:25]
    found = await answer(engine, ASK, sampled(max_tokens=60, stop=("never comes", stop)))
    assert found.text == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"
    assert len(found.token_ids) < 60
    found = await answer(engine, ASK, sampled(max_tokens=60, stop=(stop,), include_stop=True))
    assert found.text == whole[: whole.index(stop) + len(stop)]


async def test_special_tokens_are_text_where_they_are_requested(engine: Engine) -> None:
    """Stop strings find them, and the stop reason is reported as for any other stop."""
    end, *_ = engine.info.stop_token_ids
    name = engine.preprocessor.token_bytes(end).decode()
    ignoring = sampled(logit_bias=((end, 100.0),), max_tokens=3)
    assert (await answer(engine, ASK, ignoring)).text == ""
    shown = msgspec.structs.replace(ignoring, show_special=True)
    assert (await answer(engine, ASK, shown)).text == 3 * name
    stopped = await answer(engine, ASK, msgspec.structs.replace(shown, stop=(name,)))
    assert (stopped.text, stopped.finish_reason, len(stopped.token_ids)) == ("", "stop", 1)
    for include, text in ((False, ""), (True, name)):
        ended = msgspec.structs.replace(shown, ignore_eos=False, include_stop=include)
        found = await answer(engine, ASK, ended)
        assert (found.text, found.finish_reason, found.token_ids) == (text, "stop", [end])


async def test_stop_string_that_only_begins_is_given_out(engine: Engine) -> None:
    whole = (await answer(engine, ASK, sampled(max_tokens=60))).text
    found = await answer(engine, ASK, sampled(max_tokens=60, stop=(whole[-4:] + "\0",)))
    assert found.text == whole
    assert found.finish_reason == "length"


def first_new(tokens: list[int], start: int) -> int:
    """Return the index, at or after `start`, of a token that did not occur before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


async def test_stop_token_ends_with_it(engine: Engine) -> None:
    whole = (await answer(engine, ASK, sampled(max_tokens=60))).token_ids
    end = first_new(whole, 20)
    found = await answer(engine, ASK, sampled(max_tokens=60, stop_token_ids=(whole[end],)))
    assert found.token_ids == whole[: end + 1]
    assert found.text == engine.preprocessor.detokenize(whole[:end])
    assert found.finish_reason == "stop"


async def end_at(engine: Engine, wanted: int) -> tuple[Ask, int]:
    """Return a greedy question, and a token that first occurs in its answer at an index of at least `wanted`."""
    for number in range(40):
        ask = Ask(f"{TEXTS[number % 5]} {number}", [drawn_image(410 + number)])
        whole = (await answer(engine, ask, greedy())).token_ids
        fresh = [i for i in range(wanted, len(whole) - 8) if whole[i] not in whole[:i]]
        if fresh:
            return ask, fresh[0]
    raise AssertionError("no such question")


async def test_min_tokens_puts_the_end_off(engine: Engine) -> None:
    """No stop token is drawn before that number of tokens, and the output continues as if there were none."""
    ask, end = await end_at(engine, 4)
    whole = (await answer(engine, ask, greedy())).token_ids
    stop = whole[end]
    early = await answer(engine, ask, greedy(stop_token_ids=(stop,)))
    assert early.token_ids == whole[: end + 1]
    late = await answer(engine, ask, greedy(stop_token_ids=(stop,), min_tokens=end + 6))
    assert len(late.token_ids) >= end + 6
    assert stop not in late.token_ids[: end + 5]
    assert late.token_ids[:end] == whole[:end]


async def test_end_of_sequence_token_ends_unless_ignored(engine: Engine) -> None:
    """High temperature draws the end token sooner or later; `ignore_eos` continues past it."""
    (end,) = engine.info.stop_token_ids
    for seed in range(60):
        params: dict[str, Any] = {"temperature": 3.0, "seed": seed, "max_tokens": 120}
        ignoring = await answer(engine, ASK, SamplingParams(**params, ignore_eos=True))
        if end in ignoring.token_ids[:-1]:
            break
    else:
        raise AssertionError("no seed draws the end token")
    assert len(ignoring.token_ids) == 120
    assert ignoring.finish_reason == "length"
    stopping = await answer(engine, ASK, SamplingParams(**params))
    index = ignoring.token_ids.index(end)
    assert stopping.token_ids == ignoring.token_ids[: index + 1]
    assert stopping.finish_reason == "stop"
    assert stopping.text == engine.preprocessor.detokenize(ignoring.token_ids[:index])


def check_logprobs(found: Answer, alternatives: int) -> None:
    assert [one.token_id for one in found.logprobs] == found.token_ids
    for one in found.logprobs:
        values = [value for _, value in one.top]
        assert len(values) == alternatives
        assert values == sorted(values, reverse=True)
        assert all(value <= 0.0 for value in [one.logprob, *values])
        assert sum(map(math.exp, values)) <= 1.0 + 1e-5


async def test_logprobs_of_greedy_are_the_top(engine: Engine) -> None:
    found = await answer(engine, ASK, greedy(logprobs=5))
    check_logprobs(found, 5)
    for one in found.logprobs:
        assert one.top[0] == (one.token_id, one.logprob)
    plain = await answer(engine, ASK, greedy())
    assert found.token_ids == plain.token_ids
    assert plain.logprobs == []


async def test_logprobs_of_sampled_tokens_are_their_own(engine: Engine) -> None:
    found = await answer(engine, ASK, sampled(logprobs=20))
    check_logprobs(found, 20)
    listed = [dict(one.top) for one in found.logprobs]
    known = [
        (one.logprob, top[one.token_id])
        for one, top in zip(found.logprobs, listed, strict=True)
        if one.token_id in top
    ]
    assert known
    assert all(own == of_top for own, of_top in known)


async def test_logprobs_over_the_vocabulary_sum_to_one(engine: Engine) -> None:
    size = engine.info.vocab_size
    found = await answer(engine, ASK, greedy(logprobs=size, max_tokens=3))
    for one in found.logprobs:
        assert math.fsum(math.exp(value) for _, value in one.top) == pytest.approx(1.0, abs=1e-5)


async def test_text_request_on_a_vision_server(engine: Engine) -> None:
    """No images at all, and no encoder either."""
    before = engine.statistics()["encode"]["items_encoded"]
    found = await answer(engine, Ask("Thank you; that was all."))
    assert len(found.token_ids) == 24
    assert engine.statistics()["encode"]["items_encoded"] == before


async def test_timeline_accounts_for_the_request(engine: Engine) -> None:
    generation = await begin(engine, Ask(TEXTS[2], [drawn_image(450)]), request_id="timed")
    await read(generation)
    line = engine.statistics()["recent"][-1]
    assert line["request_id"] == "timed"
    assert line["prompt_tokens"] == generation.prompt_tokens
    assert (line["output_tokens"], line["encoded_items"]) == (24, 1)
    assert line["finish_reason"] == "length"
    assert all(line[f"{part}_ms"] > 0 for part in ("preprocess", "encode", "prefill", "decode"))
