"""A host whose address is looked up is found, and found again after it moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.patience import until
from vsched.aio.hosts.ray_hosts import SoughtEnd
from vsched.aio.hosts.remote import Connect
from vsched.errors import ConfigError


class End:
    """A connection to an address that sends nothing by itself."""

    def __init__(
        self, address: str, say: Callable[[bytes], None], cut: Callable[[str], None]
    ) -> None:
        self.address, self.say, self.cut = address, say, cut
        self.frames: list[bytes] = []
        self.hung_up = 3
        self.reads = 0
        self.closed = False

    def send(self, frame: bytes) -> bool:
        self.frames.append(frame)
        return not self.closed

    def read(self) -> None:
        self.reads += 1

    def close(self) -> None:
        self.closed = True


class Search:
    """Resolves addresses, and opens connections to them."""

    def __init__(self) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.requested = 0
        self.ends: list[End] = []
        self.received: list[bytes] = []
        self.cuts: list[str] = []
        self.end = SoughtEnd(
            self.find, self.connect_to, self.received.append, self.cuts.append, ask_again_s=0
        )

    async def find(self) -> str:
        self.requested += 1
        return await asyncio.shield(self.address)

    def connect_to(self, address: str) -> Connect:
        def connect(say: Callable[[bytes], None], cut: Callable[[str], None]) -> End:
            self.ends.append(End(address, say, cut))
            return self.ends[-1]

        return connect

    def moves_to(self, address: str) -> None:
        """Resolve to another address from now on."""
        if self.address.done():
            self.address = asyncio.get_running_loop().create_future()
        self.address.set_result(address)

    async def asks_again(self) -> None:
        """Wait until the next lookup has been answered."""
        requested = self.requested
        await until(lambda: self.requested >= requested + 2)


@contextmanager
def search() -> Iterator[Search]:
    found = Search()
    try:
        yield found
    finally:
        found.end.close()


async def test_sought_host_hears_everything_once_it_is_found() -> None:
    """Messages arrive in order, in both directions."""
    with search() as seen:
        assert seen.end.send(b"1")
        assert seen.end.hung_up == 0
        seen.end.read()
        await asyncio.sleep(0)
        assert not seen.ends
        seen.moves_to("there")
        await until(lambda: seen.ends)
        assert seen.end.send(b"2")
        (end,) = seen.ends
        assert (end.address, end.frames) == ("there", [b"1", b"2"])
        assert seen.end.hung_up == 3
        seen.end.read()
        assert end.reads == 1
        end.say(b"hello")
        assert seen.received == [b"hello"]


async def test_sought_host_is_told_again_where_it_went() -> None:
    """A repeated address changes nothing; a new one replaces the old connection."""
    with search() as seen:
        seen.moves_to("old")
        await until(lambda: seen.ends)
        seen.end.send(b"1")
        await seen.asks_again()
        assert len(seen.ends) == 1
        seen.moves_to("new")
        await until(lambda: len(seen.ends) == 2)
        old, new = seen.ends
        assert old.closed
        assert (new.address, new.frames) == ("new", [b"1"])


async def test_sought_host_stays_where_it_spoke() -> None:
    """No more lookups after the first message: the stream itself detects its loss."""
    with search() as seen:
        seen.moves_to("there")
        await until(lambda: seen.ends)
        seen.ends[0].say(b"hello")
        requested = seen.requested
        seen.moves_to("elsewhere")
        for _ in range(5):
            await asyncio.sleep(0)
        assert (seen.requested, len(seen.ends)) == (requested, 1)
        seen.ends[0].cut("closed the connection")
        assert seen.cuts == ["closed the connection"]


async def test_sought_host_that_will_never_be_is_lost() -> None:
    with search() as seen:
        seen.address.set_exception(ConfigError("there is no room"))
        await until(lambda: seen.cuts)
        assert seen.cuts == ["was not found: there is no room"]
        assert not seen.ends


async def test_moved_host_without_the_missed_frames_is_lost() -> None:
    with search() as seen:
        connect_to = seen.end._connect_to

        def closed(address: str) -> Connect:
            def connect(say: Callable[[bytes], None], cut: Callable[[str], None]) -> End:
                end = connect_to(address)(say, cut)
                end.close()
                assert isinstance(end, End)
                return end

            return connect

        seen.end._connect_to = closed
        seen.end.send(b"1")
        seen.moves_to("there")
        await until(lambda: seen.cuts)
        assert seen.cuts == ["cannot be reached"]


async def test_sought_host_is_looked_for_until_the_end_is_closed() -> None:
    seen = Search()
    await asyncio.sleep(0)
    seen.end.close()
    await until(seen.end._seeking.done)
    assert not seen.ends
