from __future__ import annotations

import asyncio
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
from vsched.errors import RequestFailed, RequestRefused
from vsched.media import MediaReference
from vsched.worker.contract import PixelBounds, VideoSampling


async def test_chat_whole_response() -> None:
    engine = FakeEngine()
    reply = await post(engine, CHAT, chat(max_tokens=9))
    assert reply.status == 200
    assert reply.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
            "token_ids": None,
        }
    ]
    assert reply.json["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert reply.json["object"] == "chat.completion"
    assert reply.json["id"] == reply.headers["x-request-id"]
    assert engine.generations[0].request_id == reply.json["id"]
    assert engine.calls[0]["prompt"] == "user:hi"
    assert engine.sampling.max_tokens == 9


async def test_chat_stream() -> None:
    """One encode and one write for each delta, whatever the number of its tokens."""
    reply = await post(FakeEngine(), CHAT, chat(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    choices = choices_of(reply, stream=True)
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "Hel"},
        {"content": ""},
        {"content": "lo"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert all("usage" not in event for event in reply.events)
    assert len({event["id"] for event in reply.events}) == 1
    assert len(reply.pieces) == 4  # with `[DONE]`


@each_case("path", [CHAT, PLAIN])
async def test_stream_shows_every_token_also_those_without_text(path: str) -> None:
    """Clients count events: special tokens, and half characters, are events with an empty text."""
    silent = [OutputDelta("", [token]) for token in (7, 8)]
    engine = FakeEngine(*silent, OutputDelta("a", [9]), OutputDelta("", [0], None, "stop"))
    choices = choices_of(await post(engine, path, body_of(path, stream=True)), stream=True)
    texts = [choice["delta"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert texts == ["", "", "a", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    if path == CHAT:
        roles = [choice["delta"].get("role") for choice in choices]
        assert roles == ["assistant", None, None, None]


async def test_plain_completion_whole_and_streamed() -> None:
    reply = await post(FakeEngine(), PLAIN, {"model": "demo", "prompt": "abc"})
    choice = {"index": 0, "text": "Hello", "finish_reason": "stop", "logprobs": None}
    vllms = dict.fromkeys(["token_ids", "prompt_token_ids", "prompt_logprobs"])
    assert reply.json["choices"] == [choice | vllms]
    assert reply.json["object"] == "text_completion"
    streamed = await post(FakeEngine(), PLAIN, {"prompt": "abc", "stream": True})
    assert [event["choices"][0]["text"] for event in streamed.events] == ["Hel", "", "lo"]


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
    for arguments, wanted in (
        ({"size": size}, MediaReference("data:three", bounds=PixelBounds(500, 700))),
        (
            {"size": size, "max_pixels": 600},
            MediaReference("data:three", bounds=PixelBounds(500, 600)),
        ),
        ({}, MediaReference("data:three")),
    ):
        engine = await accepted(CHAT, body | {"mm_processor_kwargs": arguments})
        assert engine.calls[0]["images"][2] == wanted


async def test_template_rejection_is_a_400() -> None:
    messages = [{"role": "user", "content": "bad template"}]
    reply = await post(FakeEngine(), CHAT, chat(messages=messages))
    assert (reply.status, reply.error["code"]) == (400, "template_error")


async def test_refusal_carries_status_and_retry_after() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("full", code="queue_full", status=429, retry_after_s=3)
    for stream in (False, True):
        reply = await post(engine, CHAT, chat(stream=stream))
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        error = reply.error
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


@each_case("code", ["context_exceeded", "kv_exceeded"])
@each_case("path", [CHAT, PLAIN])
async def test_prompt_that_is_too_long_is_told_as_clients_know_it(code: str, path: str) -> None:
    """OpenAI's code, and the words by which litellm recognizes its ContextWindowExceededError."""
    engine = FakeEngine()
    engine.refusal = RequestRefused("too long: value 9, limit 8. Remedy: less.", code=code)
    error = (await post(engine, path, body_of(path))).error
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is" in error["message"].lower()
    assert "value 9, limit 8. Remedy: " in error["message"]


async def test_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    """No paths, addresses or reprs."""
    engine = FakeEngine(ValueError("/secret at 0x7f"))
    reply = await post(engine, CHAT, chat())
    assert (reply.status, reply.error["message"]) == (500, "the server made a mistake")
    assert "/secret" in caplog.text


async def test_chat_logprobs_shape() -> None:
    infinite = TokenLogprob(72, -0.5, [(72, -0.5), (255, float("-inf"))])
    engine = FakeEngine(
        OutputDelta("H", [72], [infinite]),
        OutputDelta("", [105], [TokenLogprob(105, -1, [])], "stop"),
    )
    reply = await post(engine, CHAT, chat(logprobs=True, top_logprobs=2))
    assert engine.sampling.logprobs == 2
    first, second = reply.json["choices"][0]["logprobs"]["content"]
    assert first["token"] == "H"
    assert first["bytes"] == [72]
    assert first["top_logprobs"][1] == {"token": "bytes:\\xff", "logprob": -9999.0, "bytes": [255]}
    assert second["logprob"] == -1.0
    streamed = await post(engine, CHAT, chat(logprobs=True, stream=True))
    assert [
        event["choices"][0]["logprobs"]["content"][0]["token"] for event in streamed.events
    ] == ["H", "i"]


@each_case("stream", [False, True])
async def test_plain_logprobs_always_hold_the_sampled_token(stream: bool) -> None:
    """`logprobs: 0` asks for nothing else; halves of characters do not hide each other."""
    engine = FakeEngine(
        OutputDelta("H", [72], [TokenLogprob(72, -0.5, [])]),
        OutputDelta("", [105], [TokenLogprob(105, -3.0, [(254, -1.0), (255, -2.0)])], "stop"),
    )
    reply = await post(engine, PLAIN, {"prompt": "x", "logprobs": 0, "stream": stream})
    choices = choices_of(reply, stream=stream)
    tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    assert tops == [{"H": -0.5}, {"i": -3.0, "bytes:\\xfe": -1.0, "bytes:\\xff": -2.0}]
    assert engine.sampling.logprobs == 0


@each_case("stream", [False, True])
async def test_disconnect_aborts_the_generation(stream: bool) -> None:
    """Streaming or not, one owner of receive() notices and aborts."""
    engine = FakeEngine(OutputDelta("Hel", [1]), asyncio.Event())
    client, sending = await under_way(engine, CHAT, chat(stream=stream))
    assert engine.generations[0].aborted == 0
    client.leave()
    reply = await sending
    assert engine.generations[0].aborted == 1
    assert len(reply.pieces) == (1 if stream else 0)


async def test_disconnect_while_preparing_cancels_it() -> None:
    """Images are still being prepared."""
    engine = FakeEngine()
    engine.entering = asyncio.Event()
    client = Client(create_app(engine, ApiSettings()))
    task = asyncio.ensure_future(client.send("POST", CHAT, chat()))
    await engine.entered.wait()
    client.leave()
    assert (await task).status == 0
    assert engine.cancelled


async def test_disconnect_in_the_body_never_reaches_the_engine() -> None:
    engine = FakeEngine()
    client = Client(create_app(engine, ApiSettings()))
    client.leave()
    reply = await client.send("POST", CHAT, pieces=[])
    assert reply.status == 0
    assert engine.calls == []


async def test_cancelled_server_aborts_the_generation() -> None:
    engine = FakeEngine(asyncio.Event())
    client, sending = await under_way(engine, CHAT, chat())
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert engine.generations[0].aborted == 1


async def test_body_in_pieces_is_one_body() -> None:
    raw = msgspec.json.encode(chat())
    client = Client(create_app(FakeEngine(), ApiSettings()))
    reply = await client.send("POST", CHAT, pieces=[raw[:5], b"", raw[5:]])
    assert reply.status == 200


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
    await accepted(CHAT, raw, body_bytes_max=len(raw))


@each_case(
    ("messages", "size"),
    [
        ([{"role": "user", "content": "hi"}], 0),
        ([{"role": "user", "content": "hi" * 10_000}], 20_005),
        ([{"role": "user", "content": "a"}] * 1000, 6000),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}], 1005),
    ],
)
async def test_slow_templates_are_rendered_in_the_thread_that_tokenizes(
    messages: list[dict[str, object]], size: int
) -> None:
    """By the length of the text, and by the number of messages and of their parts."""
    prompt = (await accepted(CHAT, chat(messages=messages))).calls[0]["prompt"]
    assert prompt == "user:hi" if size == 0 else len(prompt()) == size


async def test_redirect_names_the_same_path_elsewhere() -> None:
    """The client sends the same request there: 307 keeps method and body."""
    engine = FakeEngine()
    engine.refusal = RequestRefused("away", code="redirected", status=307, location="http://b:1")
    reply = await post(engine, CHAT, chat())
    assert (reply.status, reply.headers["location"]) == (307, f"http://b:1{CHAT}")


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
async def test_each_prompt_of_a_list_is_a_request_and_choices_follow_the_prompts(
    prompts: list[Any],
) -> None:
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


async def test_a_client_that_leaves_ends_all_answers() -> None:
    engine = FakeEngine(asyncio.Event())
    engine.scripts = {"1": [asyncio.Event()]}
    client, sending = await under_way(engine, PLAIN, body_of(PLAIN, n=2, stream=True))
    client.leave()
    await sending
    assert [one.aborted for one in engine.generations] == [1, 1]


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
