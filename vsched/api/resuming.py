"""Resume the requests that a killed engine left behind.

A request is read, checked, prepared and submitted again, under its old id; only its seed and the tokens generated so
far are restored. It may be refused now, and then ends with that error. It has no reader at first: its client fetches
the response by id. A request that was running in repeated crashes is not resumed, because it may be the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.routing import Match
from starlette.types import Message, Scope

from vsched.aio.streams import OutputDelta, PromptReport, failure_of
from vsched.api.checked_request import CheckedRequest
from vsched.api.choices import AcceptedChoices
from vsched.api.completions import CompletionEndpoint
from vsched.api.contract import GenerationContract
from vsched.api.errors import ParameterRefused, out_of_bounds
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import RequestRecord
from vsched.api.middleware import tenant_of
from vsched.api.openapi import ApiRoute
from vsched.api.unsupported import not_served
from vsched.config import Config
from vsched.errors import RequestFailed, RequestRefused, limit_message
from vsched.kernel.commands import RequestTimes
from vsched.record.journal import (
    Ended,
    KeptRequest,
    LeftRequest,
    PartialOutput,
    RequestJournal,
    ResumeProgress,
    open_journal,
    read_left,
)
from vsched.types import FinishReason

_DELTA_BYTES = 256
"""Approximate memory of a one-token delta, without its text and alternatives."""
_TOP_BYTES = 128


class BufferedChoice:
    """Buffers the deltas of one choice, one token each.

    Attributes:
        deltas: Deltas so far.
        error: Error that ended it, if any.
        ended: True if no more deltas follow.
        bytes: Approximate memory of the deltas.
    """

    def __init__(self, source: GenerationContract, on_end: Callable[[], None]) -> None:
        self.source = source
        self.deltas: list[OutputDelta] = []
        self.error: RequestFailed | None = None
        self.ended = False
        self.bytes = 0
        self._on_end = on_end
        self._readers: dict[int, Callable[[], None]] = {}
        source.one_by_one()
        source.subscribe(self._on_news)
        self._on_news()

    def _on_news(self) -> None:
        try:
            while not self.ended and (delta := self.source.take()) is not None:
                self._add(delta)
        except RequestFailed as error:
            self.error, self.ended = error, True
        for reader in list(self._readers.values()):
            reader()
        if self.ended:
            self.source.subscribe(None)
            self._on_end()

    def _add(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        reported = sum(_TOP_BYTES * (1 + len(one.top)) for one in delta.logprobs or ())
        self.bytes += _DELTA_BYTES + len(delta.text) + reported
        self.ended = delta.finish_reason is not None

    def listen(self, key: int, reader: Callable[[], None] | None) -> None:
        """Call a reader when there are new deltas; None unsubscribes it."""
        if reader is None:
            self._readers.pop(key, None)
        else:
            self._readers[key] = reader


class BufferedGeneration:
    """A `GenerationContract` that replays a choice from the start; everything else is the choice's."""

    request_id: str
    prompt_token_ids: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    prompt_report: PromptReport | None
    times: RequestTimes
    reason: FinishReason | None

    def __init__(self, answer: BufferedChoice) -> None:
        self._answer = answer
        self._at = 0
        self._has_failed = False
        self.output_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer.source, name)

    def one_by_one(self) -> None:
        """No-op: each delta has one token."""

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        self._answer.listen(id(self), reader)

    def take(self) -> OutputDelta | None:
        answer = self._answer
        if self._at < len(answer.deltas):
            delta = answer.deltas[self._at]
            self._at += 1
            self.output_tokens += len(delta.token_ids)
            return delta
        if answer.error is not None and not self._has_failed:
            self._has_failed = True
            raise answer.error
        return None

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        while (delta := self.take()) is None:
            if self._answer.ended:
                raise StopAsyncIteration
            news = asyncio.Event()
            self.subscribe(news.set)
            try:
                await news.wait()
            finally:
                self.subscribe(None)
        return delta

    def abort(self) -> None:
        """No-op: the choice is kept for later readers."""


class ResumedRequest:
    """A resumed request, from the start of this server until its choices are dropped.

    Attributes:
        request: The saved request.
        error: Error that ended it, or that refused it now.
        job: The checked request, after its body was read again.
        answers: Its choices, once it is accepted.
    """

    def __init__(self, request: KeptRequest, on_end: Callable[[ResumedRequest], None]) -> None:
        self.request = request
        self.error: RequestRefused | RequestFailed | None = None
        self.job: CheckedRequest | None = None
        self.choices: list[BufferedChoice] = []
        self._on_end = on_end
        self._settled = asyncio.Event()

    @property
    def settled(self) -> bool:
        """True if it was accepted or has failed."""
        return self._settled.is_set()

    @property
    def ended(self) -> bool:
        """True if no more output follows."""
        whole = bool(self.choices) and all(answer.ended for answer in self.choices)
        return self.error is not None or whole

    @property
    def failed_for_good(self) -> bool:
        """True if it failed with an error that another server would report, too; a 503 depends on this server."""
        errors = [self.error, *(answer.error for answer in self.choices)]
        return any(error is not None and error.status != 503 for error in errors)

    @property
    def bytes(self) -> int:
        """Approximate memory of its choices."""
        return sum(answer.bytes for answer in self.choices)

    def fail(self, error: RequestRefused | RequestFailed) -> None:
        """End it with an error."""
        self.error = error
        self._settled.set()
        self._on_end(self)

    def accepted(self, job: CheckedRequest, generations: Sequence[GenerationContract]) -> None:
        """Start to buffer its choices."""
        self.job = msgspec.structs.replace(job, prompts=(), images=())
        self.choices = [BufferedChoice(one, self._on_answer_end) for one in generations]
        self._settled.set()
        if self.ended:
            self._on_end(self)

    def _on_answer_end(self) -> None:
        if self._settled.is_set() and self.ended:
            self._on_end(self)

    async def wait_accepted(self) -> tuple[CheckedRequest, AcceptedChoices]:
        """Return the checked request, and its choices from the start.

        Blocks: until it is accepted, which depends on the server's start and queue.

        Raises:
            RequestRefused, RequestFailed: If it failed.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        assert self.job is not None
        accepted = AcceptedChoices()
        readers = [BufferedGeneration(answer) for answer in self.choices]
        for first in range(0, len(readers), self.job.drawn):
            accepted.add(readers[first : first + self.job.drawn])
        return self.job, accepted


logger = logging.getLogger(__name__)
RESUMED_MAX = 2
"""A request that was resumed this many times before another crash is not resumed again."""
_AT_ONCE = 8
"""Number of requests prepared at a time."""
_AGAIN_S = 1.0
"""Retry interval of a request without room: earlier ones have to end first."""


class Resumption:
    """Requests left by an earlier engine, and the journal of running requests for the next one.

    Attributes:
        journal: Journal of requests; None if disabled.
    """

    def __init__(
        self,
        journal: RequestJournal | None = None,
        *,
        record: Path = Path(),
        keep_s: float = 600.0,
        bytes_max: int = 256 << 20,
    ) -> None:
        """Resume from a journal and a record; responses are kept for `keep_s`, within `bytes_max`."""
        self.journal = journal
        self._record = record
        self._keep_s = keep_s
        self._bytes_max = bytes_max
        self._is_read = journal is None
        self._requests: dict[str, ResumedRequest] = {}
        self._progress: dict[str, ResumeProgress] = {}
        self._endpoints: Mapping[str, CompletionEndpoint] = {}

    def serve(self, endpoints: Mapping[str, CompletionEndpoint]) -> None:
        """Set the endpoints, by path."""
        self._endpoints = endpoints

    # --- startup ---

    async def read_left(self) -> None:
        """Read the requests that were left; call it before a new record is started.

        Blocks: while a segment of the record is replayed, in a thread; returns at once if no requests were left.
        """
        journal = self.journal
        if journal is None:
            return
        left = await asyncio.to_thread(lambda: list(journal.left()))
        if left:
            ended = await asyncio.to_thread(self._read_record, journal, left)
            for one in left:
                self._restore_request(one, ended.get(one.request.request_id))
            logger.info(
                "%d requests were left by a server that died: %d go on",
                len(left),
                sum(not one.ended for one in self._requests.values()),
            )
        self._is_read = True

    def _read_record(self, journal: RequestJournal, left: list[LeftRequest]) -> dict[str, Ended]:
        """Read the generated tokens from the record, and save them: a new record is about to replace it."""
        # Requests with several choices are generated from the start: all choices continue together or not at all.
        names = [one.request.request_id for one in left if one.request.choices == 1]
        found = read_left(self._record, names)
        if found.trouble:
            logger.error(
                "the record could not be read to its end, so answers continue from an earlier token: %s. Remedy: none "
                "is needed; `vsched replay` has details",
                found.trouble,
            )
        for one in left:
            name = one.request.request_id
            started = found.started.get(name, one.progress.started)
            self._progress[name] = msgspec.structs.replace(one.progress, started=started)
            self._save_progress(journal, name)
        return found.ended

    def _save_progress(self, journal: RequestJournal, name: str) -> None:
        try:
            journal.append_progress(name, self._progress[name])
        except OSError as error:
            logger.error("the progress of %s is not saved: %s", name, error.strerror)  # noqa: TRY400 - it says it all

    def _restore_request(self, left: LeftRequest, ended: Ended | None) -> None:
        request = left.request
        resumed = ResumedRequest(request, self._on_end)
        if ended is not None and not ended.message:
            self._forget(request.request_id)
            return
        self._requests[request.request_id] = resumed
        if ended is not None:
            resumed.fail(RequestFailed(ended.message, code=ended.code))
        elif left.progress.resumed >= RESUMED_MAX:
            message = limit_message(
                "the request was running each time that the server died, and may be the cause",
                value=f"resumed {left.progress.resumed} times",
                limit=RESUMED_MAX,
                remedy="send it again once the cause of the crashes is known",
            )
            resumed.fail(RequestFailed(message, code="not_resumed"))
        elif request.path not in self._endpoints:
            resumed.fail(RequestFailed(f"{request.path} is no longer served", code="not_resumed"))

    # --- running ---

    async def submit_left(self) -> None:
        """Submit the requests that were left to the ready engine, oldest first.

        If it is cancelled because the server stops, requests not yet accepted are left for the next server.

        Blocks: until each is accepted or refused; a request without room waits for up to `keep_s`.
        """
        gate = asyncio.Semaphore(_AT_ONCE)
        due = [one for one in self._requests.values() if not one.ended]
        try:
            async with asyncio.TaskGroup() as group:
                for resumed in due:
                    await gate.acquire()
                    task = group.create_task(self._resume(resumed))
                    task.add_done_callback(lambda _: gate.release())
        finally:
            for resumed in due:
                if not resumed.settled:
                    resumed.fail(failure_of("the server is stopping", code="stopping"))

    async def _resume(self, resumed: ResumedRequest) -> None:
        request = resumed.request
        try:
            # Saved before the request is read, because reading it may crash the server.
            progress = self._progress[request.request_id]
            self._progress[request.request_id] = msgspec.structs.replace(
                progress, resumed=progress.resumed + 1
            )
            if self.journal is not None:
                self._save_progress(self.journal, request.request_id)
            job = await self._job(request)
            started = progress.started
            if job.sampling.logprobs is not None or job.sampling.prompt_logprobs is not None:
                started = None  # the record has no log-probabilities
            choices = await self._accept(request, job, started)
        except (RequestRefused, RequestFailed) as error:
            resumed.fail(error)
        except Exception:
            logger.exception("request %s was not resumed", request.request_id)
            resumed.fail(RequestFailed("the server made a mistake"))
        else:
            resumed.accepted(job, choices.generations)

    async def _job(self, request: KeptRequest) -> CheckedRequest:
        """Read and check the saved body again, with the original seed and creation time."""
        exchange = _exchange(request)
        try:
            job = await self._endpoints[request.path].read_request(exchange, request.request_id)
        finally:
            exchange.release_room()
        sampling = msgspec.structs.replace(job.sampling, seed=request.seed)
        return msgspec.structs.replace(job, sampling=sampling, created=request.created)

    async def _accept(
        self, request: KeptRequest, job: CheckedRequest, started: PartialOutput | None
    ) -> AcceptedChoices:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._keep_s
        while True:
            choices = AcceptedChoices()
            try:
                await self._endpoints[request.path].accept(job, choices, request.tenant, started)
            except RequestRefused as error:
                choices.abort()
                if error.status not in (429, 503) or loop.time() >= give_up_s:
                    raise
                await asyncio.sleep(_AGAIN_S)
            except BaseException:
                choices.abort()
                raise
            else:
                return choices

    # --- for clients ---

    def find(self, name: str, path: str, tenant: str) -> ResumedRequest:
        """Find the last request with this path, tenant, and response id or client-defined id.

        Raises:
            RequestRefused: If there is none, or the journal has not been read yet.
        """
        if not self._is_read:
            message = "the server is loading, and has not read the resumed requests yet. Remedy: try again."
            raise RequestRefused(message, code="not_ready", status=503, retry_after_s=5)
        mine = [
            one
            for one in self._requests.values()
            if one.request.path == path
            and one.request.tenant == tenant
            and name in (one.request.request_id, one.request.given_id)
        ]
        exact = [one for one in mine if one.request.request_id == name]
        if found := exact or mine:
            return found[-1]
        message = (
            "no answer is kept under this id: answers are kept that a server began before it was killed, with "
            "record.resume, until they are read or record.resume_keep_s is over. Remedy: send the request again."
        )
        raise ParameterRefused(message, param="id", code="answer_unknown", status=404)

    def mark_delivered(self, resumed: ResumedRequest) -> None:
        """Record that a client has received the whole response: the next server need not keep it."""
        if resumed.ended and self.journal is not None:
            self.journal.delete_request(resumed.request.request_id)

    def _on_end(self, resumed: ResumedRequest) -> None:
        """Keep a finished response for a time; drop the oldest ones if all are too large in total."""
        name = resumed.request.request_id
        asyncio.get_running_loop().call_later(self._keep_s, self._forget, name)
        if self.journal is not None:
            if resumed.failed_for_good:
                self.journal.delete_request(name)
            elif resumed.choices:  # it did not run when this server ended
                self._progress[name] = msgspec.structs.replace(self._progress[name], resumed=0)
                self._save_progress(self.journal, name)
        over = sum(one.bytes for one in self._requests.values()) - self._bytes_max
        for one in list(self._requests.values()):
            if over <= 0:
                break
            if one.ended:
                over -= one.bytes
                self._forget(one.request.request_id)

    def _forget(self, name: str) -> None:
        self._requests.pop(name, None)
        self._progress.pop(name, None)
        if self.journal is not None:
            self.journal.delete_request(name)


def open_resumption(config: Config) -> Resumption:
    """Create the resumption for a configuration.

    Raises:
        ConfigError: As in `open_journal`.
    """
    record = config.record
    return Resumption(
        open_journal(config),
        record=Path(record.path),
        keep_s=record.resume_keep_s,
        bytes_max=record.resume_bytes,
    )


def _exchange(request: KeptRequest) -> HttpExchange:
    """Create an exchange that delivers the saved body, and whose client never disconnects."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": request.path,
        "headers": [(b"content-length", b"%d" % len(request.body))],
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": request.body}

    async def send(message: Message) -> None:
        raise AssertionError(f"there is no client for {message['type']}")

    return HttpExchange(scope, receive, send)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_EVENT_DIGITS_MAX = 15


class KeptResponseRoute(ApiRoute):
    """The route of kept answers below a path; other methods, and known paths that are not served, do not match."""

    def __init__(self, endpoint: CompletionEndpoint, resumption: Resumption) -> None:
        """Serve the answers of requests to `endpoint`."""
        self._endpoint = endpoint
        self._resumption = resumption
        kinds: dict[str, Any] = {**endpoint.kinds, "request": None}
        super().__init__("GET", f"{endpoint.path}/{{request_id:path}}", self.send_kept, **kinds)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match in full or not at all."""
        match, found = super().matches(scope)
        is_kept = match is Match.FULL and not_served(scope["path"]) is None
        return (match, found) if is_kept else (Match.NONE, {})

    async def send_kept(self, exchange: HttpExchange) -> None:
        """Fetch the response to a request that was resumed after a crash."""
        await exchange.until_disconnect(self._send_kept(exchange))

    async def _send_kept(self, exchange: HttpExchange) -> None:
        scope = exchange.scope
        query = QueryParams(scope.get("query_string", b""))
        after, stream = _after(exchange, query), _flag(query)
        if stream is None and after < 0 and exchange.header(b"accept") == b"application/json":
            stream = False  # OpenAI's clients, which ask for streams by `stream`
        name = scope["path_params"]["request_id"]
        resumed = self._resumption.find(name, self._endpoint.path, tenant_of(scope))
        job, choices = await resumed.wait_accepted()
        if stream is not None:
            job = msgspec.structs.replace(job, stream=stream)
        if job.stream and len(choices.generations) == 1:
            exchange.number_events(after=after)
        elif after >= 0:
            message = "`starting_after` is for streams with a single choice. Remedy: read it from the beginning"
            raise ParameterRefused(f"{message}.", param="starting_after")
        await self._endpoint.send_response(exchange, _Unmeasured(), choices, job)
        self._resumption.mark_delivered(resumed)


class _Unmeasured(RequestRecord):
    """Records no metrics: the output was computed before."""

    def __init__(self) -> None:
        pass

    def output(self, answer: int = 0) -> None:
        """No-op."""


def _after(exchange: HttpExchange, query: QueryParams) -> int:
    """Number of the last event that the client has received, -1 for none."""
    sent = query.get("starting_after")
    if sent is None:
        sent = (exchange.header(b"last-event-id") or b"").decode("latin-1").strip()
    if not sent:
        return -1
    if not (sent.isascii() and sent.isdigit() and len(sent) <= _EVENT_DIGITS_MAX):
        raise out_of_bounds(
            "starting_after",
            value=sent[:40],
            limit="the id of an event, from 0",
            remedy="send the last id that the stream had, or none",
        )
    return int(sent)


def _flag(query: QueryParams) -> bool | None:
    """True or False if the query asks for or against a stream; None if it follows the original request."""
    sent = query.get("stream")
    if sent is None:
        return None
    if sent.lower() not in _FLAGS:
        raise out_of_bounds(
            "stream", value=sent[:40], limit="true or false", remedy="send one of them"
        )
    return _FLAGS[sent.lower()]
