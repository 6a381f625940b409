"""A link to a host whose address has to be asked for, and may become another one before the host has answered.

Whoever starts hosts may start a lost one again somewhere else, and its old address may be told for a while. So the
address is asked for again until the host has spoken, and everything said so far is said again at a new one: little, for
a stream lets no more than its window go without an answer. Once the host has spoken, its address stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from vsched.aio.hosts.remote import Connect, EngineEnd
from vsched.errors import VschedError

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 1.0
"""How long a host may be silent at an address until the address is asked for again."""
Find = Callable[[], Awaitable[str]]
"""Returns where a host is, as soon as it is anywhere; raises a `VschedError` when it will never be."""


class SoughtEnd:
    """The engine's end of a link; frames wait until the host is found."""

    def __init__(
        self,
        find: Find,
        connect_to: Callable[[str], Connect],
        on_frame: Callable[[bytes], None],
        on_cut: Callable[[str], None],
        *,
        ask_again_s: float = ASK_AGAIN_S,
    ) -> None:
        """Begin to look; `connect_to` returns what opens a link to an address."""
        self._find = find
        self._connect_to = connect_to
        self._on_frame = on_frame
        self._on_cut = on_cut
        self._ask_again_s = ask_again_s
        self._address = ""
        self._end: EngineEnd | None = None
        self._said: list[bytes] = []
        self._heard = False
        self._seeking = asyncio.get_running_loop().create_task(self._seek())

    @property
    def address(self) -> str:
        """Where the host is; empty while that is not known."""
        return self._address

    @property
    def host_key(self) -> bytes:
        """The public key that the host has; empty while it is not found."""
        return b"" if self._end is None else self._end.host_key

    @property
    def hung_up(self) -> int:
        """How often the host hung up where it was looked for last."""
        return 0 if self._end is None else self._end.hung_up

    async def _seek(self) -> None:
        while not self._heard:
            try:
                address = await self._find()
            except VschedError as error:
                self._on_cut(f"was not found: {error}")
                return
            if address != self._address and not self._heard:
                self._address = address
                if not self._move(self._connect_to(address)):
                    self._on_cut("cannot be reached")
                    return
            await asyncio.sleep(self._ask_again_s)

    def _move(self, connect: Connect) -> bool:
        """Go to another address, and say there what was said."""
        if self._end is not None:
            self._end.close()
        logger.info("looking for a host at %s", self._address)
        end = self._end = connect(self._hear, self._on_cut)
        return all(end.send(frame) for frame in self._said)

    def _hear(self, frame: bytes) -> None:
        if not self._heard:
            self._heard = True
            self._said.clear()
            self._seeking.cancel()
        self._on_frame(frame)

    def send(self, frame: bytes) -> bool:
        """Queue a frame, never waiting."""
        if not self._heard:
            self._said.append(frame)
        return self._end is None or self._end.send(frame)

    def read(self) -> None:
        """Take everything that has come."""
        if self._end is not None:
            self._end.read()

    def close(self) -> None:
        """Look no further, and close."""
        self._seeking.cancel()
        if self._end is not None:
            self._end.close()


def connect_by_search(find: Find, connect_to: Callable[[str], Connect]) -> Connect:
    """Return what opens links to a host that `find` finds."""

    def connect(on_frame: Callable[[bytes], None], on_cut: Callable[[str], None]) -> SoughtEnd:
        return SoughtEnd(find, connect_to, on_frame, on_cut)

    return connect
