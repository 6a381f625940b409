"""What answers carry besides their text, whole and as streams, from both endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, chat, post
from vsched.aio.streams.stream import OutputDelta, TokenLogprob
from vsched.api import ApiSettings

PATHS = pytest.mark.parametrize("path", [CHAT, PLAIN])
PROMPT = [3, 1, 4, 1, 5, 9, 2]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if path == CHAT else {"prompt": "x", **fields}


@PATHS
async def test_token_ids_come_with_a_whole_answer(path: str) -> None:
    reply = (await post(FakeEngine(), path, body_of(path, return_token_ids=True))).json
    choice = reply["choices"][0]
    assert choice["token_ids"] == [72, 101, 108, 108, 111]
    assert (reply if path == CHAT else choice)["prompt_token_ids"] == PROMPT


@PATHS
async def test_token_ids_come_with_every_event_and_those_of_the_prompt_with_the_first(
    path: str,
) -> None:
    body = body_of(path, return_token_ids=True, stream=True)
    events = (await post(FakeEngine(), path, body)).events
    choices = [event["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[72, 101, 108], [108], [111]]
    holders = events if path == CHAT else choices
    assert [holder.get("prompt_token_ids") for holder in holders] == [PROMPT, None, None]


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_null_or_left_out_unless_asked_for(path: str, stream: bool) -> None:
    """A whole answer has the fields of vLLM's, which its clients read; events are short."""
    reply = await post(FakeEngine(), path, body_of(path, stream=stream))
    if stream:
        assert b"token_ids" not in reply.body
        return
    (choice,) = reply.json["choices"]
    holder = reply.json if path == CHAT else choice
    assert (choice["token_ids"], holder["prompt_token_ids"]) == (None, None)
    assert holder["prompt_logprobs"] is None


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_logprobs_as_ids(path: str, stream: bool) -> None:
    """For tokens that are no text by themselves."""
    token = TokenLogprob(255, -0.5, [(255, -0.5), (254, -1.0)])
    engine = FakeEngine(OutputDelta("", [255], [token], "stop"))
    count = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    body = body_of(path, return_tokens_as_token_ids=True, stream=stream, **count)
    reply = await post(engine, path, body)
    (found,) = [
        event["choices"][0]["logprobs"] for event in (reply.events if stream else [reply.json])
    ]
    if path == CHAT:
        first = found["content"][0]
        assert (first["token"], first["bytes"]) == ("token_id:255", [255])
        assert [one["token"] for one in first["top_logprobs"]] == ["token_id:255", "token_id:254"]
    else:
        assert found["tokens"] == ["token_id:255"]
        assert found["top_logprobs"] == [{"token_id:255": -0.5, "token_id:254": -1.0}]


async def test_alternatives_of_a_completion_begin_with_its_token() -> None:
    """As vLLM has them: whoever reads the first finds the token, also where another was more likely."""
    token = TokenLogprob(65, -2.0, [(66, -0.1), (67, -1.0)])
    reply = await post(
        FakeEngine(OutputDelta("A", [65], [token], "stop")), PLAIN, {"prompt": "x", "logprobs": 2}
    )
    (top,) = reply.json["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("A", -2.0), ("B", -0.1), ("C", -1.0)]


@PATHS
async def test_usage_with_every_event(path: str) -> None:
    """Only with `include_usage`, as in vLLM; the last event has it alone."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (
        await post(FakeEngine(), path, body_of(path, stream=True, stream_options=options))
    ).events
    assert [event["usage"]["completion_tokens"] for event in events] == [3, 4, 5, 5]
    assert [event["usage"]["total_tokens"] for event in events] == [10, 11, 12, 12]
    assert [len(event["choices"]) for event in events] == [1, 1, 1, 0]
    alone = body_of(path, stream=True, stream_options={"continuous_usage_stats": True})
    assert b"usage" not in (await post(FakeEngine(), path, alone)).body
    always = ApiSettings(usage_always=True)
    for body in (alone, body_of(path, stream=True)):
        told = (await post(FakeEngine(), path, body, always)).events
        assert [event["usage"] for event in told] == [event["usage"] for event in events]
