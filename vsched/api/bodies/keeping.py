"""Keeping what was sent for the engine after this one."""

from __future__ import annotations

import asyncio

from vsched.api.http_exchange import HttpExchange
from vsched.api.middleware.request_id import sent_id
from vsched.api.middleware.tenants import tenant_of
from vsched.record.journal import KeptRequest, RequestJournal

_INLINE_BYTES = 64 * 1024
"""A body up to this size is written on the loop: that takes less than going to a thread."""


async def keep_request(
    journal: RequestJournal,
    exchange: HttpExchange,
    *,
    request_id: str,
    created: int,
    seed: int,
    answers: int,
) -> None:
    """Keep a request that is about to be accepted; the events of its stream have numbers then, to go on from.

    One for which there is no room is served all the same.
    """
    body, exchange.body = exchange.body, b""
    request = KeptRequest(
        request_id=request_id,
        given_id=sent_id(exchange.scope),
        path=exchange.scope["path"],
        tenant=tenant_of(exchange.scope),
        created=created,
        seed=seed,
        answers=answers,
        body=body,
    )
    if len(body) <= _INLINE_BYTES:
        kept = journal.keep(request)
    else:
        kept = await asyncio.to_thread(journal.keep, request)
    if kept and answers == 1:
        exchange.number_events()
