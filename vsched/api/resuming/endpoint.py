"""GET of a resumed request's response by id, as one body or as a stream from any event on."""

from __future__ import annotations

import msgspec
from starlette.datastructures import QueryParams
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from vsched.api.completions import CompletionEndpoint
from vsched.api.errors import ParameterRefused, out_of_bounds
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import RequestRecord
from vsched.api.middleware.tenants import tenant_of
from vsched.api.not_served import not_served
from vsched.api.resuming.resumption import Resumption

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_EVENTS_MAX = 2**53


class KeptAnswerRoute(Route):
    """The route of kept answers below a path; other methods, and known paths that are not served, do not match."""

    def __init__(self, path: str, endpoint: KeptAnswerEndpoint) -> None:
        super().__init__(f"{path}/{{request_id:path}}", endpoint, methods=["GET"])

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match in full or not at all."""
        match, found = super().matches(scope)
        is_kept = match is Match.FULL and not_served(scope["path"]) is None
        return (match, found) if is_kept else (Match.NONE, {})


class KeptAnswerEndpoint:
    """ASGI application for the kept answers of one path."""

    def __init__(self, resumption: Resumption, path: str, endpoint: CompletionEndpoint) -> None:
        self._resumption = resumption
        self._path = path
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer_itself(exchange.until_disconnect(self._tell(exchange)))

    async def _tell(self, exchange: HttpExchange) -> None:
        scope = exchange.scope
        query = QueryParams(scope.get("query_string", b""))
        after, stream = _after(exchange, query), _flag(query)
        name = scope["path_params"]["request_id"]
        resumed = self._resumption.find(name, self._path, tenant_of(scope))
        job, choices = await resumed.read()
        if stream is not None:
            job = msgspec.structs.replace(job, stream=stream)
        if job.stream and len(choices.generations) == 1:
            exchange.number_events(after=after)
        elif after >= 0:
            message = "`starting_after` is for streams with a single choice. Remedy: read it from the beginning"
            raise ParameterRefused(f"{message}.", param="starting_after")
        await self._endpoint.tell(exchange, _Unmeasured(), choices, job)
        self._resumption.reported(resumed)


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
    if not sent.isascii() or not sent.isdigit() or int(sent[:17]) > _EVENTS_MAX:
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
