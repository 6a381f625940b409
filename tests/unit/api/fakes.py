"""A fake engine, and exchanges with the application over it without a socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp

from tests.unit.media.fakes import FakeDetokenizer, FakePreprocessor
from vsched.aio.live import LiveState
from vsched.aio.streams import ChoiceInputs, OutputDelta, TokenStream
from vsched.api import ApiSettings, create_app
from vsched.api.http_server import http_server, listen
from vsched.api.server import api_settings
from vsched.config import Config, ServerConfig
from vsched.engine import Environment
from vsched.errors import RequestRefused
from vsched.kernel.commands import Finish, RequestTimes
from vsched.media import ImageReference, Prompt
from vsched.sim.network.asgi_client import AsgiClient, Disconnected, HttpCall
from vsched.types import FinishReason, ModelInfo, SamplingParams

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
IMAGE_TOKENS = 16
"""Tokens of every image in tests that do not depend on its size."""
KERNEL_CLOCK = Environment().now_ns
Headers = dict[str, str] | list[tuple[str, str]] | None
"""Headers next to the Content-Type of JSON, or a list of all."""
Script = Sequence[OutputDelta | Exception | asyncio.Event]


class FakeGeneration(TokenStream):
    """Yields the given items instead of tokens; an Exception is raised, an Event is waited for."""

    def __init__(self, script: Script, request_id: str) -> None:
        inputs = ChoiceInputs(
            request_id=request_id,
            prompt_token_ids=[3, 1, 4, 1, 5, 9, 2],
            on_stop=self._end_soon,
            on_end=lambda: None,
        )
        super().__init__(inputs, lambda **_: FakeDetokenizer())
        self.aborted = 0
        self.waiting = asyncio.Event()
        self._script = list(script)
        self._began_ns = KERNEL_CLOCK()

    def one_by_one(self) -> None:
        assert all(len(getattr(step, "token_ids", ())) < 2 for step in self._script), "write it so"

    async def __anext__(self) -> OutputDelta:
        while (delta := self.take()) is None:
            if not self._script:
                raise StopAsyncIteration
            step = self._script[0]
            assert isinstance(step, asyncio.Event)
            await step.wait()
        return delta

    def take(self) -> OutputDelta | None:
        if not self._script:
            return None
        step = self._script[0]
        if isinstance(step, asyncio.Event) and not step.is_set():
            self.waiting.set()
            self._waker = asyncio.ensure_future(self._wake(step))
            return None
        self._script.pop(0)
        if isinstance(step, asyncio.Event):
            return self.take()
        if isinstance(step, Exception):
            self._end(FinishReason.ERROR)
            raise step
        self.times = RequestTimes(cached_tokens=4)
        self.output_tokens += len(step.token_ids)
        if step.finish_reason is not None:
            self._end(FinishReason(step.finish_reason))
        return step

    async def _wake(self, event: asyncio.Event) -> None:
        await event.wait()
        self.deliver()

    def _end(self, reason: FinishReason) -> None:
        if self.reason is not None:
            return
        times = RequestTimes(self._began_ns, finished_ns=KERNEL_CLOCK())
        if reason is not FinishReason.ABORT:
            times = RequestTimes(*range(self._began_ns, self._began_ns + 50, 10))
            counts = {"cached_tokens": self.cached_tokens, "encoded_items": 1}
            times = msgspec.structs.replace(times, **counts)
        self.push_finish(Finish(self.request_id, 1, reason, times))

    def abort(self) -> None:
        self.aborted += 1
        super().abort()

    def _end_soon(self, *_: object) -> None:
        asyncio.get_running_loop().call_soon(self._end_aborted)

    def _end_aborted(self) -> None:
        self._end(FinishReason.ABORT)
        self.deliver()


class FakeEngine:
    """Serves every request with `script`, or with that of `scripts` by the index of a choice.

    `refusal` refuses requests, `entering` blocks `generate_choices` itself.
    """

    def __init__(self, *script: OutputDelta | Exception | asyncio.Event) -> None:
        self.preprocessor = FakePreprocessor()
        self.model_name = "demo"
        self.state = "ready"
        self.script: Script = script or (
            OutputDelta("Hel", [72, 101, 108]),
            OutputDelta("", [108]),
            OutputDelta("lo", [111], finish_reason="stop"),
        )
        self.scripts: dict[str, Script] = {}
        self.refusal: Exception | None = None
        self.entering: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.cancelled = False
        self.calls: list[dict[str, Any]] = []
        self.generations: list[FakeGeneration] = []
        self.rows: list[dict[str, Any]] = [{"name": "generate-1", "state": "draining"}]
        self.actions: list[tuple[str, str]] = []
        self.tables: dict[str, dict[str, Any]] = {"generate.step": {"use": "in-order"}}
        self.in_time = True
        self.adapter_rows: list[dict[str, Any]] = []
        self.cleared = 0
        self.numbers: dict[str, Any] = {"queue": {"waiting": 3}, "kv": {"blocks-free": 2.5}}

    @property
    def info(self) -> ModelInfo:
        return self.preprocessor.info

    @property
    def sampling(self) -> SamplingParams:
        sampling = self.calls[-1]["sampling"]
        assert isinstance(sampling, SamplingParams)
        return sampling

    def adapters(self) -> list[dict[str, Any]]:
        return self.adapter_rows

    async def load_adapter(self, name: str, path: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.adapter_rows.append({"name": name, "state": "ready", "path": path, "requests": 2})

    async def unload_adapter(self, name: str) -> None:
        kept = [row for row in self.adapter_rows if row["name"] != name]
        if kept == self.adapter_rows:
            raise RequestRefused("there is none. Remedy: look.", code="model_not_found", status=404)
        self.adapter_rows = kept

    async def generate_choices(self, **call: Any) -> list[FakeGeneration]:
        self.calls.append(call)
        self.entered.set()
        if self.entering is not None:
            try:
                await self.entering.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        if self.refusal is not None:
            raise self.refusal
        names = call["request_ids"]
        generations = [
            FakeGeneration(self.scripts.get(name.partition("#")[2], self.script), name)
            for name in names
        ]
        self.generations += generations
        return generations

    async def tokenize(self, prompt: Prompt, images: Sequence[ImageReference] = ()) -> list[int]:
        if self.refusal is not None:
            raise self.refusal
        assert not isinstance(prompt, list)
        text = prompt if isinstance(prompt, str) else prompt()
        return [0] * IMAGE_TOKENS * len(images) + self.preprocessor.tokenize(text)

    def statistics(self) -> dict[str, Any]:
        return self.numbers

    def live(self) -> LiveState:
        return LiveState(now_ns=1, state=self.state, model=self.model_name, uptime_s=0.0)

    async def clear(self) -> dict[str, int]:
        self.cleared += 1
        return {"running": 0, "waiting": 0}

    def policies(self) -> dict[str, dict[str, Any]]:
        return self.tables

    def replace_policies(self, tables: Mapping[str, dict[str, Any]]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.tables |= tables

    def groups(self) -> list[dict[str, Any]]:
        return self.rows

    async def drain_group(self, group: str) -> bool:
        return self._act("drain", group)

    async def restart_group(self, group: str) -> bool:
        return self._act("restart", group)

    def resume_group(self, group: str) -> None:
        self._act("resume", group)

    def _act(self, action: str, group: str) -> bool:
        self.actions.append((action, group))
        if self.refusal is not None:
            raise self.refusal
        return self.in_time


class StreamingEngine(FakeEngine):
    """Serves a request with a stream of the real engine, to which a test pushes letters as tokens."""

    stream: TokenStream
    stopped = False

    async def generate_choices(self, **call: Any) -> Any:
        inputs = ChoiceInputs(
            request_id=call["request_ids"][0],
            prompt_token_ids=[1],
            sampling=call["sampling"],
            on_stop=self._on_stop,
            on_end=lambda: None,
        )
        scope = call["make_stop_scope"]
        self.stream = TokenStream(inputs, lambda **_: FakeDetokenizer(), make_stop_scope=scope)
        self.entered.set()
        return [self.stream]

    def _on_stop(self, *_: object) -> None:
        self.stopped = True

    def push(self, letters: str) -> None:
        for letter in letters:
            self.stream.push_token(ord(letter), None)
            self.stream.deliver()

    def finish(self) -> None:
        finish = Finish(self.stream.request_id, 1, FinishReason.STOP, RequestTimes())
        self.stream.push_finish(finish)
        self.stream.deliver()


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error, dict)
        return error

    @property
    def events(self) -> list[Any]:
        """The decoded events of a stream, whose last is `[DONE]`."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]


class Client:
    """One HTTP exchange with an ASGI application; `leave` disconnects, `cancel` acts as a server that stops."""

    def __init__(self, app: ASGIApp) -> None:
        self._client = AsgiClient(app)
        self._left = False
        self._call: HttpCall | None = None

    def leave(self) -> None:
        self._left = True
        if self._call is not None:
            self._call.disconnect()

    def cancel(self) -> None:
        assert self._call is not None
        self._call.cancel()

    @property
    def receives(self) -> int:
        assert self._call is not None
        return self._call.receives

    async def send(
        self,
        method: str,
        path: str,
        body: object = b"",
        *,
        headers: Headers = None,
        pieces: Sequence[bytes] | None = None,
    ) -> Reply:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        if not isinstance(headers, list):
            json = {"content-type": "application/json"} if raw or pieces is not None else {}
            headers = list({**json, **(headers or {})}.items())
        call = self._call = self._client.open(
            method,
            path,
            body=raw,
            headers=headers,
            pieces=None if pieces is None else one_by_one(pieces),
        )
        if self._left:
            call.disconnect()
        async with call:
            with contextlib.suppress(Disconnected):
                await call.response()
        response = call.response_so_far()
        return Reply(response.status, response.headers, response.chunks)


async def one_by_one(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """Body of a chat or a text completion with these fields."""
    return chat(**fields) if path == CHAT else {"prompt": "x", **fields}


async def ask(
    method: str,
    path: str,
    body: object = b"",
    *,
    engine: FakeEngine | None = None,
    headers: Headers = None,
    **settings: Any,
) -> Reply:
    """Reply of an application with these settings to one request."""
    app = create_app(engine or FakeEngine(), ApiSettings(**settings))
    return await Client(app).send(method, path, body, headers=headers)


async def post(engine: FakeEngine, path: str, body: object, **settings: Any) -> Reply:
    return await ask("POST", path, body, engine=engine, **settings)


async def accepted(path: str, body: object, **settings: Any) -> FakeEngine:
    """Engine that served a request."""
    engine = FakeEngine()
    reply = await post(engine, path, body, **settings)
    assert reply.status == 200, reply.body
    return engine


async def refusal(path: str, body: object, status: int = 400, **settings: Any) -> dict[str, Any]:
    """Error of a request that is refused before it reaches the engine; each has a remedy."""
    engine = FakeEngine()
    reply = await post(engine, path, body, **settings)
    assert (reply.status, engine.calls) == (status, []), reply.body
    assert "Remedy: " in reply.error["message"]
    return reply.error


async def under_way(
    engine: FakeEngine, path: str, body: object, **settings: Any
) -> tuple[Client, asyncio.Task[Reply]]:
    """Send a request; return its client and its exchange once the last choice waits for tokens."""
    client = Client(create_app(engine, ApiSettings(**settings)))
    sending = asyncio.create_task(client.send("POST", path, body))
    await engine.entered.wait()
    await asyncio.sleep(0)
    await engine.generations[-1].waiting.wait()
    return client, sending


def choices_of(reply: Reply, *, stream: bool) -> list[dict[str, Any]]:
    """The choices of a reply, or of the events of a stream, one after the other."""
    return [each for one in (reply.events if stream else [reply.json]) for each in one["choices"]]


@contextlib.asynccontextmanager
async def served(engine: FakeEngine, **server: Any) -> AsyncIterator[int]:
    """Serve over real sockets, as `vsched serve` does; yields the port."""
    config = Config(server=ServerConfig(**{"port": 0, **server}))
    with contextlib.closing(listen(config)) as listener:
        address, port = listener.getsockname()[:2]
        running = http_server(create_app(engine, api_settings(config, address)), config)
        running.config.load()
        running.lifespan = running.config.lifespan_class(running.config)
        await running.startup(sockets=[listener])
        await running.on_tick(0)
        try:
            yield port
        finally:  # not by its `shutdown`, which sleeps twice
            for each in running.servers:
                each.close()
            for connection in list(running.server_state.connections):
                connection.transport.abort()
            tasks = list(running.server_state.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
