"""The shell's side of the front door: requests ask to come in, and wait where the policy holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from vsched.errors import RequestRefused
from vsched.kernel.commands import Enter, TurnAway
from vsched.kernel.events import Event, Knocked, Withdrawn

REDIRECT = 307
"""The status of a redirect: the client sends the same request, method and body included."""


class Doorway:
    """Tells the kernel who knocks and who leaves, and hands its answers on."""

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._last = 0
        self._asked: dict[int, asyncio.Future[TurnAway | None]] = {}
        self._inside: set[int] = set()

    async def enter(self, arrival: Knocked) -> int:
        """Return the number of a request at the door once it may come in; that of `arrival` counts for nothing.

        Who has it calls `submitted` or `leave` with it.

        Blocks: for as long as the policy holds the request, a minute at most.

        Raises:
            RequestRefused: When it is turned away: shed, or redirected.
        """
        self._last += 1
        knock = self._last
        self._asked[knock] = asked = asyncio.get_running_loop().create_future()
        self._inside.add(knock)
        try:
            self._handle(msgspec.structs.replace(arrival, knock=knock))
            turned_away = asked.result() if asked.done() else await asked
        except BaseException:
            self.leave(knock)
            raise
        finally:
            del self._asked[knock]
        if turned_away is not None:
            self._inside.discard(knock)
            raise turned_away_error(turned_away)
        return knock

    def answer(self, command: Enter | TurnAway) -> None:
        """Take the kernel's answer."""
        asked = self._asked.get(command.knock)
        if asked is not None and not asked.done():
            asked.set_result(command if isinstance(command, TurnAway) else None)

    def submitted(self, knock: int) -> None:
        """Take note that the kernel hears of a request by its submission."""
        self._inside.discard(knock)

    def leave(self, knock: int) -> None:
        """Tell the kernel that a request will not be submitted, if it still awaits that."""
        if knock in self._inside:
            self._inside.discard(knock)
            self._handle(Withdrawn(knock))


def turned_away_error(command: TurnAway) -> RequestRefused:
    """Return the error that a client gets who is turned away."""
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
