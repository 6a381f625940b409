"""/v1/responses, served as chat requests."""

from __future__ import annotations

from functools import partial

import msgspec

from vsched.api.completions import ChatEndpoint, CheckedRequest
from vsched.api.contract import Generation
from vsched.api.dialects.blocks import AnswerBlocks
from vsched.api.dialects.naming import named_as
from vsched.api.dialects.responses.answer import ResponsesFormatter
from vsched.api.dialects.responses.request import NAMES, chat_request
from vsched.api.dialects.responses.schema import ResponsesRequest
from vsched.api.fields.neutral import refuse_unsupported
from vsched.api.formatters import Formatter, chat_logprob
from vsched.api.http_exchange import HttpExchange


class ResponsesEndpoint(ChatEndpoint):
    """Endpoint of OpenAI's Responses API, without state."""

    name = "responses"
    id_prefix = "resp"

    async def read(self, exchange: HttpExchange, request_id: str) -> CheckedRequest:
        """Read a request and convert it to a chat request.

        Raises:
            RequestRefused: If it cannot be served.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        tokens = self._engine.info.context_tokens
        request = await self._bodies.read(exchange, ResponsesRequest, tokens=tokens)
        refuse_unsupported(request)
        with named_as(NAMES):
            job = await self.job_of(chat_request(request), request_id)
        return msgspec.structs.replace(job, requested=msgspec.structs.replace(request, input=""))

    def _formatter(self, generation: Generation, job: CheckedRequest, index: int = 0) -> Formatter:
        assert not index, "requests of this API have a single choice"
        assert isinstance(job.requested, ResponsesRequest)
        return ResponsesFormatter(
            generation,
            created=job.created,
            model=job.model,
            blocks=AnswerBlocks(
                job.wording(index) if job.wording is not None else None,
                logprobs=job.sampling.logprobs is not None,
            ),
            requested=job.requested,
            reported=partial(chat_logprob, preprocessor=self._engine.preprocessor),
        )
