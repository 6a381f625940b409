"""Requests that wait for the decision of the front-door policy, in the shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from vsched.errors import RequestRefused
from vsched.kernel.commands import AdmitArrival, RejectArrival
from vsched.kernel.events import Arrived, Event, Withdrawn

REDIRECT = 307
"""Status of a redirect: the client repeats the request with its method and body."""


class PendingArrivals:
    """Sends arrivals and withdrawals to the kernel, and waits for its answers."""

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._last = 0
        self._asked: dict[int, asyncio.Future[RejectArrival | None]] = {}
        self._inside: set[int] = set()

    async def enter(self, arrival: Arrived) -> int:
        """Wait until a request is admitted; return its arrival id, which replaces that of `arrival`.

        The caller must call `submitted` or `leave` with it.

        Blocks: while the policy holds the request, up to a minute.

        Raises:
            RequestRefused: If it is shed or redirected.
        """
        self._last += 1
        arrival_id = self._last
        self._asked[arrival_id] = asked = asyncio.get_running_loop().create_future()
        self._inside.add(arrival_id)
        try:
            self._handle(msgspec.structs.replace(arrival, arrival_id=arrival_id))
            rejected = asked.result() if asked.done() else await asked
        except BaseException:
            self.leave(arrival_id)
            raise
        finally:
            del self._asked[arrival_id]
        if rejected is not None:
            self._inside.discard(arrival_id)
            raise rejection_error(rejected)
        return arrival_id

    def answer(self, command: AdmitArrival | RejectArrival) -> None:
        """Take an answer from the kernel."""
        asked = self._asked.get(command.arrival_id)
        if asked is not None and not asked.done():
            asked.set_result(command if isinstance(command, RejectArrival) else None)

    def submitted(self, arrival_id: int) -> None:
        """Note that a request is submitted, which ends its arrival."""
        self._inside.discard(arrival_id)

    def leave(self, arrival_id: int) -> None:
        """Withdraw a request, unless it is submitted."""
        if arrival_id in self._inside:
            self._inside.discard(arrival_id)
            self._handle(Withdrawn(arrival_id))


def rejection_error(command: RejectArrival) -> RequestRefused:
    """Return the error for the client of a rejected request."""
    if command.base_url:
        base = command.base_url.rstrip("/")
        return RequestRefused(
            f"this server has no room for the request in time; {base} may serve it",
            code="redirected",
            status=REDIRECT,
            location=base,
        )
    return RequestRefused(
        f"{command.reason}.",
        code="shed",
        status=command.status,
        retry_after_s=command.retry_after_s,
    )
