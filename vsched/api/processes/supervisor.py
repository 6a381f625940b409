"""Starts the API processes, monitors them, restarts those that die, and stops them with the engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, MutableMapping
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Scope

from vsched.aio.serving import RunningParts
from vsched.aio.streams import ChoiceInputs, PromptReport, TokenLogprob, broken
from vsched.api.app import create_operations, engine_metrics
from vsched.api.contract import ApiSettings
from vsched.api.http_server import another
from vsched.api.metrics import Report, added
from vsched.api.processes.messages import (
    BEAT_S,
    SILENT_S,
    AcceptedRequest,
    AdmitRequest,
    CancelRequest,
    End,
    EngineMessages,
    EngineStatus,
    HttpForward,
    HttpReply,
    Link,
    MetricsReport,
    Order,
    ProcessLoaded,
    ProcessMessage,
    Refusal,
    Served,
    Submit,
    Tokenize,
    Tokenized,
    bodies_bytes,
    framed,
)
from vsched.engine import Engine
from vsched.errors import ConfigError, RequestFailed, RequestRefused
from vsched.kernel.commands import Finish, RequestTimes
from vsched.media.pipeline import PreparedRequest
from vsched.types import FinishReason
from vsched.wire import PromptPiece

logger = logging.getLogger(__name__)


class EngineOutbox:
    """Messages of the engine to one process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turn: EngineMessages | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def turn(self) -> EngineMessages:
        """Messages to be sent at the end of this iteration."""
        if self._turn is None:
            self._turn = EngineMessages()
            self._loop.call_soon(self.flush)
        return self._turn

    def flush(self) -> None:
        """Send the collected messages."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._link.send(turn)


class _RelayedReport(PromptReport):
    """Forwards prompt log-probabilities."""

    def __init__(self, box: EngineOutbox, number: int) -> None:
        super().__init__((), 0)
        self._box = box
        self._number = number

    def take(self, piece: PromptPiece) -> None:
        """Forward a piece, with the number that the process uses."""
        self._box.turn.prompts.append(msgspec.structs.replace(piece, number=self._number))


class RelayedChoice:
    """An accepted choice that is detokenized in an API process: its tokens and its end are forwarded.

    Attributes:
        number: Number that the process uses.
        output_tokens: Forwarded tokens; the process may find a stop string before the last one.
    """

    def __init__(
        self, inputs: ChoiceInputs, number: int, box: EngineOutbox, on_end: Callable[[int], None]
    ) -> None:
        self.request_id = inputs.request_id
        self.number = number
        self.prompt_token_ids = inputs.prompt_token_ids
        self.prompt_tokens = len(inputs.prompt_token_ids)
        self.output_tokens = 0
        self.times = RequestTimes()
        self.reason: FinishReason | None = None
        self.prompt_report: PromptReport | None = (
            None if inputs.report is None else _RelayedReport(box, number)
        )
        self._box = box
        self._inputs = inputs
        self._on_end = on_end
        self._broken = ""

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Forward a token."""
        turn = self._box.turn
        if logprob is not None:
            turn.logprobs[len(turn.tokens)] = logprob
        turn.numbers.append(self.number)
        turn.tokens.append(token_id)
        self.output_tokens += 1

    def finish(self, finish: Finish) -> None:
        """Forward the single terminal reply."""
        assert self.reason is None, "a request has two terminal replies"
        if self._broken:
            finish = broken(finish, self._broken)
        self.reason, self.times = finish.reason, finish.times
        self._box.turn.finished.append(msgspec.structs.replace(finish, number=self.number))
        self._on_end(self.number)
        self._inputs.on_end()

    def give_up(self, message: str) -> None:
        """Report this error to the client instead of the actual end."""
        self._broken = message

    def abort(self) -> None:
        """Abort it; no-op after its end."""
        self.end(FinishReason.ABORT)

    def end(self, reason: FinishReason) -> None:
        """End it early; no-op after its end."""
        if self.reason is None:
            self._inputs.on_stop(self.request_id, reason)

    def deliver(self) -> None:
        """No-op: messages are sent at the end of the iteration."""


class ProcessSession:
    """Serves one process and tracks its requests; `operations` handles its forwarded HTTP requests."""

    def __init__(
        self,
        engine: Engine,
        box: EngineOutbox,
        *,
        operations: ASGIApp,
        on_life: Callable[[ProcessLoaded | MetricsReport], None],
    ) -> None:
        self._engine = engine
        self._box = box
        self._operations = operations
        self._on_life = on_life
        self._arriving: dict[int, tuple[asyncio.Task[None], asyncio.Future[Submit]]] = {}
        self._live: dict[int, RelayedChoice] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._sent_status: EngineStatus | None = None

    def take(self, messages: list[ProcessMessage]) -> None:
        """Handle messages from the process."""
        for message in messages:
            match message:
                case AdmitRequest(number=number):
                    submitted: asyncio.Future[Submit] = self._loop.create_future()
                    task = self._loop.create_task(self._serve(message, submitted))
                    self._arriving[number] = (task, submitted)
                case Submit(number=number):
                    arriving = self._arriving.get(number)
                    if arriving is not None and not arriving[1].done():
                        arriving[1].set_result(message)
                case CancelRequest():
                    self._give_up(message)
                case End(number=number, reason=reason):
                    if number in self._live:
                        self._live[number].end(reason)
                case Tokenize():
                    self._call(self._tokenize(message))
                case HttpForward():
                    self._call(self._ask(message))
                case ProcessLoaded() | MetricsReport():
                    self._on_life(message)

    def send_status(self) -> None:
        """Send the engine's state and adapters to the process, if they have changed."""
        status_update = EngineStatus(self._engine.state, self._engine.adapters())
        if status_update != self._sent_status:
            self._sent_status = self._box.turn.status_update = status_update

    # --- requests ---

    async def _serve(self, arrive: AdmitRequest, submitted: asyncio.Future[Submit]) -> None:
        number = arrive.number
        try:
            choices = await self._engine.accept(
                arrive.request,
                arrive.request_ids,
                adapter=arrive.adapter,
                images=arrive.images,
                prepare=partial(self._prepared, arrive, submitted),
                make_answer=partial(self._answer, arrive),
                started=arrive.started,
            )
        except Exception as error:  # noqa: BLE001 - `_refusal` reports it
            self._box.turn.refused.append(_refusal(number, error))
        else:
            self._live.update((one.number, one) for one in choices if one.reason is None)
            # The process has the token ids of text prompts, but not those of prompts with images.
            ids = choices[0].prompt_token_ids if arrive.images else None
            self._box.turn.accepted.append(AcceptedRequest(number, ids))
        finally:
            del self._arriving[number]

    def _answer(self, arrive: AdmitRequest, inputs: ChoiceInputs) -> RelayedChoice:
        number = arrive.number + arrive.request_ids.index(inputs.request_id)
        return RelayedChoice(inputs, number, self._box, self._ended)

    def _ended(self, number: int) -> None:
        self._live.pop(number, None)

    async def _prepared(
        self, arrive: AdmitRequest, submitted: asyncio.Future[Submit], parts: RunningParts
    ) -> PreparedRequest:
        """Wait for the process to tokenize the prompt, then prepare the images.

        Blocks: until the process has tokenized it, within its `media.prepare_s`; the loss of its link cancels this.
        """
        with parts.media.place(arrive.images):
            self._box.turn.entered.append(arrive.number)
            submit = await submitted
        images = [image.original for image in submit.images]
        return await parts.media.prepare(submit.token_ids, images, arrive.request.cache_salt)

    def _give_up(self, message: CancelRequest) -> None:
        arriving = self._arriving.get(message.number)
        if arriving is not None:
            arriving[0].cancel()
        for number in range(message.number, message.number + message.choices):
            if number in self._live:
                self._live[number].abort()

    # --- requests with a single reply ---

    def _call(self, work: Coroutine[None, None, None]) -> None:
        call = self._loop.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _tokenize(self, message: Tokenize) -> None:
        try:
            images = [image.original for image in message.images]
            token_ids = await self._engine.tokenize(message.token_ids, images)
        except Exception as error:  # noqa: BLE001 - `_refusal` reports it
            self._box.turn.refused.append(_refusal(message.number, error))
        else:
            self._box.turn.tokenized.append(Tokenized(message.number, token_ids))

    async def _ask(self, message: HttpForward) -> None:
        try:
            reply = await respond(self._operations, message)
        except Exception as error:  # noqa: BLE001 - `_refusal` reports it
            self._box.turn.refused.append(_refusal(message.number, error))
        else:
            self._box.turn.replies.append(reply)

    def close(self) -> None:
        """Abort all requests of the process, which is gone."""
        for task, _ in list(self._arriving.values()):
            task.cancel()
        for answer in list(self._live.values()):
            answer.abort()


def _refusal(number: int, error: Exception) -> Refusal:
    if not isinstance(error, RequestRefused | RequestFailed):
        logger.error("a request of an API process failed", exc_info=error)
    return Refusal.of(number, error)


async def respond(app: ASGIApp, forwarded: HttpForward) -> HttpReply:
    """Run an application on a forwarded request and return its response; the client never disconnects.

    Blocks: until the application is done.
    """
    bodies = [forwarded.body]
    status, headers, content = 500, [], bytearray()

    async def receive() -> MutableMapping[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            content.extend(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": forwarded.method,
        "path": forwarded.path,
        "raw_path": forwarded.path.encode(),
        "query_string": forwarded.query,
        "root_path": "",
        "headers": forwarded.headers,
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return HttpReply(forwarded.number, status, headers, bytes(content))


PAUSE_S, PAUSE_MAX_S = 0.2, 10.0
"""Pause before a process is restarted: doubled each time, up to the maximum."""
STEADY_S = 30.0
"""After this lifetime, the pause starts at its minimum again."""
FACTS_S = 0.1
"""Maximum age of the engine state in API processes."""
REPORT_S = 1.0
"""Maximum wait for the metrics of a process; after it, the last ones are used."""
END_S = 5.0
_COMMAND = ("-m", "vsched.api.processes.process_main")


class _Process:
    """One process, from start to end."""

    def __init__(self, order: Order, kept: socket.socket, engine: Engine, operations: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[str] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.began_s = self._loop.time()
        self.report = Report()
        self._report_waiters: list[asyncio.Future[None]] = []
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, another(kept) as listener:
            order = msgspec.structs.replace(order, listener=listener.fileno())
            self.popen = subprocess.Popen(  # noqa: S603 - the command is the engine's own
                [sys.executable, *_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), listener.fileno()),
                start_new_session=True,  # Ctrl-C in a terminal must reach only the engine
            )
        self._ours.sendall(framed(msgspec.msgpack.encode(order)))
        self.link = Link(
            list[ProcessMessage],
            lambda messages: self.session.take(messages),
            self._on_lost,
            frame_bytes_max=bodies_bytes(order),
        )
        self.box = EngineOutbox(self.link)
        self.session = ProcessSession(
            engine, self.box, operations=operations, on_life=self._on_life
        )

    async def open(self) -> None:
        await self.link.open(self._ours)

    def _on_life(self, message: ProcessLoaded | MetricsReport) -> None:
        if isinstance(message, ProcessLoaded):
            self._on_loaded(message.error)
            return
        self.report = message.report
        waiters, self._report_waiters = self._report_waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _on_loaded(self, error: str) -> None:
        if not self.loaded.done():
            self.loaded.set_result(error)

    def _on_lost(self, why: str) -> None:
        self._on_loaded(f"process {self.popen.pid} {why} before it had loaded")
        self.session.close()
        self.popen.kill()
        for future in self._report_waiters:
            future.cancel()
        self.ended.set()

    async def ask_report(self) -> None:
        """Update the report.

        Blocks: for at most `REPORT_S`.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self._report_waiters.append(future)
        self.box.turn.asks_report = True
        await asyncio.wait([future], timeout=REPORT_S)

    async def reap(self) -> int:
        return await asyncio.to_thread(self.popen.wait)


class ApiProcesses:
    """All API processes, on one address: each has its own socket, and the system distributes connections."""

    def __init__(self, engine: Engine, settings: ApiSettings, kept: socket.socket) -> None:
        """Use an engine that has not started, and the socket that reserves the address."""
        self._engine = engine
        self._kept = kept
        count = engine.config.server.processes
        self._settings = share_of(settings, count)
        self._metrics = engine_metrics(engine, settings)
        self._metrics.reports = lambda: [
            self._gone,
            *(one.report for one in self._running.values()),
        ]
        self._operate = create_operations(engine, settings, self._metrics)
        self._gone = Report()
        self._running: dict[int, _Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._served: Served | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ones."""
        return [one.popen.pid for one in self._running.values() if not one.ended.is_set()]

    async def begin(self) -> None:
        """Start all processes; they answer 503 until `ready`."""
        for index in range(self._engine.config.server.processes):
            await self._start(index, at_once=True)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(index)) for index in self._running]
        self._tasks.append(loop.create_task(self._send_beats()))

    async def ready(self) -> None:
        """Send the served model to all processes, and wait until they accept requests.

        Blocks: up to `deadlines.ready_s`.

        Raises:
            ConfigError: If one cannot serve.
        """
        engine = self._engine
        self._served = Served(engine.config, engine.info)
        running = list(self._running.values())
        for one in running:
            one.box.turn.served = self._served
            one.session.send_status()
        async with asyncio.timeout(engine.config.deadlines.ready_s):
            errors = await asyncio.gather(*(asyncio.shield(one.loaded) for one in running))
        for error in filter(None, errors):
            raise ConfigError(f"server.processes: an API process cannot serve: {error}")

    async def _start(self, index: int, *, at_once: bool) -> None:
        config = self._engine.config
        share = -(-config.server.max_connections // config.server.processes)
        server = msgspec.structs.replace(config.server, max_connections=share)
        order = Order(
            index=index,
            config=msgspec.structs.replace(config, server=server),
            settings=self._settings,
            listener=0,
            at_once=at_once,
        )
        one = self._running[index] = _Process(order, self._kept, self._engine, self._operations)
        await one.open()
        if self._served is not None:
            one.box.turn.served = self._served
        one.session.send_status()

    async def _operations(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve operator requests, with up-to-date metrics of all processes."""
        running = [one for one in self._running.values() if not one.ended.is_set()]
        await asyncio.gather(*(one.ask_report() for one in running))
        await self._operate(scope, receive, send)
        for one in running:
            one.session.send_status()

    async def _watch(self, index: int) -> None:
        """Restart a process whenever it dies."""
        pause_s = PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            one = self._running[index]
            await one.ended.wait()
            code = await one.reap()
            self._gone = Report(0, added([self._gone, one.report]))
            one.report = Report()
            if loop.time() - one.began_s > STEADY_S:
                pause_s = PAUSE_S
            logger.warning("API process %d ended (exit code %d); restarting it", index, code)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            await self._start(index, at_once=False)

    async def _send_beats(self) -> None:
        """Send state and signs of life to the processes; drop silent ones."""
        since_beat_s = 0.0
        while True:
            await asyncio.sleep(FACTS_S)
            since_beat_s += FACTS_S
            for one in self._running.values():
                if one.ended.is_set():
                    continue
                one.session.send_status()
                if one.link.silent_s() > SILENT_S:
                    one.link.lose(f"has said nothing for {SILENT_S:g} s")
                elif since_beat_s >= BEAT_S:
                    _ = one.box.turn  # an empty message
            if since_beat_s >= BEAT_S:
                since_beat_s = 0.0

    async def stop(self) -> None:
        """Stop all processes; responses are sent to the end.

        Blocks: for at most `END_S`, after which they are killed.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = [one for one in self._running.values() if not one.ended.is_set()]
        for one in running:
            one.box.turn.stop = True
        ends = [asyncio.create_task(one.ended.wait()) for one in running]
        if ends:
            _, late = await asyncio.wait(ends, timeout=END_S)
            if late:
                logger.warning("%d API processes did not end in %g s: killed", len(late), END_S)
        for one in self._running.values():
            one.link.lose("is to end")
            await one.reap()


def share_of(settings: ApiSettings, processes: int) -> ApiSettings:
    """Settings of one process; limits on totals are divided between the processes."""
    share = -(-settings.bodies_bytes_max // processes)
    return msgspec.structs.replace(settings, bodies_bytes_max=share)
