"""/v1/messages and /v1/messages/count_tokens, served as chat requests."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from vsched.api.completions import ChatEndpoint, CheckedRequest, check_ready
from vsched.api.contract import Generation, ServingContract
from vsched.api.dialects.blocks import AnswerBlocks
from vsched.api.dialects.messages.answer import CountedTokens, MessagesFormatter
from vsched.api.dialects.messages.request import NAMES, chat_request
from vsched.api.dialects.messages.schema import MessagesRequest
from vsched.api.dialects.naming import named_as
from vsched.api.fields.neutral import refuse_unsupported
from vsched.api.formatters import Formatter
from vsched.api.http_exchange import HttpExchange


class MessagesEndpoint(ChatEndpoint):
    """Endpoint of Anthropic's Messages API."""

    name = "messages"
    id_prefix = "msg"

    async def read(self, exchange: HttpExchange, request_id: str) -> CheckedRequest:
        """Read a request and convert it to a chat request.

        Raises:
            RequestRefused: If it cannot be served.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        tokens = self._engine.info.context_tokens
        request = await self._bodies.read(exchange, MessagesRequest, tokens=tokens)
        refuse_unsupported(request)
        with named_as(NAMES):
            return await self.job_of(chat_request(request), request_id)

    def _formatter(self, generation: Generation, job: CheckedRequest, index: int = 0) -> Formatter:
        assert not index, "requests of this API have a single choice"
        blocks = AnswerBlocks(job.wording(index) if job.wording is not None else None)
        return MessagesFormatter(generation, model=job.model, blocks=blocks)


class CountTokensEndpoint:
    """Endpoint that counts the input tokens of a message."""

    def __init__(self, engine: ServingContract, messages: MessagesEndpoint) -> None:
        self._engine = engine
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = HttpExchange(scope, receive, send)
        await exchange.answer(self._count(exchange))

    async def _count(self, exchange: HttpExchange) -> CountedTokens:
        check_ready(self._engine)
        job = await self._messages.read(exchange, "")
        return CountedTokens(len(await self._engine.tokenize(job.prompts[0], job.images)))
