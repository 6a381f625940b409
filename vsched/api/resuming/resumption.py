"""Going on with what an engine left when it was killed.

A request is read, checked, prepared and accepted as when it came, under its old id; only its seed and the tokens that
its answer had are those of before. It may be refused now, and then ends with that error. Nobody waits for it at first:
its client asks for it by its id. What was answered when engines died again and again is given up, for it may be why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from starlette.types import Message

from vsched.aio.streams.stream import failure_of
from vsched.api.choices.accepted import AcceptedAnswers
from vsched.api.completions import CheckedRequest, CompletionEndpoint
from vsched.api.errors import ParameterRefused
from vsched.api.http_exchange import HttpExchange
from vsched.api.resuming.answers import ResumedRequest
from vsched.config import Config
from vsched.errors import RequestFailed, RequestRefused, limit_message
from vsched.record.journal import KeptRequest, LeftRequest, Progress, RequestJournal, open_journal
from vsched.record.left import Begun, Ended, read_left

logger = logging.getLogger(__name__)
RESUMED_MAX = 2
"""A request that was resumed so often when the server died once more is not resumed again."""
_AT_ONCE = 8
"""Requests that are prepared at a time."""
_AGAIN_S = 1.0
"""How soon a request is tried again for which there is no room: those before it have to end first."""


class Resumption:
    """The requests that were left, and those that are being answered, for the next engine.

    Attributes:
        journal: Where requests are kept; None where they are not.
    """

    def __init__(
        self,
        journal: RequestJournal | None = None,
        *,
        record: Path = Path(),
        keep_s: float = 600.0,
        bytes_max: int = 256 << 20,
    ) -> None:
        """Resume from a journal and the record beside it; answers wait for clients for `keep_s`, in `bytes_max`."""
        self.journal = journal
        self._record = record
        self._keep_s = keep_s
        self._bytes_max = bytes_max
        self._is_read = journal is None
        self._requests: dict[str, ResumedRequest] = {}
        self._progress: dict[str, Progress] = {}
        self._endpoints: Mapping[str, CompletionEndpoint] = {}

    def serve(self, endpoints: Mapping[str, CompletionEndpoint]) -> None:
        """Take what answers requests, by the path that they are sent to."""
        self._endpoints = endpoints

    # --- at the start ---

    async def read(self) -> None:
        """Read what was left; call it before another record is begun.

        Blocks: for as long as the replay of a segment of the record takes, in a thread; not at all where nothing was
        left.
        """
        journal = self.journal
        if journal is None:
            return
        left = await asyncio.to_thread(lambda: list(journal.left()))
        if left:
            ended = await asyncio.to_thread(self._read_record, journal, left)
            for one in left:
                self._take(one, ended.get(one.request.request_id))
            logger.info(
                "%d requests were left by a server that died: %d go on",
                len(left),
                sum(not one.ended for one in self._requests.values()),
            )
        self._is_read = True

    def _read_record(self, journal: RequestJournal, left: list[LeftRequest]) -> dict[str, Ended]:
        """Look up what their answers had, and keep it: another record is about to take the place of this one."""
        # Several answers to a request are drawn from the beginning again: they go on together or not at all.
        names = [one.request.request_id for one in left if one.request.answers == 1]
        found = read_left(self._record, names)
        if found.trouble:
            logger.error(
                "the record is not read to its end, answers go on behind what it tells before that: %s. Remedy: none "
                "is needed; `vsched replay` tells more",
                found.trouble,
            )
        for one in left:
            name = one.request.request_id
            begun = found.begun.get(name, one.progress.begun)
            self._progress[name] = msgspec.structs.replace(one.progress, begun=begun)
            self._note(journal, name)
        return found.ended

    def _note(self, journal: RequestJournal, name: str) -> None:
        try:
            journal.note(name, self._progress[name])
        except OSError as error:
            logger.error("%s is resumed from where it was before: %s", name, error.strerror)  # noqa: TRY400 - it says it all

    def _take(self, left: LeftRequest, ended: Ended | None) -> None:
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
                "the request was being answered each time that the server died, and may be why",
                value=f"resumed {left.progress.resumed} times",
                limit=RESUMED_MAX,
                remedy="send it again once it is known why the server died",
            )
            resumed.fail(RequestFailed(message, code="not_resumed"))
        elif request.path not in self._endpoints:
            resumed.fail(
                RequestFailed(f"{request.path} is not served any more", code="not_resumed")
            )

    # --- while the server runs ---

    async def run(self) -> None:
        """Have the engine, which is ready, accept what was left, oldest first.

        Where it is cancelled, for the server stops, those that were not accepted are left for the next one.

        Blocks: until each is accepted or refused; one for which there is no room waits for up to `keep_s`.
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
            # Counted before the request is read, since reading it may crash the server.
            progress = self._progress[request.request_id]
            self._progress[request.request_id] = msgspec.structs.replace(
                progress, resumed=progress.resumed + 1
            )
            if self.journal is not None:
                self._note(self.journal, request.request_id)
            job = await self._job(request)
            begun = progress.begun
            if job.sampling.logprobs is not None or job.sampling.prompt_logprobs is not None:
                begun = None  # what was told of its tokens is in no record
            answers = await self._accept(request, job, begun)
        except (RequestRefused, RequestFailed) as error:
            resumed.fail(error)
        except Exception:
            logger.exception("request %s was not resumed", request.request_id)
            resumed.fail(RequestFailed("the server made a mistake"))
        else:
            resumed.accepted(job, answers.generations)

    async def _job(self, request: KeptRequest) -> CheckedRequest:
        """Read what was sent once more; what was drawn and told of the time is as it was."""
        exchange = _exchange(request)
        try:
            job = await self._endpoints[request.path].read(exchange, request.request_id)
        finally:
            exchange.release_room()
        sampling = msgspec.structs.replace(job.sampling, seed=request.seed)
        return msgspec.structs.replace(job, sampling=sampling, created=request.created)

    async def _accept(
        self, request: KeptRequest, job: CheckedRequest, begun: Begun | None
    ) -> AcceptedAnswers:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._keep_s
        while True:
            answers = AcceptedAnswers()
            try:
                await self._endpoints[request.path].accept(job, answers, request.tenant, begun)
            except RequestRefused as error:
                answers.abort()
                if error.status not in (429, 503) or loop.time() >= give_up_s:
                    raise
                await asyncio.sleep(_AGAIN_S)
            except BaseException:
                answers.abort()
                raise
            else:
                return answers

    # --- what clients get ---

    def find(self, name: str, path: str, tenant: str) -> ResumedRequest:
        """Return a request that was sent to a path by a tenant: by the id of its answer, or the one its client gave it.

        Raises:
            RequestRefused: When there is none, or several; or it is not known yet.
        """
        if not self._is_read:
            message = (
                "the server is loading, and does not know yet what was left. Remedy: try again."
            )
            raise RequestRefused(message, code="not_ready", status=503, retry_after_s=5)
        mine = [
            one
            for one in self._requests.values()
            if one.request.path == path
            and one.request.tenant == tenant
            and name in (one.request.request_id, one.request.given_id)
        ]
        exact = [one for one in mine if one.request.request_id == name]
        found = exact or mine
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.request.request_id for one in found[:8])
            message = f"several requests have this X-Request-Id. Remedy: ask by one of {names}."
            raise ParameterRefused(message, param="id", code="ambiguous_id", status=409)
        message = (
            "no answer is kept under this id: answers are kept that a server began before it was killed, with "
            "record.resume, until they are read or record.resume_keep_s is over. Remedy: send the request again."
        )
        raise ParameterRefused(message, param="id", code="answer_unknown", status=404)

    def told(self, resumed: ResumedRequest) -> None:
        """Hear that a client has all of an answer: it need not survive this server any more."""
        if resumed.ended and self.journal is not None:
            self.journal.end(resumed.request.request_id)

    def _on_end(self, resumed: ResumedRequest) -> None:
        """Keep the answer for a time, and let others go, the oldest first, where they are too large together."""
        name = resumed.request.request_id
        asyncio.get_running_loop().call_later(self._keep_s, self._forget, name)
        if self.journal is not None and resumed.failed_for_good:
            self.journal.end(name)
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
            self.journal.end(name)


def open_resumption(config: Config) -> Resumption:
    """Return what resumes as a configuration says.

    Raises:
        ConfigError: As `open_journal` does.
    """
    record = config.record
    return Resumption(
        open_journal(config),
        record=Path(record.path),
        keep_s=record.resume_keep_s,
        bytes_max=record.resume_bytes,
    )


def _exchange(request: KeptRequest) -> HttpExchange:
    """Return an exchange that brings what was sent, and whose client never leaves."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": request.path,
        "headers": [(b"content-length", b"%d" % len(request.body))],
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": request.body}

    async def send(message: Message) -> None:
        raise AssertionError(f"nobody is there to hear {message['type']}")

    return HttpExchange(scope, receive, send)
