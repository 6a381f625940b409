"""Starts the API processes, monitors them, restarts those that die, and stops them with the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope

from vsched.aio.streams import ChoiceInputs, PromptReport, TokenLogprob, as_internal_error
from vsched.api.app import create_operations, engine_metrics
from vsched.api.contract import ApiSettings
from vsched.api.errors import sent_error
from vsched.api.http_server import another
from vsched.api.metrics import Report, added
from vsched.api.processes.link import BEAT_S, SILENT_S, Link, Order
from vsched.config import Config
from vsched.engine import Engine, RunningParts
from vsched.errors import ConfigError, RequestFailed, RequestRefused
from vsched.kernel.commands import Finish, RequestTimes
from vsched.media import ImageReference
from vsched.media.pipeline import PreparedRequest
from vsched.record.journal import PartialOutput
from vsched.types import FinishReason, ModelInfo, Request
from vsched.wire import PromptPiece

logger = logging.getLogger(__name__)


class _RelayedReport(PromptReport):
    """Forwards prompt log-probabilities."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__((), 0)
        self._link = link
        self._number = number

    def add_piece(self, piece: PromptPiece) -> None:
        """Forward a piece, with the number that the process uses."""
        self._link.call("prompt", msgspec.structs.replace(piece, number=self._number))


class RelayedChoice:
    """An accepted choice that is detokenized in an API process: its tokens and its end are forwarded.

    Attributes:
        number: Number that the process uses.
        output_tokens: Forwarded tokens; the process may find a stop string before the last one.
    """

    def __init__(
        self, inputs: ChoiceInputs, number: int, link: Link, on_end: Callable[[int], None]
    ) -> None:
        self.request_id = inputs.request_id
        self.number = number
        self.prompt_token_ids = inputs.prompt_token_ids
        self.prompt_tokens = len(inputs.prompt_token_ids)
        self.output_tokens = 0
        self.times = RequestTimes()
        self.reason: FinishReason | None = None
        self.prompt_report: PromptReport | None = (
            None if inputs.report is None else _RelayedReport(link, number)
        )
        self._link = link
        self._inputs = inputs
        self._on_end = on_end
        self._error = ""

    def push_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Forward a token."""
        self._link.call("token", self.number, token_id, logprob)
        self.output_tokens += 1

    def push_finish(self, finish: Finish) -> None:
        """Forward the single terminal reply."""
        assert self.reason is None, "a request has two terminal replies"
        if self._error:
            finish = as_internal_error(finish, self._error)
        self.reason, self.times = finish.reason, finish.times
        self._link.call("finished", msgspec.structs.replace(finish, number=self.number))
        self._on_end(self.number)
        self._inputs.on_end()

    def fail(self, message: str) -> None:
        """Report this error to the client instead of the actual end."""
        self._error = message

    def abort(self) -> None:
        """Abort it; no-op after its end."""
        self.end_early(FinishReason.ABORT)

    def end_early(self, reason: FinishReason) -> None:
        """End it early; no-op after its end."""
        if self.reason is None:
            self._inputs.on_stop(self.request_id, reason)

    def deliver(self) -> None:
        """No-op: messages are sent at the end of the iteration."""


class _Arriving(NamedTuple):
    """A request that is not accepted yet: its task, and its prompt and images once the process has tokenized them."""

    task: asyncio.Task[None]
    submitted: asyncio.Future[tuple[list[int], Sequence[ImageReference]]]


class ProcessSession:
    """Serves one process and tracks its requests; `operations` handles its forwarded HTTP requests."""

    def __init__(self, engine: Engine, link: Link, *, operations: ASGIApp) -> None:
        self._engine = engine
        self._link = link
        self._operations = operations
        self._arriving: dict[int, _Arriving] = {}
        self._live: dict[int, RelayedChoice] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._sent_status: tuple[str, list[dict[str, Any]]] | None = None

    def send_status(self) -> None:
        """Send the engine's state and adapters to the process, if they have changed."""
        status = self._engine.state, self._engine.adapters()
        if status != self._sent_status:
            self._sent_status = status
            self._link.call("status", *status)

    # --- requests ---

    def on_admit(
        self,
        number: int,
        request: Request,
        request_ids: tuple[str, ...],
        images: int,
        adapter: str,
        started: PartialOutput | None,
    ) -> None:
        """Admit a request; after it, `submit` brings its prompt and images.

        Its choices are numbered from `number` on, by the process. `started` is as in `Engine.generate_choices`.
        """
        submitted: asyncio.Future[Any] = self._loop.create_future()

        async def prepare(parts: RunningParts) -> PreparedRequest:
            # Until the process has tokenized it, within its `media.prepare_s`; the loss of its link cancels this.
            with parts.media.hold_place(images):
                self._link.call("admitted", number)
                token_ids, references = await submitted
            return await parts.media.prepare(token_ids, references, request.cache_salt)

        def make_answer(inputs: ChoiceInputs) -> RelayedChoice:
            own = number + request_ids.index(inputs.request_id)
            return RelayedChoice(inputs, own, self._link, self._forget)

        async def serve() -> None:
            try:
                choices = await self._engine.accept(
                    request,
                    request_ids,
                    adapter=adapter,
                    images=images,
                    prepare=prepare,
                    make_answer=make_answer,
                    started=started,
                )
            except Exception as error:  # noqa: BLE001 - `_fail` reports it
                self._fail(number, error)
            else:
                self._live.update((one.number, one) for one in choices if one.reason is None)
                # The process has the token ids of text prompts, but not those of prompts with images.
                ids = choices[0].prompt_token_ids if images else None
                # Before the tokens that an earlier engine generated, which were pushed already.
                self._link.call("accepted", number, ids, first=True)

        task = self._loop.create_task(serve())
        self._arriving[number] = _Arriving(task, submitted)
        # Not in `serve`, which never runs if the task is cancelled at once.
        task.add_done_callback(lambda _: self._arriving.pop(number))

    def _forget(self, number: int) -> None:
        self._live.pop(number, None)

    def on_submit(
        self, number: int, token_ids: list[int], images: Sequence[ImageReference]
    ) -> None:
        """Take the prompt of an admitted request; the engine expands the tokens of its images."""
        arriving = self._arriving.get(number)
        if arriving is not None and not arriving.submitted.done():
            arriving.submitted.set_result((token_ids, images))

    def on_cancel(self, number: int, choices: int) -> None:
        """Cancel a request with this number of choices whose acceptance is not known to the process."""
        arriving = self._arriving.get(number)
        if arriving is not None:
            arriving.task.cancel()
        for one in range(number, number + choices):
            self.on_end(one, FinishReason.ABORT)

    def on_end(self, number: int, reason: FinishReason) -> None:
        """End a choice: a stop string was found, its client disconnected, or detokenization failed."""
        if number in self._live:
            self._live[number].end_early(reason)

    # --- calls with a result ---

    def on_tokenize(
        self, number: int, token_ids: list[int], images: Sequence[ImageReference]
    ) -> None:
        """Expand the image tokens of a prompt."""
        self._reply(number, self._engine.tokenize(token_ids, images))

    def on_forward(self, number: int, scope: dict[str, Any], body: bytes) -> None:
        """Serve an HTTP request that only the engine can answer."""
        self._reply(number, respond(self._operations, scope, body))

    def _reply(self, number: int, work: Coroutine[Any, Any, object]) -> None:
        async def reply() -> None:
            try:
                self._link.call("replied", number, await work)
            except Exception as error:  # noqa: BLE001 - `_fail` reports it
                self._fail(number, error)

        call = self._loop.create_task(reply())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, RequestRefused | RequestFailed):
            logger.error("a request of an API process failed", exc_info=error)
            error = RequestFailed("the server made a mistake")
        self._link.call("failed", number, sent_error(error))

    def close(self) -> None:
        """Abort all requests of the process, which is gone."""
        for arriving in list(self._arriving.values()):
            arriving.task.cancel()
        for answer in list(self._live.values()):
            answer.abort()


async def respond(app: ASGIApp, forwarded: dict[str, Any], body: bytes) -> list[Message]:
    """Run an application on a forwarded request and return the messages that it sends.

    The client never disconnects.

    Blocks: until the application is done.
    """
    bodies = [body]
    sent: list[Message] = []

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "raw_path": forwarded["path"].encode(),
        "root_path": "",
        "client": None,
        "server": None,
        **forwarded,
    }
    await app(scope, receive, send)
    return sent


PAUSE_S, PAUSE_MAX_S = 0.2, 10.0
"""Pause before a process is restarted: doubled each time, up to the maximum."""
STEADY_S = 30.0
"""After this lifetime, the pause starts at its minimum again."""
FACTS_S = 0.1
"""Maximum age of the engine state in API processes."""
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
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._ours.close)
            with theirs, another(kept) as listener:
                order = msgspec.structs.replace(order, listener=listener.fileno())
                self.popen = subprocess.Popen(  # noqa: S603 - the command is the engine's own
                    [sys.executable, *_COMMAND, str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    pass_fds=(theirs.fileno(), listener.fileno()),
                    start_new_session=True,  # Ctrl-C in a terminal must reach only the engine
                )
            on_failure.pop_all()
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.popen.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(order))
        self.link = Link(on_lost=self._on_lost)
        self.session = ProcessSession(engine, self.link, operations=operations)
        self.link.receivers = (self.session, self)

    async def open(self) -> None:
        await self.link.open(self._ours)

    def on_report(self, report: Report) -> None:
        """Take metrics of the process, which are sent regularly as a sign of life."""
        self.report = report

    def on_loaded(self, error: str) -> None:
        """The process has loaded; `error` is the reason that it cannot serve."""
        if not self.loaded.done():
            self.loaded.set_result(error)

    def _on_lost(self, why: str) -> None:
        self.on_loaded(f"process {self.popen.pid} {why} before it had loaded")
        self.session.close()
        self.popen.kill()
        self.ended.set()

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
        self._served: tuple[Config, ModelInfo] | None = None
        self._is_stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ones."""
        return [one.popen.pid for one in self._running.values() if not one.ended.is_set()]

    async def start_serving(self) -> None:
        """Start all processes; they answer 503 until `ready`."""
        for index in range(self._engine.config.server.processes):
            await self._start_process(index, at_once=True)
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
        self._served = engine.config, engine.info
        running = list(self._running.values())
        for one in running:
            one.link.call("served", *self._served)
            one.session.send_status()
        ready_s = engine.config.deadlines.ready_s
        try:
            async with asyncio.timeout(ready_s):
                errors = await asyncio.gather(*(asyncio.shield(one.loaded) for one in running))
        except TimeoutError:
            raise ConfigError(
                f"server.processes: an API process has not loaded within {ready_s:g} s (deadlines.ready_s). "
                "Remedy: raise it, or start fewer processes"
            ) from None
        for error in filter(None, errors):
            raise ConfigError(f"server.processes: an API process cannot serve: {error}")

    async def _start_process(self, index: int, *, at_once: bool) -> None:
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
            one.link.call("served", *self._served)
        one.session.send_status()

    async def _operations(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve operator requests, and send their effects to all processes."""
        await self._operate(scope, receive, send)
        for one in self._running.values():
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
            error = one.loaded.result()
            why = f": {error}" if error else ""
            logger.warning("API process %d ended (exit code %d)%s; restarting it", index, code, why)
            while self._running[index] is one:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                try:
                    await self._start_process(index, at_once=False)
                except Exception:  # such as too many processes or open files, perhaps not for long
                    logger.exception("API process %d cannot start; trying again", index)
                    self._running[index].link.drop_peer("cannot start")

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
                    one.link.drop_peer(f"has said nothing for {SILENT_S:g} s")
                elif since_beat_s >= BEAT_S:
                    one.link.call("beat")
            if since_beat_s >= BEAT_S:
                since_beat_s = 0.0

    async def finish_responses(self, within_s: float) -> None:
        """End all processes; they send the responses in progress to their end.

        Blocks: for at most `within_s` and `END_S`.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._is_stopping = True
        running = [one for one in self._running.values() if not one.ended.is_set()]
        for one in running:
            one.link.call("stop", within_s)
        ends = [asyncio.create_task(one.ended.wait()) for one in running]
        if ends:
            limit_s = within_s + END_S
            _, late = await asyncio.wait(ends, timeout=limit_s)
            if late:
                logger.warning("%d API processes did not end in %g s", len(late), limit_s)

    async def stop(self) -> None:
        """Stop all processes; kill the remaining ones.

        Blocks: for at most `END_S`.
        """
        if not self._is_stopping:
            await self.finish_responses(0)
        for one in self._running.values():
            one.link.drop_peer("is to end")
            await one.reap()


def share_of(settings: ApiSettings, processes: int) -> ApiSettings:
    """Settings of one process; limits on totals are divided between the processes."""
    share = -(-settings.bodies_bytes_max // processes)
    return msgspec.structs.replace(settings, bodies_bytes_max=share)
