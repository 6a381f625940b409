"""An API process: `python -m vsched.api.processes.process_main LINK`, started by an engine and never by hand."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvloop
from setproctitle import setproctitle
from starlette.types import Receive, Scope, Send

from vsched.aio.arrivals import PendingArrivals, check_stop_tokens, prompt_logprobs_unavailable
from vsched.aio.grammar_checks import GrammarChecks, grammar_processes
from vsched.aio.streams import (
    ChoiceInputs,
    PromptReport,
    StopScope,
    StreamTable,
    TokenLogprob,
    TokenStream,
)
from vsched.api.app import create_frontend
from vsched.api.errors import SentError, received_error
from vsched.api.http_exchange import ROOMLESS_BYTES, HttpExchange
from vsched.api.http_server import favour_event_loop, forgo_models, http_server
from vsched.api.metrics import ApiMetrics
from vsched.api.processes.link import BEAT_S, SILENT_S, WAITING_BYTES_MAX, Link, Order
from vsched.api.tracing import open_tracing
from vsched.assembly import load_front_end
from vsched.config import Config
from vsched.errors import RequestFailed, RequestRefused, VschedError, limit_message
from vsched.kernel.commands import Finish
from vsched.logs import configure_logging
from vsched.media import ImageReference, MediaPipeline, PixelStore, Prompt
from vsched.record.journal import PartialOutput
from vsched.types import FinishReason, ModelInfo, Request, SamplingParams
from vsched.wire import PromptPiece
from vsched.worker.contract import Preprocessor
from vsched.worker.registry import load_worker


class _Pending:
    """A request that is not accepted yet."""

    def __init__(
        self,
        request: Request,
        request_ids: tuple[str, ...],
        make_stop_scope: Callable[[], StopScope] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.request_ids = request_ids
        self.make_stop_scope = make_stop_scope
        self.prompt_token_ids: list[int] = []
        self.entered: asyncio.Future[None] = loop.create_future()
        self.accepted: asyncio.Future[list[TokenStream]] = loop.create_future()
        self.preparing = PendingArrivals()
        self.refused = False

    def refuse(self, error: RequestRefused | RequestFailed) -> None:
        """End it with an error, in any state."""
        self.refused = True
        for future in (self.entered, self.accepted):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: perhaps nothing awaits it
        self.preparing.interrupt(error)


class RemoteEngine:
    """Implements `ServingContract` over a link.

    Attributes:
        served: Done once the engine has sent the served configuration and model.
    """

    info: ModelInfo
    preprocessor: Preprocessor

    def __init__(self, model_name: str, link: Link) -> None:
        loop = asyncio.get_running_loop()
        self.model_name = model_name
        self.served: asyncio.Future[tuple[Config, ModelInfo]] = loop.create_future()
        self._link = link
        self._state = "loading"
        self._adapters: list[dict[str, Any]] = []
        self._lost = False
        self._next = 1
        self._pending: dict[int, _Pending] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams = StreamTable(self._on_failed)
        self._choices: dict[str, int] = {}
        self._media: MediaPipeline | None = None
        self._grammars: GrammarChecks
        self._has_prompt_logprobs = False

    async def load(self) -> None:
        """Wait for the served model, and load its preprocessor.

        Raises:
            CheckpointError, ConfigError: If it cannot be loaded.
        """
        config, self.info = await self.served
        self.model_name = config.model.served_name
        plugin = load_worker(config.generate.plugin, path="generate.plugin")
        self.preprocessor, self._has_prompt_logprobs = await asyncio.to_thread(
            load_front_end, plugin, self.info, ranks=config.generate.tensor_parallel
        )
        checker = grammar_processes(config, self.info)
        self._grammars = GrammarChecks(checker, deadline_s=config.media.prepare_s)
        nothing = PixelStore(memoryview(bytearray()))  # the engine has the pixels
        self._media = MediaPipeline(self.preprocessor, nothing, config.media)

    @property
    def state(self) -> str:
        """State of the engine, or `loading` until this process has loaded, too."""
        if self._lost:
            return "stopped"
        return "loading" if self._media is None else self._state

    def adapters(self) -> list[dict[str, Any]]:
        """Adapters, as last sent by the engine."""
        return self._adapters

    # --- calls from the engine ---

    def on_served(self, config: Config, info: ModelInfo) -> None:
        """The engine has loaded this configuration and model."""
        if not self.served.done():
            self.served.set_result((config, info))

    def on_status(self, state: str, adapters: list[dict[str, Any]]) -> None:
        """The state of the engine and the adapters have changed."""
        self._state, self._adapters = state, adapters

    def on_admitted(self, number: int) -> None:
        """A request may be prepared."""
        pending = self._pending.get(number)
        if pending is not None and not pending.entered.done():
            pending.entered.set_result(None)

    def on_accepted(self, number: int, prompt_token_ids: list[int] | None) -> None:
        """A request was accepted; its prompt is included if the engine prepared it."""
        pending = self._pending.pop(number, None)
        if pending is None or pending.accepted.done():
            return  # its client left meanwhile: `cancel` was called, or is about to be
        token_ids = pending.prompt_token_ids if prompt_token_ids is None else prompt_token_ids
        streams = self._make_streams(pending, token_ids)
        for choice, stream in enumerate(streams, number):
            self._choices[stream.request_id] = choice
            self._streams.add(choice, stream)
        pending.accepted.set_result(streams)

    def on_failed(self, number: int, sent: SentError) -> None:
        """A request was refused, or a call failed."""
        self._fail(number, received_error(sent))

    def _fail(self, number: int, error: RequestRefused | RequestFailed) -> None:
        call, pending = self._calls.pop(number, None), self._pending.pop(number, None)
        if call is not None and not call.done():
            call.set_exception(error)
        if pending is not None:
            pending.refuse(error)

    def on_replied(self, number: int, value: Any) -> None:
        """A call has this result."""
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            call.set_result(value)

    def on_prompt(self, piece: PromptPiece) -> None:
        """Log-probabilities of a prompt, before its first token."""
        self._streams.deliver_report([piece])

    def on_token(self, number: int, token_id: int, logprob: TokenLogprob | None) -> None:
        """A token of a choice."""
        self._streams.deliver_token(number, token_id, logprob)

    def on_finished(self, finish: Finish) -> None:
        """The end of a choice; its client may have left before it was known to be accepted."""
        if self._choices.pop(finish.request_id, None) is not None:
            self._streams.deliver_finish(finish)

    def fail_requests(self, why: str) -> None:
        """Fail every request, because the engine is gone."""
        self._lost = True
        error = RequestFailed(why, code="stopping", status=503, retry_after_s=5)
        for number in [*self._pending, *self._calls]:
            self._fail(number, error)
        self._choices.clear()
        self._streams.fail_all(why, code="stopping")

    def _make_streams(self, pending: _Pending, token_ids: list[int]) -> list[TokenStream]:
        """Create the token streams of a request's choices, as in the engine's process."""
        sampling = pending.request.sampling
        own = () if sampling.ignore_eos else self.info.stop_token_ids
        stops = frozenset(check_stop_tokens(sampling.stop_token_ids, own))
        top = sampling.prompt_logprobs
        report = None if top is None else PromptReport(token_ids, top)
        return [
            TokenStream(
                ChoiceInputs(
                    request_id=name,
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    stop_token_ids=stops,
                    report=report,
                    on_stop=self._end_choice,
                    on_end=lambda: None,
                ),
                self.preprocessor.detokenizer,
                make_stop_scope=pending.make_stop_scope,
            )
            for name in pending.request_ids
        ]

    def _end_choice(self, request_id: str, reason: FinishReason) -> None:
        number = self._choices.get(request_id)
        if number is not None:
            self._link.call("end", number, reason)

    def _on_failed(self, request_id: str) -> None:
        self._end_choice(request_id, FinishReason.ERROR)

    # --- requests ---

    async def generate_choices(
        self,
        *,
        prompt: Prompt,
        images: Sequence[ImageReference] = (),
        sampling: SamplingParams,
        request_ids: Sequence[str],
        priority: int = 0,
        ttft_target_ms: int | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: str = "",
        adapter: str = "",
        started: PartialOutput | None = None,
        make_stop_scope: Callable[[], StopScope] | None = None,
    ) -> list[TokenStream]:
        """Like `Engine.generate_choices`."""
        request = Request(
            request_id=request_ids[0],
            prompt_token_ids=[],
            sampling=sampling,
            priority=priority,
            ttft_target_ms=ttft_target_ms,
            cache_salt=cache_salt,
            tenant=tenant,
            session=session,
        )
        self._check_there()
        number, self._next = self._next, self._next + len(request_ids)
        pending = self._pending[number] = _Pending(request, tuple(request_ids), make_stop_scope)
        names = pending.request_ids
        self._link.call("admit", number, request, names, len(images), adapter, started)
        try:
            await pending.entered
            with pending.preparing.track_arrival(request.request_id):
                await self._prepare(pending, number, prompt, images)
            return await pending.accepted
        except BaseException:
            self._pending.pop(number, None)
            if not pending.refused:  # it may already be accepted, or about to be
                self._link.call("cancel", number, len(request_ids))
            raise

    async def _prepare(
        self, pending: _Pending, number: int, prompt: Prompt, images: Sequence[ImageReference]
    ) -> None:
        """Do the preparation that belongs to this process, and submit the request."""
        assert self._media is not None, "requests arrive only after loading"
        sampling = pending.request.sampling
        if sampling.prompt_logprobs is not None and not self._has_prompt_logprobs:
            raise prompt_logprobs_unavailable()
        await self._grammars.check_request(sampling)
        token_ids = await self._media.tokenize(prompt, images=bool(images))
        if images:
            await self._link.call_large("submit", number, token_ids, images)
        else:
            pending.prompt_token_ids = token_ids
            self._link.call("submit", number, token_ids, ())

    async def tokenize(self, prompt: Prompt, images: Sequence[ImageReference] = ()) -> list[int]:
        """Like `Engine.tokenize`."""
        assert self._media is not None, "requests arrive only after loading"
        if not images:
            return (await self._media.prepare(prompt, ())).token_ids
        token_ids: list[int] = await self.ask(
            "tokenize", await self._media.tokenize(prompt, images=True), images
        )
        return token_ids

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Call the engine and return the result.

        Blocks: until the engine has answered it.

        Raises:
            RequestRefused, RequestFailed: If the call fails, or the engine is gone.
        """
        self._check_there()
        number, self._next = self._next, self._next + 1
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._link.call_large(name, number, *arguments)
            return await call
        finally:
            self._calls.pop(number, None)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an HTTP request to the engine's process, as an ASGI application; a disconnect does not cancel it."""
        exchange = HttpExchange(scope, receive, send)

        async def answer() -> None:
            body = b"".join(await exchange.read_body(ROOMLESS_BYTES, _no_room))
            forwarded = {name: scope.get(name, b"") for name in FORWARDED}
            messages = await self.ask("forward", forwarded, body)
            exchange.started = True
            for message in messages:
                await send(message)

        await exchange.serve_response(answer())

    def _check_there(self) -> None:
        """Raise an error if the engine is gone."""
        if self._lost:
            raise RequestFailed("the engine is gone", code="stopping", status=503, retry_after_s=5)


async def _no_room(size: int) -> Any:
    message = limit_message(
        "the request body is too large for this path",
        value=f"{size} bytes",
        limit=f"{ROOMLESS_BYTES} bytes with several server.processes",
        remedy="send a smaller body",
    )
    raise RequestRefused(message, code="body_too_large", status=413)


logger = logging.getLogger(__name__)
FORWARDED = ("method", "path", "query_string", "headers")
"""Keys of a scope that the engine needs."""
END_S = 3.0
"""Maximum time to finish responses after the engine is gone."""


class ApiProcess:
    """Serves until the engine sends a stop, or is gone."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._over = asyncio.Event()
        self._end_s = END_S
        waiting_bytes_max = 2 * order.settings.body_bytes_max + WAITING_BYTES_MAX
        self._link = Link(on_lost=self._on_lost, waiting_bytes_max=waiting_bytes_max)
        self._metrics = ApiMetrics(tenants_max=order.settings.tenants_max)
        self._engine = RemoteEngine(order.config.model.served_name, self._link)
        self._link.receivers = (self._engine, self)
        self._tracing = open_tracing(order.settings.traces_url)
        engine, settings = self._engine, order.settings
        app = create_frontend(engine, settings, self._metrics, engine.forward, self._tracing)
        self._server = http_server(app, order.config)

    def on_beat(self) -> None:
        """The engine is alive."""

    def on_stop(self, within_s: float) -> None:
        """End, after the responses in progress, for which there is this time."""
        self._end_s = max(within_s, END_S)
        self._over.set()

    def _on_lost(self, why: str) -> None:
        self._engine.fail_requests(f"the engine {why}")
        self._over.set()

    async def serve(self, end: socket.socket) -> None:
        """Serve over this end of the link.

        Blocks: until the engine sends a stop or is gone, and then for at most `END_S`, or the time in the stop.
        """
        await self._link.open(end)
        beating, working = (asyncio.create_task(one) for one in (self._beat(), self._work()))
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([beating, working, over], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
        self._server.should_exit = True
        if self._engine.state == "loading":
            working.cancel()
        await asyncio.wait([working], timeout=self._end_s)
        if self._tracing is not None:
            await self._tracing.close()
        self._link.close()

    async def _work(self) -> None:
        """Load and serve."""
        listener = socket.socket(fileno=self._order.listener)
        serving = self._server.serve(sockets=[listener])
        try:
            if self._order.at_once:
                async with asyncio.TaskGroup() as group:
                    group.create_task(serving)
                    await self._load()
            else:
                await self._load()
                await serving
        except* Exception as errors:
            first = errors.exceptions[0]
            if not isinstance(first, VschedError):
                logger.exception("this process cannot serve")
            self._link.call("loaded", str(first) or repr(first))
            self._link.flush()

    async def _load(self) -> None:
        await self._engine.load()
        favour_event_loop()
        self._link.call("loaded", "")

    async def _beat(self) -> None:
        """Send metrics regularly, and drop the engine if it is silent."""
        while True:
            self._link.call("report", self._metrics.report())
            await asyncio.sleep(BEAT_S)
            if self._link.silent_s() > SILENT_S:
                self._link.drop_peer(f"has said nothing for {SILENT_S:g} s")


def main() -> int:
    """Read the order and serve."""
    end = socket.socket(fileno=int(sys.argv[1]))
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    setproctitle(f"vsched: api {order.index}")
    configure_logging(f"api {order.index}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine drains, and sends a stop
    forgo_models(order.config)

    async def run() -> None:
        await ApiProcess(order).serve(end)

    uvloop.run(run())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that load or tokenize


if __name__ == "__main__":
    sys.exit(main())
