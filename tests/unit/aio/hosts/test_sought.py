"""A host whose address is looked up is found, or lost if it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.patience import until
from vsched.aio.hosts import ray_hosts
from vsched.aio.hosts.link import Connect
from vsched.aio.hosts.ray_hosts import SoughtEnd
from vsched.errors import ConfigError


class End:
    """A connection to an address that sends nothing by itself."""

    def __init__(
        self, address: str, say: Callable[[bytes], None], cut: Callable[[str], None]
    ) -> None:
        self.address, self.say, self.cut = address, say, cut
        self.frames: list[bytes] = []
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
        self.ends: list[End] = []
        self.received: list[bytes] = []
        self.cuts: list[str] = []
        self.end = SoughtEnd(self.find, self.connect_to, self.received.append, self.cuts.append)

    async def find(self) -> str:
        return await asyncio.shield(self.address)

    def connect_to(self, address: str) -> Connect:
        def connect(say: Callable[[bytes], None], cut: Callable[[str], None]) -> End:
            self.ends.append(End(address, say, cut))
            return self.ends[-1]

        return connect


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
        seen.end.read()
        await asyncio.sleep(0)
        assert not seen.ends
        seen.address.set_result("there")
        await until(lambda: seen.ends)
        assert seen.end.send(b"2")
        (end,) = seen.ends
        assert (end.address, end.frames) == ("there", [b"1", b"2"])
        seen.end.read()
        assert end.reads == 1
        end.say(b"hello")
        assert seen.received == [b"hello"]


@pytest.mark.parametrize("answers", [True, False])
async def test_sought_host_must_answer_once_it_is_found(
    monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """It may have moved meanwhile: the loss has it looked up again."""
    monkeypatch.setattr(ray_hosts, "ANSWER_S", 60.0 if answers else 0.0)
    with search() as seen:
        seen.address.set_result("there")
        await until(lambda: seen.ends)
        if answers:
            seen.ends[0].say(b"hello")
            assert seen.end._timer is not None
            assert seen.end._timer.cancelled()
            seen.ends[0].cut("closed the connection")
        await until(lambda: seen.cuts)
        expected = "closed the connection" if answers else "did not answer for 0 s at there"
        assert seen.cuts == [expected]


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
        seen.address.set_result("there")
        await until(lambda: seen.cuts)
        assert seen.cuts[0] == "cannot be reached"


async def test_sought_host_is_looked_for_until_the_end_is_closed() -> None:
    seen = Search()
    await asyncio.sleep(0)
    seen.end.close()
    await until(seen.end._seeking.done)
    assert not seen.ends
