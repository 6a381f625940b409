"""Save request bodies, so that the next engine can resume the requests."""

from __future__ import annotations

import asyncio

from vsched.api.http_exchange import HttpExchange
from vsched.api.middleware.access import tenant_of
from vsched.api.middleware.response_tags import sent_id
from vsched.record.journal import KeptRequest, RequestJournal

_INLINE_BYTES = 64 * 1024
"""Bodies up to this size are written on the event loop: that is faster than a switch to a thread."""


async def keep_request(
    journal: RequestJournal,
    exchange: HttpExchange,
    *,
    request_id: str,
    created: int,
    seed: int,
    choices: int,
) -> None:
    """Save a request that is about to be accepted, and number its stream events, so that clients can resume.

    A request that does not fit into the journal is served without being saved.
    """
    body, exchange.body = exchange.body, b""
    request = KeptRequest(
        request_id=request_id,
        given_id=sent_id(exchange.scope),
        path=exchange.scope["path"],
        tenant=tenant_of(exchange.scope),
        created=created,
        seed=seed,
        choices=choices,
        body=body,
    )
    if len(body) <= _INLINE_BYTES:
        kept = journal.keep(request)
    else:
        kept = await asyncio.to_thread(journal.keep, request)
    if kept and choices == 1:
        exchange.number_events()
