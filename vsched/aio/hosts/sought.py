"""A link to a host whose address is looked up, and may change until the host has answered.

Ray may restart a lost host elsewhere and report the old address for a while. So the address is looked up again until
the host answers, and all frames sent so far are repeated at a new address. These are few: a stream sends at most its
window without an acknowledgement. Once the host has answered, its address does not change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from vsched.aio.hosts.remote import Connect, EngineEnd
from vsched.errors import VschedError

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 1.0
"""Interval of address look-ups while the host has not answered."""
Find = Callable[[], Awaitable[str]]
"""Returns a host's address once it has one; raises a `VschedError` if it never will."""


class SoughtEnd:
    """The engine's end of a link; frames are queued until the host is found."""

    def __init__(
        self,
        find: Find,
        connect_to: Callable[[str], Connect],
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
        *,
        ask_again_s: float = ASK_AGAIN_S,
    ) -> None:
        """Start looking up the address; `connect_to` returns a function that connects to an address."""
        self._find = find
        self._connect_to = connect_to
        self._on_frame = on_frame
        self._on_cut = on_cut
        self._ask_again_s = ask_again_s
        self._address = ""
        self._end: EngineEnd | None = None
        self._said: list[bytes] = []
        self._received = False
        self._seeking = asyncio.get_running_loop().create_task(self._seek())

    @property
    def hung_up(self) -> int:
        """Number of connections that the host closed during the handshake, at the latest address."""
        return 0 if self._end is None else self._end.hung_up

    async def _seek(self) -> None:
        while not self._received:
            try:
                address = await self._find()
            except VschedError as error:
                self._on_cut(f"was not found: {error}")
                return
            if address != self._address and not self._received:
                self._address = address
                if not self._move(self._connect_to(address)):
                    self._on_cut("cannot be reached")
                    return
            await asyncio.sleep(self._ask_again_s)

    def _move(self, connect: Connect) -> bool:
        """Connect to another address, and repeat all frames there."""
        if self._end is not None:
            self._end.close()
        logger.info("looking for a host at %s", self._address)
        end = self._end = connect(self._receive, self._on_cut)
        return all(end.send(frame) for frame in self._said)

    def _receive(self, frame: bytes) -> None:
        if not self._received:
            self._received = True
            self._said.clear()
            self._seeking.cancel()
        self._on_frame(frame)

    def send(self, frame: bytes) -> bool:
        """Queue a frame, without waiting; return False if that fails."""
        if not self._received:
            self._said.append(frame)
        return self._end is None or self._end.send(frame)

    def read(self) -> None:
        """Handle all frames that have arrived."""
        if self._end is not None:
            self._end.read()

    def close(self) -> None:
        """Stop looking up the address, and close."""
        self._seeking.cancel()
        if self._end is not None:
            self._end.close()


def connect_by_search(find: Find, connect_to: Callable[[str], Connect]) -> Connect:
    """Return a function that opens links to the host whose address `find` returns."""

    def connect(on_frame: Callable[[bytes], None], on_cut: Callable[[str], None]) -> SoughtEnd:
        return SoughtEnd(find, connect_to, on_frame, on_cut)

    return connect
