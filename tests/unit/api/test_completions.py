from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, Client, FakeEngine, chat, post
from tests.unit.media.fakes import model_info
from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api import ApiSettings, create_app
from vsched.errors import RequestRefused
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
    reply = await post(FakeEngine(), CHAT, chat(stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    deltas = [event["choices"][0] for event in reply.events]
    assert [choice["delta"] for choice in deltas] == [
        {"role": "assistant", "content": "Hel"},
        {"content": ""},
        {"content": "lo"},
    ]
    assert [choice["finish_reason"] for choice in deltas] == [None, None, "stop"]
    assert all("usage" not in event for event in reply.events)
    assert len({event["id"] for event in reply.events}) == 1


async def test_stream_sends_one_piece_a_delta() -> None:
    """One encode and one write, whatever the number of tokens in a delta."""
    engine = FakeEngine(
        OutputDelta("ab", [1, 2]), OutputDelta("", [3]), OutputDelta("c", [4], None, "length")
    )
    reply = await post(engine, CHAT, chat(stream=True))
    assert len(reply.pieces) == 4  # with `[DONE]`


@each_case(("path", "body"), [(CHAT, chat()), (PLAIN, {"prompt": "x"})])
async def test_stream_shows_every_token_also_those_without_text(
    path: str, body: dict[str, object]
) -> None:
    """Clients count events: special tokens, and half characters, are events with an empty text."""
    silent = [OutputDelta("", [token]) for token in (7, 8)]
    engine = FakeEngine(*silent, OutputDelta("a", [9]), OutputDelta("", [0], None, "stop"))
    choices = [
        event["choices"][0] for event in (await post(engine, path, {**body, "stream": True})).events
    ]
    texts = [choice["delta"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert texts == ["", "", "a", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    if path == CHAT:
        assert [choice["delta"].get("role") for choice in choices] == [
            "assistant",
            None,
            None,
            None,
        ]


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


@each_case(
    "value",
    [
        *(None, "data", [], {}, {"data": 5}, {"data": ["A" * 5000]}, {"url": "A" * 5000}),
        *({"data": "AAAA", "url": "data:,AAAA"}, {"data": ""}, {"url": None}),
    ],
)
async def test_misshapen_embedding_is_refused_without_quoting_it(value: object) -> None:
    """A 400 that names the position."""
    engine = FakeEngine()
    for name in ("image_embeds", "video_embeds"):
        reply = await post(engine, CHAT, user({"type": name, name: value}))
        assert reply.status == 400
        assert name in reply.error["message"] or reply.error["code"] == "unknown_parameter"
        assert "AAAA" not in reply.error["message"]
    assert engine.calls == []


async def test_unknown_part_names_those_that_are_known() -> None:
    reply = await post(FakeEngine(), CHAT, user({"type": "movie", "movie": "x"}))
    known = "text, image_url, video_url, video, image_embeds, video_embeds, refusal or thinking"
    assert known in reply.error["message"]


async def test_images_may_have_names_and_be_sent_by_them_alone() -> None:
    engine = FakeEngine()
    content = [
        {"type": "image_url", "image_url": {"url": "data:one"}, "uuid": "a"},
        {"type": "image_url", "image_url": None, "uuid": "b"},
        {"type": "image_url", "uuid": "c"},
        {"type": "image_url", "image_url": {}, "uuid": "d"},
        {"type": "image_url", "image_url": "data:two", "uuid": None},
    ]
    reply = await post(engine, CHAT, user(*content))
    assert reply.status == 200
    named = [
        MediaReference("data:one", uuid="a"),
        *(MediaReference(uuid=each) for each in "bcd"),
        MediaReference("data:two"),
    ]
    assert engine.calls[0]["images"] == named


async def test_images_may_have_bounds_of_their_pixels() -> None:
    """Bounds of a content part override those of the request, as in vLLM, under either name."""
    engine = FakeEngine()
    content = [
        {"type": "image_url", "image_url": "data:one", "max_pixels": 900},
        {"type": "image_url", "image_url": "data:two", "uuid": "b", "min_pixels": 300},
        {"type": "image_url", "image_url": "data:three"},
    ]
    messages = [{"role": "user", "content": content}]
    sent = chat(messages=messages, mm_processor_kwargs={"min_pixels": 400})
    assert (await post(engine, CHAT, sent)).status == 200
    assert engine.calls[0]["images"] == [
        MediaReference("data:one", bounds=PixelBounds(400, 900)),
        MediaReference("data:two", uuid="b", bounds=PixelBounds(300)),
        MediaReference("data:three", bounds=PixelBounds(400)),
    ]
    size = {"shortest_edge": 500, "longest_edge": 700}
    for arguments in ({"size": size}, {"size": size, "max_pixels": 600}, {}):
        assert (
            await post(engine, CHAT, chat(messages=messages, mm_processor_kwargs=arguments))
        ).status == 200
    found = [call["images"][2] for call in engine.calls[1:]]
    wanted: list[object] = [
        MediaReference("data:three", bounds=PixelBounds(500, most)) for most in (700, 600)
    ]
    assert found == [*wanted, MediaReference("data:three")]


@each_case(
    ("arguments", "param"),
    [
        ({"seconds": 2}, "seconds"),
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"size": {"height": 3}}, "height"),
    ],
)
async def test_other_arguments_of_processors_are_refused(
    arguments: dict[str, object], param: str
) -> None:
    reply = await post(FakeEngine(), CHAT, chat(mm_processor_kwargs=arguments))
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "Remedy" in reply.error["message"]


async def test_special_tokens_are_text_as_the_request_says() -> None:
    engine = FakeEngine()
    for sent, shown in (({}, False), ({"skip_special_tokens": True}, False)):
        assert (await post(engine, CHAT, chat(**sent))).status == 200
        assert engine.sampling.show_special is shown
    for path, body in ((CHAT, chat()), (PLAIN, {"prompt": "x"})):
        assert (await post(engine, path, body | {"skip_special_tokens": False})).status == 200
        assert engine.sampling.show_special


@each_case(
    "fields", [{}, {"image_url": {}}, {"image_url": None}, {"uuid": ""}, {"uuid": "x" * 257}]
)
async def test_image_without_url_and_name_is_refused(fields: dict[str, object]) -> None:
    content = [{"type": "image_url", **fields}]
    reply = await post(FakeEngine(), CHAT, user(*content))
    assert reply.status == 400
    assert "Remedy" in reply.error["message"]


async def test_template_rejection_is_a_400() -> None:
    reply = await post(
        FakeEngine(), CHAT, chat(messages=[{"role": "user", "content": "bad template"}])
    )
    assert (reply.status, reply.error["code"]) == (400, "template_error")


async def test_long_messages_render_too() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 50_000}]}]
    assert (await post(engine, CHAT, chat(messages=messages))).status == 200
    prompt = engine.calls[0]["prompt"]
    assert callable(prompt)  # in the thread that tokenizes, within the deadline of a preparation
    assert len(prompt()) == 50_005


@each_case(
    ("state", "status"),
    [("loading", 503), ("draining", 503), ("stopped", 503), ("ready", 200), ("degraded", 200)],
)
async def test_state_decides_who_is_served(state: str, status: int) -> None:
    engine = FakeEngine()
    engine.state = state
    reply = await post(engine, CHAT, chat())
    assert reply.status == status
    assert ("retry-after" in reply.headers) == (status == 503)


async def test_refusal_carries_status_and_retry_after() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("full", code="queue_full", status=429, retry_after_s=3)
    for stream in (False, True):
        reply = await post(engine, CHAT, chat(stream=stream))
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        assert reply.error["type"] == "rate_limit_error"
        assert reply.error["code"] == "rate_limit_exceeded"


@each_case("code", ["context_exceeded", "kv_exceeded"])
async def test_prompt_that_is_too_long_is_told_as_clients_know_it(code: str) -> None:
    """OpenAI's code, and the words by which litellm recognizes its ContextWindowExceededError."""
    engine = FakeEngine()
    engine.refusal = RequestRefused("too long: value 9, limit 8. Remedy: less.", code=code)
    for path, body in ((CHAT, chat()), (PLAIN, {"prompt": "x"})):
        reply = await post(engine, path, body)
        assert reply.error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is" in reply.error["message"].lower()
        assert "value 9, limit 8. Remedy: " in reply.error["message"]


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
    found = [
        event["choices"][0]["logprobs"] for event in (reply.events if stream else [reply.json])
    ]
    tops = [top for logprobs in found for top in logprobs["top_logprobs"]]
    assert tops == [{"H": -0.5}, {"i": -3.0, "bytes:\\xfe": -1.0, "bytes:\\xff": -2.0}]
    assert engine.sampling.logprobs == 0


@each_case("stream", [False, True])
async def test_disconnect_aborts_the_generation(stream: bool) -> None:
    """Streaming or not, one owner of receive() notices and aborts."""
    engine = FakeEngine(OutputDelta("Hel", [1]), asyncio.Event())
    client = Client(create_app(engine, ApiSettings()))
    task = asyncio.ensure_future(client.send("POST", CHAT, chat(stream=stream)))
    await engine.entered.wait()
    await asyncio.sleep(0)
    await engine.generations[0].waiting.wait()
    assert engine.generations[0].aborted == 0
    client.leave()
    reply = await task
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
    client = Client(create_app(engine, ApiSettings()))
    task = asyncio.ensure_future(client.send("POST", CHAT, chat()))
    await engine.entered.wait()
    await asyncio.sleep(0)
    await engine.generations[0].waiting.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
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
    reply = await post(FakeEngine(), CHAT, raw, ApiSettings(body_bytes_max=len(raw)))
    assert reply.status == 200


@each_case(
    ("messages", "on_the_loop"),
    [
        ([{"role": "user", "content": "hi"}], True),
        ([{"role": "user", "content": "hi" * 10_000}], False),
        ([{"role": "user", "content": "a"}] * 1000, False),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}], False),
    ],
)
async def test_slow_templates_are_rendered_in_a_thread(
    messages: list[dict[str, object]], on_the_loop: bool
) -> None:
    """By the length of the text, and by the number of messages and of their parts."""
    engine = FakeEngine()
    await post(engine, CHAT, chat(messages=messages))
    assert isinstance(engine.calls[0]["prompt"], str) == on_the_loop


async def test_redirect_names_the_same_path_elsewhere() -> None:
    """The client sends the same request there: 307 keeps method and body."""
    engine = FakeEngine()
    engine.refusal = RequestRefused("away", code="redirected", status=307, location="http://b:1")
    reply = await post(engine, CHAT, chat())
    assert (reply.status, reply.headers["location"]) == (307, f"http://b:1{CHAT}")


async def test_videos_have_options_of_their_own_or_of_the_request() -> None:
    """Rate or number of frames and bounds; the first of part, its `video_url`, processor and reader options counts."""
    engine = FakeEngine()
    info = engine.info
    engine.preprocessor.info = msgspec.structs.replace(info, video_token_id=2)
    nested = {"url": "data:four", "fps": 5, "max_frames": 6, "min_pixels": 700, "max_pixels": 800}
    content = [
        {"type": "video_url", "video_url": {"url": "data:one"}, "fps": 3, "max_pixels": 900},
        {"type": "video", "video": ["data:two", "data:three"]},
        {"type": "video_url", "video_url": "data:video/jpeg;base64,QQ==,Qg=="},
        {"type": "video_url", "max_frames": 4, "video_url": nested},
    ]
    sent = chat(
        messages=[{"role": "user", "content": content}],
        mm_processor_kwargs={"num_frames": 8, "min_pixels": 500},
        media_io_kwargs={"video": {"fps": 1, "max_frames": 20}},
    )
    assert (await post(engine, CHAT, sent)).status == 200
    others = VideoSampling(None, 8, 20, PixelBounds(500))
    frames = tuple(f"data:image/jpeg;base64,{each}" for each in ("QQ==", "Qg=="))
    assert engine.calls[0]["images"] == [
        MediaReference(
            "data:one", is_video=True, sampling=VideoSampling(3.0, None, 20, PixelBounds(500, 900))
        ),
        MediaReference(("data:two", "data:three"), is_video=True, sampling=others),
        MediaReference(frames, is_video=True, sampling=others),
        MediaReference(
            "data:four", is_video=True, sampling=VideoSampling(5.0, None, 4, PixelBounds(700, 800))
        ),
    ]
    engine.preprocessor.info = info
    reply = await post(engine, CHAT, sent)
    assert (reply.status, reply.error["code"]) == (400, "videos_not_taken")
