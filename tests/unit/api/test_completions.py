from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.patience import until
from tests.unit.api.fakes import (
    CHAT,
    PLAIN,
    Client,
    FakeEngine,
    StreamingEngine,
    accepted,
    body_of,
    chat,
    choices_of,
    post,
    refusal,
    under_way,
)
from tests.unit.media.fakes import model_info
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings, create_app
from vsched.api.checked_request import CheckedRequest
from vsched.api.compat.messages import MessagesRequest
from vsched.api.compat.responses import ResponsesRequest
from vsched.api.request_schema import ChatRequest
from vsched.errors import RequestFailed, RequestRefused
from vsched.media import MediaReference
from vsched.worker.contract import PixelBounds, VideoSampling


@each_case(
    ("path", "kind", "choice"),
    [
        (CHAT, "chat.completion",
         {"message": {"role": "assistant", "content": "Hello", "refusal": None},
          "token_ids": None}),
        (PLAIN, "text_completion",
         {"text": "Hello", "token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}),
    ],
)  # fmt: skip
async def test_a_reply_has_text_usage_and_id(path: str, kind: str, choice: dict[str, Any]) -> None:
    engine = FakeEngine()
    reply = await post(engine, path, body_of(path, model="demo", max_tokens=9))
    assert (reply.status, reply.json["object"]) == (200, kind)
    ended = {"index": 0, "finish_reason": "stop", "logprobs": None}
    assert reply.json["choices"] == [choice | ended]
    assert reply.json["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert reply.json["id"] == reply.headers["x-request-id"] == engine.generations[0].request_id
    assert engine.sampling.max_tokens == 9


@each_case("path", [CHAT, PLAIN])
async def test_each_delta_is_an_event_also_those_without_text(path: str) -> None:
    """Clients count events. One write for each; their JSON is assembled from parts encoded in advance."""
    texts = ["", "plain", "", 'a "quote"', "ümlaut\n", "\x00", "\u2028", "}\\", ""]
    deltas = [OutputDelta(text, [7, 8]) for text in texts[:-1]]
    engine = FakeEngine(*deltas, OutputDelta(texts[-1], [0], None, "stop"))
    reply = await post(engine, path, body_of(path, stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert len(reply.pieces) == len(texts) + 1  # with `[DONE]`
    choices = choices_of(reply, stream=True)
    if path == CHAT:
        first, *others = [choice["delta"] for choice in choices]
        assert first == {"role": "assistant", "content": texts[0]}
        assert others == [{"content": text} for text in texts[1:]]
    else:
        assert [choice["text"] for choice in choices] == texts
    assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["stop"]
    assert all(choice.keys() == choices[-1].keys() for choice in choices)
    heads = [{**event, "choices": None} for event in reply.events]
    assert heads == [heads[0]] * len(texts)
    assert "usage" not in heads[0]


def user(*parts: object) -> dict[str, object]:
    return chat(messages=[{"role": "user", "content": list(parts)}])


async def test_images_and_embeddings_keep_their_order_and_leave_the_template() -> None:
    """Mixed freely, in two spellings; the template sees placeholders only."""
    engine = FakeEngine()
    engine.preprocessor.info = model_info(video_token_id=2)
    content = [
        {"type": "image_embeds", "image_embeds": {"data": "one"}},
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:two", "detail": "low"}},
        {"type": "video_embeds", "video_embeds": {"url": "https://three"}},
        {"type": "image_url", "image_url": "data:four", "attention_spans": [[0, 4], [6, 8]]},
    ]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None},
    ]
    assert (await post(engine, CHAT, chat(messages=messages))).status == 200
    call = engine.calls[0]
    assert call["images"] == [
        MediaReference("one", is_embedded=True),
        MediaReference("data:two"),
        MediaReference("https://three", is_video=True, is_embedded=True),
        MediaReference("data:four", attention=((0, 4), (6, 8))),
    ]
    assert call["prompt"] == "system:be briefuser:\x01a\x01\x01\x01assistant:"


async def test_images_may_have_names_and_be_sent_by_them_alone() -> None:
    sent: list[dict[str, object]] = [
        {"image_url": {"url": "data:one"}, "uuid": "a"},
        {"image_url": None, "uuid": "b"},
        {"uuid": "c"},
        {"image_url": {}, "uuid": "d"},
        {"image_url": "data:two", "uuid": None},
    ]
    engine = await accepted(CHAT, user(*({"type": "image_url", **each} for each in sent)))
    assert engine.calls[0]["images"] == [
        MediaReference("data:one", uuid="a"),
        *(MediaReference(uuid=each) for each in "bcd"),
        MediaReference("data:two"),
    ]


async def test_images_may_have_bounds_of_their_pixels() -> None:
    """Bounds of a content part override those of the request, as in vLLM, under either name."""
    body = user(
        {"type": "image_url", "image_url": "data:one", "max_pixels": 900},
        {"type": "image_url", "image_url": "data:two", "uuid": "b", "min_pixels": 300},
        {"type": "image_url", "image_url": "data:three"},
    )
    engine = await accepted(CHAT, body | {"mm_processor_kwargs": {"min_pixels": 400}})
    assert engine.calls[0]["images"] == [
        MediaReference("data:one", bounds=PixelBounds(400, 900)),
        MediaReference("data:two", uuid="b", bounds=PixelBounds(300)),
        MediaReference("data:three", bounds=PixelBounds(400)),
    ]
    size = {"shortest_edge": 500, "longest_edge": 700}
    for arguments, bounds in (
        ({"size": size}, PixelBounds(500, 700)),
        ({"size": size, "max_pixels": 600}, PixelBounds(500, 600)),
        ({}, None),
    ):
        engine = await accepted(CHAT, body | {"mm_processor_kwargs": arguments})
        assert engine.calls[0]["images"][2] == MediaReference("data:three", bounds=bounds)


async def test_template_rejection_is_a_400() -> None:
    messages = [{"role": "user", "content": "bad template"}]
    reply = await post(FakeEngine(), CHAT, chat(messages=messages))
    assert (reply.status, reply.error["code"]) == (400, "template_error")


FULL = RequestRefused("full", code="queue_full", status=429, retry_after_s=3)
AWAY = RequestRefused("away", code="redirected", status=307, location="http://b:1")
BAD_GRAMMAR = RequestRefused("it cannot be used. Remedy: mend it.", code="invalid_grammar")
TOO_LONG = "too long: value 9, limit 8. Remedy: less."
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@each_case(
    ("path", "fields", "refused", "error", "headers"),
    [
        *(
            (CHAT, {"stream": stream}, FULL,
             {"type": "rate_limit_error", "code": "rate_limit_exceeded"}, {"retry-after": "3"})
            for stream in (False, True)
        ),
        # The client sends the same request there: 307 keeps method and body.
        (CHAT, {}, AWAY, {}, {"location": f"http://b:1{CHAT}"}),
        *(
            (CHAT, fields, BAD_GRAMMAR,
             {"param": param, "code": "invalid_grammar", "type": "invalid_request_error"}, {})
            for param, fields in (
                ("response_format", {"response_format": FORM}),
                ("tools", {"tools": TOOLS, "tool_choice": "required"}),
            )
        ),
        # OpenAI's code, and the words by which litellm recognizes its ContextWindowExceededError.
        *(
            (path, {}, RequestRefused(TOO_LONG, code=code),
             {"code": "context_length_exceeded",
              "message": f"This model's maximum context length is exceeded: {TOO_LONG}"}, {})
            for code in ("context_exceeded", "kv_exceeded")
            for path in (CHAT, PLAIN, "/tokenize")
        ),
    ],
)  # fmt: skip
async def test_refusals_of_the_engine_reach_the_client_as_it_knows_them(
    path: str,
    fields: dict[str, Any],
    refused: RequestRefused,
    error: dict[str, str],
    headers: dict[str, str],
) -> None:
    engine = FakeEngine()
    engine.refusal = refused
    reply = await post(engine, path, body_of(path, **fields))
    assert reply.status == refused.status
    assert error.items() <= reply.error.items()
    assert headers.items() <= reply.headers.items()


async def test_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    """No paths, addresses or reprs."""
    engine = FakeEngine(ValueError("/secret at 0x7f"))
    reply = await post(engine, CHAT, chat())
    assert (reply.status, reply.error["message"]) == (500, "the server made a mistake")
    assert "/secret" in caplog.text


@each_case("stream", [False, True])
async def test_disconnect_aborts_all_choices(stream: bool) -> None:
    """Streaming or not, one owner of receive() notices and aborts."""
    engine = FakeEngine(OutputDelta("Hel", [1]), asyncio.Event())
    count = 2 if stream else 1
    client, sending = await under_way(engine, CHAT, chat(n=count, stream=stream))
    assert [one.aborted for one in engine.generations] == [0] * count
    client.leave()
    reply = await sending
    assert [one.aborted for one in engine.generations] == [1] * count
    assert len(reply.pieces) == (2 if stream else 0)


async def test_disconnect_in_the_body_never_reaches_the_engine() -> None:
    engine = FakeEngine()
    client = Client(create_app(engine, ApiSettings()))
    client.leave()
    reply = await client.send("POST", CHAT, pieces=[])
    assert reply.status == 0
    assert engine.calls == []


@each_case(
    ("path", "part", "tool"),
    [
        (CHAT, {"type": "image_url", "image_url": "data:kept"}, TOOLS[0]),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "data:kept"}},
         {"name": "f"}),
        ("/v1/responses", {"type": "input_image", "image_url": "data:kept"},
         {"type": "function", "name": "f"}),
    ],
)  # fmt: skip
async def test_images_are_not_held_during_the_answer(path: str, part: object, tool: object) -> None:
    """Their memory was given back once they were prepared, also if the answer is parsed for tool calls."""
    turns = "input" if path == "/v1/responses" else "messages"
    body = {turns: [{"role": "user", "content": [part]}], "tools": [tool]}
    engine = FakeEngine(asyncio.Event())
    client, sending = await under_way(engine, path, body)
    engine.calls.clear()
    assert holders() == []
    client.leave()
    await sending


def holders() -> list[object]:
    kinds = (ChatRequest, MessagesRequest, ResponsesRequest, CheckedRequest, MediaReference)
    found = [one for one in gc.get_objects() if isinstance(one, kinds)]
    return [one for one in found if "data:kept" in f"{one} {getattr(one, 'source', '')}"]


@pytest.mark.parametrize("refused", [True, False])
async def test_refused_or_cancelled_preparation_keeps_no_images(refused: bool) -> None:
    """No cycle of errors and frames keeps them until garbage is collected; a disconnect cancels."""
    engine = FakeEngine()
    engine.entering = asyncio.Event()
    engine.refusal = RequestRefused("the image is odd", code="odd")
    client = Client(create_app(engine, ApiSettings()))
    body = user({"type": "image_url", "image_url": "data:kept"})
    gc.disable()
    try:
        sending = asyncio.ensure_future(client.send("POST", CHAT, body))
        await engine.entered.wait()
        engine.entering.set() if refused else client.leave()
        assert (await sending).status == 400 * refused
        assert engine.cancelled is not refused
        engine.refusal = None
        engine.calls.clear()
        assert holders() == []
    finally:
        gc.enable()


async def test_cancelled_server_aborts_the_generation() -> None:
    engine = FakeEngine(asyncio.Event())
    client, sending = await under_way(engine, CHAT, chat())
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert engine.generations[0].aborted == 1


async def test_body_over_the_cap_is_not_read() -> None:
    """A fast 413 with bounded memory, whether its size is announced or not; one of exactly the cap is accepted."""
    client = Client(create_app(FakeEngine(), ApiSettings(body_bytes_max=100)))
    reply = await client.send("POST", CHAT, b"x" * 101, headers={"content-length": "50000000"})
    assert (reply.status, client.receives) == (413, 0)
    assert "value 50000000 bytes, limit 100 bytes" in reply.error["message"]
    assert reply.headers["connection"] == "close"
    reply = await client.send("POST", CHAT, pieces=[b"x" * 60] * 1000)
    assert (reply.status, client.receives) == (413, 2)
    raw = msgspec.json.encode(chat())
    exact = Client(create_app(FakeEngine(), ApiSettings(body_bytes_max=len(raw))))
    assert (await exact.send("POST", CHAT, pieces=[raw[:5], b"", raw[5:]])).status == 200


@each_case(
    ("messages", "size"),
    [
        ([{"role": "user", "content": "hi"}], 0),
        ([{"role": "user", "content": "hi" * 10_000}], 20_005),
        ([{"role": "user", "content": "a"}] * 1000, 6000),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}], 1005),
    ],
)
async def test_slow_templates_leave_the_loop(messages: list[dict[str, object]], size: int) -> None:
    """In the thread that tokenizes, by the length of the text, and by the number of messages and of their parts."""
    prompt = (await accepted(CHAT, chat(messages=messages))).calls[0]["prompt"]
    assert prompt == "user:hi" if size == 0 else len(prompt()) == size


async def test_videos_have_options_of_their_own_or_of_the_request() -> None:
    """Rate or number of frames and bounds; the first of part, its `video_url`, processor and reader options counts."""
    nested = {"url": "data:four", "fps": 5, "max_frames": 6, "min_pixels": 700, "max_pixels": 800}
    body = user(
        {"type": "video_url", "video_url": {"url": "data:one"}, "fps": 3, "max_pixels": 900},
        {"type": "video", "video": ["data:two", "data:three"]},
        {"type": "video_url", "video_url": "data:video/jpeg;base64,QQ==,Qg=="},
        {"type": "video_url", "max_frames": 4, "video_url": nested},
    ) | {
        "mm_processor_kwargs": {"num_frames": 8, "min_pixels": 500},
        "media_io_kwargs": {"video": {"fps": 1, "max_frames": 20}},
    }
    engine = FakeEngine()
    engine.preprocessor.info = model_info(video_token_id=2)
    assert (await post(engine, CHAT, body)).status == 200
    others = VideoSampling(None, 8, 20, PixelBounds(500))
    frames = tuple(f"data:image/jpeg;base64,{each}" for each in ("QQ==", "Qg=="))
    assert engine.calls[0]["images"] == [
        MediaReference(source, is_video=True, sampling=sampling)
        for source, sampling in (
            ("data:one", VideoSampling(3.0, None, 20, PixelBounds(500, 900))),
            (("data:two", "data:three"), others),
            (frames, others),
            ("data:four", VideoSampling(5.0, None, 4, PixelBounds(700, 800))),
        )
    ]
    assert (await post(FakeEngine(), CHAT, body)).error["code"] == "videos_not_taken"


async def test_deltas_grow_together_while_the_connection_is_full() -> None:
    """They are written at once while it accepts them."""
    engine, room, texts = StreamingEngine(), asyncio.Event(), []
    app = create_app(engine, ApiSettings())

    async def full(scope: Any, receive: Any, send: Any) -> None:
        async def write(message: Any) -> None:
            if message.get("body", b"").startswith(b"data: {"):
                await room.wait()
                event = msgspec.json.decode(message["body"].removeprefix(b"data: "))
                texts.append(event["choices"][0]["delta"]["content"])
            await send(message)

        await app(scope, receive, write)

    sending = asyncio.create_task(Client(full).send("POST", CHAT, chat(stream=True)))
    await engine.entered.wait()
    await asyncio.sleep(0)
    engine.push("abcd")
    await asyncio.sleep(0)
    assert texts == []
    room.set()
    await until(lambda: texts == ["a", "bcd"])
    engine.push("ef")
    assert texts[2:] == ["e", "f"], "no turn of the loop was needed"
    engine.finish()
    assert (await sending).status == 200


def said(text: str, logprob: float | None = None) -> list[OutputDelta | Exception | asyncio.Event]:
    token = ord(text[0])
    logprobs = None if logprob is None else [TokenLogprob(token, logprob, [])]
    return [OutputDelta(text, [token], logprobs, "stop")]


def engine_saying(*texts: str) -> FakeEngine:
    engine = FakeEngine(*said(texts[0]))
    engine.scripts = {str(index): said(text) for index, text in enumerate(texts) if index}
    return engine


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice["message" if "message" in choice else "delta"]["content"])


@each_case("path", [CHAT, PLAIN])
async def test_n_answers_are_one_request_and_choices_of_one_reply(path: str) -> None:
    engine = engine_saying("a", "b", "c")
    reply = await post(engine, path, body_of(path, n=3, seed=5))
    choices = [(one["index"], text_of(one)) for one in reply.json["choices"]]
    assert choices == [(0, "a"), (1, "b"), (2, "c")]
    (call,) = engine.calls
    name = reply.json["id"]
    assert call["request_ids"] == [name, f"{name}#1", f"{name}#2"]
    assert call["sampling"].seed == 5
    assert reply.headers["x-request-id"] == name


@each_case("prompts", [["x", "y", "z"], [[1, 2], [3], [4, 5, 6]]])
async def test_each_prompt_of_a_list_is_a_request_with_its_choices(prompts: list[Any]) -> None:
    engine = engine_saying(*"abcdef")
    reply = (await post(engine, PLAIN, {"prompt": prompts, "n": 2})).json
    assert [call["prompt"] for call in engine.calls] == prompts
    assert [(one["index"], one["text"]) for one in reply["choices"]] == list(enumerate("abcdef"))
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (21, 6)


@each_case(
    ("fields", "param"),
    [
        ({"n": 7}, "n"),
        ({"prompt": ["x"] * 7}, "prompt"),
        ({"prompt": ["x", "y"], "n": 4}, "n"),
        ({"best_of": 7}, "best_of"),
    ],
)
async def test_more_answers_than_allowed_are_refused(fields: dict[str, Any], param: str) -> None:
    error = await refusal(PLAIN, {"prompt": "x", **fields}, choices_max=6)
    assert error["param"] == param
    assert "limit 6 answers. Remedy: " in error["message"]


@each_case("path", [CHAT, PLAIN])
async def test_streams_of_answers_have_their_indices_and_one_end(path: str) -> None:
    engine = FakeEngine(OutputDelta("a", [1]), OutputDelta("A", [2], None, "stop"))
    engine.scripts = {"1": [OutputDelta("b", [1]), OutputDelta("B", [2], None, "length")]}
    options = {"include_usage": True}
    reply = await post(engine, path, body_of(path, n=2, stream=True, stream_options=options))
    choices = choices_of(reply, stream=True)
    for index, text, reason in ((0, "aA", "stop"), (1, "bB", "length")):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, own)) == text
        assert [choice["finish_reason"] for choice in own] == [None, reason]
        if path == CHAT:
            assert [choice["delta"].get("role") for choice in own] == ["assistant", None]
    assert len({event["id"] for event in reply.events}) == 1
    last = reply.events[-1]
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 4)


@each_case("stream", [False, True])
async def test_failure_of_one_ends_all(stream: bool) -> None:
    never = asyncio.Event()
    engine = FakeEngine(OutputDelta("a", [1]), OutputDelta("A", [2], None, "stop"))
    engine.scripts = {"1": [RequestFailed("lost")], "2": [never]}
    reply = await post(engine, PLAIN, body_of(PLAIN, n=3, stream=stream))
    if stream:
        assert [event for event in reply.events if "error" in event] == [reply.events[-1]]
        assert reply.events[-1]["error"]["message"] == "lost"
    else:
        assert (reply.status, reply.error["message"]) == (500, "lost")
    assert [one.aborted for one in engine.generations] == [1, 1, 1]


async def test_refusal_of_a_later_prompt_ends_the_earlier_ones() -> None:
    class Refusing(FakeEngine):
        async def generate_choices(self, **call: Any) -> Any:
            if len(self.calls) == 2:
                self.refusal = RequestRefused("too many wait", code="queue_full", status=429)
            return await super().generate_choices(**call)

    engine = Refusing()
    reply = await post(engine, PLAIN, {"prompt": ["x", "y", "z"], "n": 2})
    assert (reply.status, reply.error["message"]) == (429, "too many wait")
    assert [one.aborted for one in engine.generations] == [1, 1, 1, 1]


async def test_best_of_returns_the_likeliest_and_hides_its_logprobs() -> None:
    engine = FakeEngine(*said("a", -3.0))
    engine.scripts = {"1": said("b", -1.0), "2": said("c", -2.0)}
    reply = (await post(engine, PLAIN, body_of(PLAIN, n=2, best_of=3))).json
    choices = [(one["index"], one["text"], one["logprobs"]) for one in reply["choices"]]
    assert choices == [(0, "b", None), (1, "c", None)]
    assert engine.sampling.logprobs == 0
    assert reply["usage"]["completion_tokens"] == 3


async def test_best_of_goes_by_the_mean_of_all_tokens() -> None:
    """Otherwise short choices would win."""
    likely = [TokenLogprob(1, -1.0, [])]
    engine = FakeEngine(OutputDelta("a", [1], likely), OutputDelta("A", [1], likely, "stop"))
    engine.scripts = {"1": said("b", -1.5)}
    reply = await post(engine, PLAIN, body_of(PLAIN, best_of=2, logprobs=0))
    (choice,) = reply.json["choices"]
    assert choice["text"] == "aA"
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.0]


async def test_best_of_equal_to_n_may_stream() -> None:
    reply = await post(engine_saying("a", "b"), PLAIN, body_of(PLAIN, n=2, best_of=2, stream=True))
    assert sorted(event["choices"][0]["text"] for event in reply.events) == ["a", "b"]
