"""Requests of a dead engine are accepted again; clients read them by id, from any event on, and repeatedly."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import ANY, AsyncMock, Mock

import msgspec
import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.api.fakes import CHAT, PLAIN, Client, FakeEngine, Reply, chat
from vsched.aio.streams import OutputDelta
from vsched.api import ApiSettings, create_app, resuming
from vsched.api.resuming import Resumption
from vsched.errors import RequestFailed, RequestRefused
from vsched.record.journal import Ended, KeptRequest, Left, PartialOutput, RequestJournal

DELTAS = (
    OutputDelta("Hel", [1]),
    OutputDelta("", [2]),
    OutputDelta("lo", [3]),
    OutputDelta("!", [4], finish_reason="stop"),
)
PATHS = (CHAT, PLAIN, "/v1/responses", "/v1/messages")


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    own = {PLAIN: {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}
    return {**own.get(path, chat()), **fields}


class Server:
    """An engine with an application over it, and a folder that outlives both."""

    def __init__(
        self, folder: Path, *script: Any, settings: ApiSettings | None = None, **bounds: Any
    ) -> None:
        self.folder = folder
        self.engine = FakeEngine(*(script or DELTAS))
        journal = RequestJournal(folder / "requests", bytes_max=1 << 22)
        self.resumption = Resumption(journal, record=folder / "run.vlog", **bounds)
        self.app = create_app(self.engine, settings or ApiSettings(), resumption=self.resumption)

    async def start(self) -> Server:
        await self.resumption.read_left()
        await self.resumption.submit_left()
        return self

    @property
    def files(self) -> list[Path]:
        return list((self.folder / "requests").iterdir())

    async def post(self, path: str, body: object, **headers: str) -> Reply:
        return await Client(self.app).send("POST", path, body, headers=headers)

    async def get(self, path: str, **headers: str) -> Reply:
        return await Client(self.app).send("GET", path, headers=headers)

    async def killed_in(
        self, path: str, body: object, *, tokens: int = 2, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request and kill the server after some tokens; return the reply so far."""
        held = asyncio.Event()
        self.engine.script = (*DELTAS[:tokens], held, *DELTAS[tokens:])
        client, before = Client(self.app), len(self.engine.generations)
        asking = asyncio.create_task(client.send("POST", path, body, headers=headers))
        await until(lambda: len(self.engine.generations) > before, "it is accepted")
        await self.engine.generations[before].waiting.wait()
        kept = {one: one.read_bytes() for one in self.files}
        client.leave()
        reply = await asking
        held.set()
        for one, data in kept.items():  # a killed server removes nothing
            one.write_bytes(data)
        return reply


def record(monkeypatch: pytest.MonkeyPatch, left: Left) -> Mock:
    """Replace the record of the dead engine; return its reader."""
    read = Mock(return_value=left)
    monkeypatch.setattr(resuming, "read_left", read)
    return read


def blocks(reply: Reply) -> list[bytes]:
    return reply.body.split(b"\n\n")[:-1]


def ids(reply: Reply) -> list[int]:
    lines = [line for block in blocks(reply) for line in block.splitlines()]
    return [int(line[4:]) for line in lines if line.startswith(b"id: ")]


def events(reply: Reply) -> list[Any]:
    """Return the events of a stream of OpenAI's completions."""
    *data, done = [block.rpartition(b"data: ")[2] for block in blocks(reply)]
    assert done == b"[DONE]"
    return [msgspec.json.decode(one) for one in data]


def choice_id(reply: Reply) -> str:
    """Id of a choice in its first event."""
    lines = blocks(reply)[0].splitlines()
    event = msgspec.json.decode(lines[-1].removeprefix(b"data: "))
    inner = event.get("response") or event.get("message") or event
    return str(inner["id"])


@pytest.mark.parametrize("path", PATHS)
async def test_client_reads_the_rest_after_its_last_event(tmp_path: Path, path: str) -> None:
    """Both parts together are an undisturbed stream."""
    body = body_for(path, stream=True)
    first = Server(tmp_path)
    started = await first.killed_in(path, body, tokens=2)
    had = ids(started)
    assert had == list(range(len(had)))
    second = await Server(tmp_path).start()
    name = choice_id(started)
    everything = await second.get(f"{path}/{name}")
    assert everything.status == 200
    assert everything.body.startswith(started.body)
    rest = await second.get(f"{path}/{name}?starting_after={had[-1]}")
    assert started.body + rest.body == everything.body
    same = await second.get(f"{path}/{name}", **{"last-event-id": str(had[-1])})
    assert same.body == rest.body
    end = await second.get(f"{path}/{name}?starting_after={ids(everything)[-1]}")
    assert ids(end) == []
    assert (await second.get(f"{path}/{name}", accept="application/json")).json["id"] == name


@pytest.mark.parametrize("path", PATHS)
async def test_client_reads_a_whole_answer(tmp_path: Path, path: str) -> None:
    """With the seed and the times of the first engine; the other form is available, too.

    What was read is not resumed once more, but can be read again while this server lives.
    """
    first = Server(tmp_path)
    await first.killed_in(path, body_for(path), headers={"x-request-id": "mine"})
    second = await Server(tmp_path).start()
    assert len(second.files) == 1
    reply = await second.get(f"{path}/mine")
    assert (reply.status, second.files) == (200, [])
    assert "Hello!" in reply.body.decode()
    assert second.engine.sampling.seed == first.engine.sampling.seed
    assert second.engine.calls[0]["request_ids"] == first.engine.calls[0]["request_ids"]
    name = second.engine.calls[0]["request_ids"][0]
    assert (await second.get(f"{path}/{name}")).body == reply.body
    assert ids(await second.get(f"{path}/{name}?stream=true"))


async def test_answer_continues_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is kept with the request before another record begins, so it survives a start that fails."""
    first = Server(tmp_path)
    reply = await first.killed_in(CHAT, chat(stream=True))
    name = choice_id(reply)
    started = PartialOutput(b"digest", (1, 2))
    read = record(monkeypatch, Left({name: started}, {}))
    await Server(tmp_path).resumption.read_left()
    read.assert_called_once_with(ANY, [name])
    record(monkeypatch, Left({}, {}, "it is gone"))
    second = await Server(tmp_path).start()
    assert [call["started"] for call in second.engine.calls] == [started]


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"n": 2}])
async def test_requests_without_a_record_are_computed_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    first = Server(tmp_path)
    await first.killed_in(CHAT, chat(**fields), headers={"x-request-id": "mine"})
    name = first.engine.calls[0]["request_ids"][0]
    started = {} if "n" in fields else {name: PartialOutput(b"digest", (1, 2))}
    record(monkeypatch, Left(started, {}))
    second = await Server(tmp_path).start()
    assert [call["started"] for call in second.engine.calls] == [None]
    choices = (await second.get(f"{CHAT}/mine")).json["choices"]
    count = fields.get("n", 1)
    assert [choice["message"]["content"] for choice in choices] == ["Hello!"] * count


async def test_request_that_ended_is_not_kept(tmp_path: Path) -> None:
    """Delivered, refused, failed, or abandoned by its client: no client asks for it again."""
    server = Server(tmp_path)
    assert (await server.post(CHAT, chat())).status == 200
    assert (await server.post(CHAT, chat(stream=True))).status == 200
    assert (await server.post(CHAT, chat(temperature=-1))).status == 400
    server.engine.script = [RequestFailed("no")]
    assert (await server.post(CHAT, chat())).status == 500
    server.engine.refusal = RequestRefused("no", code="x")
    assert (await server.post(CHAT, chat())).status == 400
    assert server.files == []


async def test_request_whose_client_leaves_while_it_is_saved_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body is saved in a thread, which goes on when the request is cancelled."""
    server = Server(tmp_path)
    journal = server.resumption.journal
    assert journal is not None
    keep, saving, left, saved = journal.keep_request, *(threading.Event() for _ in range(3))

    def keep_slowly(request: KeptRequest) -> bool:
        saving.set()
        left.wait(PATIENCE_S)
        kept = keep(request)
        saved.set()
        return kept

    monkeypatch.setattr(journal, "keep_request", keep_slowly)
    client = Client(server.app)
    asking = asyncio.create_task(client.send("POST", CHAT, chat(user="x" * 100_000)))
    await until(saving.is_set, "it is being saved")
    client.leave()
    await asking
    left.set()
    await until(lambda: saved.is_set() and not server.files, "its file is deleted")


async def test_refused_now_is_the_end_that_its_client_reads(tmp_path: Path) -> None:
    """The error is a response in the form of its path, the same for every reader; the next server does not retry."""
    await Server(tmp_path).killed_in("/v1/messages", chat(), headers={"x-request-id": "mine"})
    second = Server(tmp_path)
    second.engine.refusal = RequestRefused(
        "the prompt changed. Remedy: send it again.", code="prompt_changed", status=409
    )
    await second.start()
    for _ in range(2):
        reply = await second.get("/v1/messages/mine")
        assert reply.status == 409
        assert reply.json["type"] == "error"
        assert "the prompt changed" in reply.json["error"]["message"]
    assert second.files == []


async def test_request_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the queue is full because all requests arrive at once, none that was accepted before is lost."""
    monkeypatch.setattr(resuming, "_AGAIN_S", 0)
    await Server(tmp_path).killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    second = Server(tmp_path)
    second.engine.refusal = RequestRefused("full", code="queue_full", status=429)
    await second.resumption.read_left()
    running = asyncio.create_task(second.resumption.submit_left())
    await until(lambda: len(second.engine.calls) > 2, "it is retried")
    second.engine.refusal = None
    await running
    assert (await second.get(f"{CHAT}/mine")).status == 200


@pytest.mark.parametrize("message", ["no memory", ""])
async def test_request_that_had_ended_in_an_error_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """Its client reads that error; if the client had left, the request is forgotten."""
    first = Server(tmp_path)
    name = choice_id(await first.killed_in(CHAT, chat(stream=True)))
    record(monkeypatch, Left({}, {name: Ended(message, "encode_failed")}))
    second = await Server(tmp_path).start()
    reply = await second.get(f"{CHAT}/{name}")
    assert second.engine.calls == []
    assert reply.status == (500 if message else 404)
    assert reply.json["error"]["code"] == ("encode_failed" if message else "answer_unknown")
    assert second.files == []


@pytest.mark.parametrize("stopped", [False, True])
async def test_servers_that_end_the_answer_do_not_count(tmp_path: Path, *, stopped: bool) -> None:
    """It is done and unread when the next servers are restarted, or each of these ends it as it stops."""
    await Server(tmp_path).killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    stopping = RequestFailed("the server is stopping", code="stopping", status=503)
    script = (DELTAS[0], stopping) if stopped else DELTAS
    for _ in range(resuming.RESUMED_MAX + 1):
        await Server(tmp_path, *script).start()
    last = await Server(tmp_path).start()
    assert (await last.get(f"{CHAT}/mine")).status == 200


@pytest.mark.parametrize("reading_kills", [False, True])
async def test_request_that_may_be_why_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading_kills: bool
) -> None:
    """At most `RESUMED_MAX` servers die while they serve or read a request; starts that fail do not count."""

    class DiedError(BaseException):
        pass

    await Server(tmp_path).killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    if reading_kills:
        monkeypatch.setattr(resuming.Resumption, "_job", AsyncMock(side_effect=DiedError))
    for _ in range(resuming.RESUMED_MAX):
        for _ in range(3):
            await Server(tmp_path).resumption.read_left()
        resumed = Server(tmp_path, asyncio.Event(), *DELTAS)
        with pytest.RaisesGroup(DiedError) if reading_kills else contextlib.nullcontext():
            await resumed.start()
        assert len(resumed.engine.calls) == (0 if reading_kills else 1)
    last = await Server(tmp_path).start()
    assert last.engine.calls == []
    error = (await last.get(f"{CHAT}/mine")).error
    assert error["code"] == "not_resumed"
    assert "value resumed 2 times, limit 2. Remedy: " in error["message"]


async def test_answer_is_forgotten_in_time(tmp_path: Path) -> None:
    await Server(tmp_path).killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    second = await Server(tmp_path, keep_s=0.01).start()
    await until(lambda: second.files == [], "its deadline has passed")
    error = (await second.get(f"{CHAT}/mine")).error
    assert (error["code"], "record.resume_keep_s" in error["message"]) == ("answer_unknown", True)


async def test_answers_are_forgotten_where_they_are_too_large_together(tmp_path: Path) -> None:
    """The oldest first, and none that is unfinished."""
    first = Server(tmp_path)
    for name in ("a", "b", "c"):
        await first.killed_in(CHAT, chat(), headers={"x-request-id": name})
    size = 4 * 256 + len("Hello!")
    second = await Server(tmp_path, bytes_max=2 * size).start()
    assert [(await second.get(f"{CHAT}/{name}")).status for name in "abc"] == [404, 200, 200]


async def test_early_reader_gets_the_later_parts(tmp_path: Path) -> None:
    """Before it is accepted, and while it is computed; one that leaves stops nothing."""
    await Server(tmp_path).killed_in(CHAT, chat(stream=True), headers={"x-request-id": "mine"})
    held = asyncio.Event()
    second = Server(tmp_path, *DELTAS[:2], held, *DELTAS[2:])
    await second.resumption.read_left()
    early = asyncio.create_task(second.get(f"{CHAT}/mine"))
    leaver = Client(second.app)
    leaving = asyncio.create_task(leaver.send("GET", f"{CHAT}/mine"))
    await asyncio.sleep(0)
    await second.resumption.submit_left()
    await second.engine.generations[0].waiting.wait()
    leaver.leave()
    await leaving
    held.set()
    reply = await early
    texts = [event["choices"][0]["delta"].get("content", "") for event in events(reply)]
    assert "".join(texts) == "Hello!"
    assert second.engine.generations[0].aborted == 0


async def test_failure_in_mid_stream_is_reported_after_any_event(tmp_path: Path) -> None:
    """Even if the client has more events than there are."""
    await Server(tmp_path).killed_in(CHAT, chat(stream=True), headers={"x-request-id": "mine"})
    second = await Server(tmp_path, DELTAS[0], RequestFailed("broken")).start()
    reply = await second.get(f"{CHAT}/mine?starting_after=5")
    assert events(reply)[-1]["error"]["message"] == "broken"
    assert second.files == []


async def test_unaccepted_connections_are_left_for_the_next_server(tmp_path: Path) -> None:
    """Its client gets an error, and asks the next server."""
    await Server(tmp_path).killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    second = Server(tmp_path)
    second.engine.entering = asyncio.Event()
    await second.resumption.read_left()
    running = asyncio.create_task(second.resumption.submit_left())
    await second.engine.entered.wait()
    asking = asyncio.create_task(second.get(f"{CHAT}/mine"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    reply = await asking
    assert (reply.status, reply.error["code"]) == (503, "stopping")
    third = await Server(tmp_path).start()
    assert (await third.get(f"{CHAT}/mine")).status == 200


async def test_large_body_is_kept_as_it_came(tmp_path: Path) -> None:
    """In pieces, with an image, and read in a thread: the resumed request is the same."""
    image = "data:image/png;base64," + "iVBORw0KGgo" * (1 << 17)
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "?"}]
    first = Server(tmp_path)
    body = {"messages": [{"role": "user", "content": content}]}
    await first.killed_in(CHAT, body, headers={"x-request-id": "mine"})
    second = await Server(tmp_path).start()
    (sent,), (read,) = (server.engine.calls[0]["images"] for server in (first, second))
    assert read.source == sent.source == image
    assert second.engine.sampling == first.engine.sampling
    assert (await second.get(f"{CHAT}/mine")).status == 200


async def test_answers_belong_to_their_tenant_and_path(tmp_path: Path) -> None:
    settings = ApiSettings(tenant_header="x-tenant")
    first = Server(tmp_path, settings=settings)
    await first.killed_in(CHAT, chat(), headers={"x-request-id": "mine", "x-tenant": "blue"})
    second = await Server(tmp_path, settings=settings).start()
    assert (await second.get(f"{CHAT}/mine", **{"x-tenant": "red"})).status == 404
    assert (await second.get(f"{CHAT}/mine")).status == 404
    assert (await second.get(f"{PLAIN}/mine", **{"x-tenant": "blue"})).status == 404
    assert (await second.get(f"{CHAT}/mine", **{"x-tenant": "blue"})).status == 200
    assert second.engine.calls[0]["tenant"] == "blue"


async def test_id_of_several_requests_is_the_last_one_s(tmp_path: Path) -> None:
    first = Server(tmp_path)
    for _ in range(2):
        await first.killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    second = await Server(tmp_path).start()
    names = [name for call in second.engine.calls for name in call["request_ids"]]
    assert (await second.get(f"{CHAT}/mine")).json["id"] == names[1]
    assert (await second.get(f"{CHAT}/{names[0]}")).json["id"] == names[0]


async def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    """Replies without a stream, and with several choices, are read from the start only."""
    first = Server(tmp_path)
    await first.killed_in(CHAT, chat(n=2, stream=True), headers={"x-request-id": "two"})
    await first.killed_in(CHAT, chat(), headers={"x-request-id": "whole"})
    second = await Server(tmp_path).start()
    for query in (
        *("mine?starting_after=-1", "mine?starting_after=x", f"mine?starting_after=0{5000 * '9'}"),
        *("mine?stream=perhaps", "two?starting_after=1", "whole?starting_after=1"),
    ):
        reply = await second.get(f"{CHAT}/{query}")
        assert (reply.status, reply.error["param"]) == (400, re.split(r"[?=]", query)[1])
    for name in ("two", "whole"):
        assert (await second.get(f"{CHAT}/{name}")).status == 200


async def test_remaining_time_is_unknown_before_it_is_measured(tmp_path: Path) -> None:
    """While the server loads, a client must not get the error of an unknown id."""
    await Server(tmp_path).killed_in(CHAT, chat(), headers={"x-request-id": "mine"})
    reply = await Server(tmp_path).get(f"{CHAT}/mine")
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")


async def test_without_a_journal_streams_are_as_they_were() -> None:
    """Events have no ids, and several tokens that come together share one event."""
    engine = FakeEngine(OutputDelta("ab", [1, 2]), OutputDelta("c", [3], finish_reason="stop"))
    app = create_app(engine, ApiSettings())
    reply = await Client(app).send("POST", CHAT, chat(stream=True))
    assert ids(reply) == []
    assert len(reply.events) == 2
    assert (await Client(app).send("GET", f"{CHAT}/x")).error["code"] == "answer_unknown"
