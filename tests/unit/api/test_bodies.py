from __future__ import annotations

import asyncio
import codecs
import json
import threading
import time
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.patience import NEVER_S, patience, until
from tests.programs import printed_by
from tests.unit.api.fakes import CHAT, PLAIN, Client, FakeEngine, accepted, body_of, chat, refusal
from vsched.aio.streams import OutputDelta
from vsched.api import ApiSettings, bodies, create_app, parameters
from vsched.errors import RequestRefused

BODIES = {
    PLAIN: b'{"metadata":[%s],"prompt":"x"}',
    CHAT: b'{"messages":[%s]}',
    "/tokenize": b'{"messages":[%s]}',
    "/admin/replicas": b'{"group":1,"action":[%s]}',
}


@each_case("size", [0, bodies.SMALL_BYTES, bodies._THREAD_BYTES])
async def test_a_byte_order_mark_is_left_out(size: int) -> None:
    body = codecs.BOM_UTF8 + msgspec.json.encode(chat()) + b" " * size
    await accepted(CHAT, body, strict_fields=True)


@each_case("encoding", ["utf-16", "utf-16-be", "utf-32-le", "cp500"])
async def test_a_body_in_another_encoding_is_refused_with_the_accepted_one(encoding: str) -> None:
    error = await refusal(CHAT, json.dumps(chat()).encode(encoding))
    assert error["code"] == "invalid_json"
    assert error["message"].endswith("Remedy: send one JSON object in UTF-8.")


@each_case(("path", "body"), BODIES.items())
@each_case("values", [b",".join([b"[]"] * 150_000), b"[" * 300_000, b'{"a":' * 140_000])
async def test_a_body_of_many_values_is_refused_before_it_is_decoded(
    path: str, body: bytes, values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commas, brackets and braces outside of texts are counted."""
    monkeypatch.setattr(parameters, "decode_body", None)
    error = await refusal(path, body % values, 413)
    assert error["code"] == "too_many_values"
    limit = 131072 if path.startswith("/admin/") else 132072  # operators send no tokens
    assert f"limit {limit}" in error["message"]


async def test_body_of_escapes_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ESCAPES_MAX", 200_000)
    text = "\b" * 210_000
    await accepted(CHAT, chat(user=text))
    monkeypatch.setattr(parameters, "decode_body", None)
    error = await refusal(CHAT, chat(user=text + "\b" * 10_000), 413)
    assert error["code"] == "too_many_values"
    assert "limit 216000" in error["message"]


async def test_a_text_full_of_commas_is_no_list() -> None:
    """Wherever the slices end in which they are counted: within escapes, too."""
    await accepted(CHAT, chat(metadata={"note": ',[{"\\' * 200_000}))


LARGE = msgspec.json.encode(chat(metadata={"note": "x " * 50_000}))
ONE = ApiSettings(bodies_bytes_max=len(LARGE) + 1000, body_wait_s=0.02)
"""Space for one large body."""


async def test_large_bodies_wait_for_room_and_get_a_retry_after() -> None:
    """A small body needs no space, and one larger than all the space is served alone."""
    engine = FakeEngine()
    engine.entering = asyncio.Event()
    app = create_app(engine, ONE)
    first = asyncio.create_task(Client(app).send("POST", CHAT, LARGE))
    await engine.entered.wait()
    refused = await Client(app).send("POST", CHAT, LARGE)
    assert (refused.status, refused.error["code"]) == (503, "bodies_full")
    assert refused.headers["retry-after"] == "5"
    assert f"limit {ONE.bodies_bytes_max} bytes" in refused.error["message"]
    chunked = await Client(app).send("POST", CHAT, pieces=[LARGE[:70_000], LARGE[70_000:]])
    assert chunked.error["code"] == "bodies_full"  # a body without a size may be the largest
    small = asyncio.create_task(Client(app).send("POST", CHAT, chat()))
    await until(lambda: len(engine.calls) == 2)
    engine.entering.set()
    assert [(await one).status for one in (first, small)] == [200, 200]
    # A client that left the queue no longer counts.
    assert (await Client(app).send("POST", CHAT, LARGE)).status == 200
    alone = create_app(FakeEngine(), msgspec.structs.replace(ONE, bodies_bytes_max=1))
    assert (await Client(alone).send("POST", CHAT, LARGE)).status == 200


async def test_a_body_keeps_its_room_until_its_request_is_prepared() -> None:
    """Until the request is prepared, not until it is answered; waiting bodies are served in order."""
    written = asyncio.Event()
    engine = FakeEngine(written, OutputDelta("x", [1], finish_reason="stop"))
    engine.entering = asyncio.Event()
    app = create_app(engine, msgspec.structs.replace(ONE, body_wait_s=NEVER_S))
    sending = [asyncio.create_task(Client(app).send("POST", CHAT, LARGE)) for _ in range(3)]
    await until(lambda: len(engine.calls) == 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(engine.calls) == 1
    engine.entering.set()
    await until(lambda: len(engine.generations) == 3)
    assert not any(one.done() for one in sending)
    written.set()
    async with patience():
        assert [(await one).status for one in sending] == [200] * 3


@each_case("ending", ["invalid", "refused", "too large", "left"])
async def test_room_is_given_back_however_a_request_ends(ending: str) -> None:
    """Also by a client that leaves while it waits for space."""
    engine = FakeEngine()
    app = create_app(engine, msgspec.structs.replace(ONE, body_bytes_max=len(LARGE)))
    client = Client(app)
    match ending:
        case "invalid":
            assert (await client.send("POST", CHAT, b"[" + LARGE[1:])).status == 400
        case "refused":
            engine.refusal = RequestRefused("no", code="no")
            assert (await client.send("POST", CHAT, LARGE)).status == 400
            engine.refusal = None
        case "too large":
            pieces = [LARGE, b" "]
            assert (await client.send("POST", CHAT, pieces=pieces)).status == 413
        case _:
            engine.entering = asyncio.Event()
            sending = asyncio.create_task(client.send("POST", CHAT, LARGE))
            await engine.entered.wait()
            waits = Client(app)
            waiting = asyncio.create_task(waits.send("POST", CHAT, LARGE))
            await asyncio.sleep(0)
            for one in (waits, client):
                one.leave()
            async with patience():
                await asyncio.gather(sending, waiting)
            engine.entering = None
    assert (await Client(app).send("POST", CHAT, LARGE)).status == 200


async def test_large_bodies_are_read_in_turn_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding holds the GIL: several at a time would block the event loop in turns."""
    decode, readers, most = parameters.decode_body, [], []

    def decode_body(body: bytes, kind: type[Any]) -> Any:
        readers.append(threading.current_thread())
        most.append(len(readers))
        time.sleep(0.01)  # another one could begin meanwhile
        request = decode(body, kind)
        readers.remove(threading.current_thread())
        return request

    monkeypatch.setattr(parameters, "decode_body", decode_body)
    monkeypatch.setattr(bodies, "_THREAD_BYTES", 50_000)
    threads: set[threading.Thread] = set()
    monkeypatch.setattr(
        bodies, "check_json_values", lambda body, tokens: threads.add(threading.current_thread())
    )
    monkeypatch.setattr(bodies, "SMALL_BYTES", 50_000)
    app = create_app(FakeEngine(), ApiSettings())
    replies = [Client(app).send("POST", CHAT, LARGE) for _ in range(8)]
    assert [reply.status for reply in await asyncio.gather(*replies)] == [200] * 8
    assert most == [1] * 8
    assert threading.current_thread() not in threads


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


@each_case(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": NAMED}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": True}}, {"json_schema": True}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "any"}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"guided_json": None}, None),
    ],
)
@each_case("path", [CHAT, PLAIN])
async def test_every_way_to_ask_for_a_form_reaches_the_engine(
    path: str, fields: dict[str, Any], grammar: dict[str, Any] | None
) -> None:
    """Properties of a schema keep their order."""
    sampling = (await accepted(path, body_of(path, **fields))).sampling
    if grammar is None:
        assert not sampling.grammar
    else:
        assert json.dumps(json.loads(sampling.grammar)) == json.dumps(grammar)
        assert not sampling.is_plain_greedy


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]},
    {
        "role": "assistant", "content": "there", "refusal": None, "annotations": [],
        "audio": {"id": "x"}, "function_call": None, "reasoning": {"a": [1]},
        "provider_specific_fields": {"citations": None},
    },
    {"role": "user", "content": "again"},
]  # fmt: skip


async def test_unknown_fields_of_messages_are_ignored() -> None:
    """Clients send back histories with fields that other servers added."""
    engine = await accepted(CHAT, chat(messages=HISTORY))
    assert engine.calls[0]["prompt"] == "user:hiassistant:thereuser:again"


@each_case(
    ("messages", "name"),
    [
        (HISTORY, "messages[0].content[0].cache_control"),
        ([{"role": "user", "content": "hi"}, *HISTORY[1:]], "messages[1].provider_specific_fields"),
    ],
)
async def test_unknown_fields_are_named_if_the_settings_ask(messages: list[Any], name: str) -> None:
    error = await refusal(CHAT, chat(messages=messages), strict_fields=True)
    assert (error["code"], error["param"]) == ("unknown_parameter", name)
    assert "server.strict_fields" in error["message"]


async def test_known_fields_pass_strictness_wherever_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":{"b":1}}'}}
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:one"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    usage = {"include_usage": True}
    body = chat(messages=messages, metadata={"a": {"b": 1}}, stream_options=usage, stream=True)
    await accepted(CHAT, body, strict_fields=True)


@each_case("sent", [b'"user":{"\xff":1}', b'"user":' + b"[" * 900 + b"]" * 900])
async def test_strictness_survives_fields_that_decoding_skips(sent: bytes) -> None:
    body = b'{"messages":[{"role":"user","content":"x","odd":{%s}}]}' % sent
    await refusal(CHAT, body, strict_fields=True)


AT_ONCE = """
import sys, threading
{imports}
sys.setswitchinterval(1e-5)
gate = threading.Barrier(8)

def decode():
    gate.wait()
    {call}

threads = [threading.Thread(target=decode) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("decoded")
"""
DECODERS = {
    "request": (
        "from vsched.api.parameters import decode_body; from vsched.api.request_schema import ChatRequest",
        """decode_body(b'{"messages": []}', ChatRequest)""",
    ),
    "conversation": (
        "from vsched.offline import _conversation",
        """_conversation(lambda *_, **__: "", [{"role": "user", "content": "Hello"}], {})""",
    ),
}


@pytest.mark.slow
@each_case("case", list(DECODERS))
def test_first_bodies_may_be_decoded_at_the_same_time(case: str) -> None:
    """Large ones are decoded in threads, where msgspec could crash the process."""
    imports, call = DECODERS[case]
    program = AT_ONCE.format(imports=imports, call=call)
    assert printed_by(program) == "decoded\n"
