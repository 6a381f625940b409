"""A host whose address is looked up is found, or lost if it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.patience import until
from tests.unit.aio.hosts.test_stream import Side
from tests.unit.rank.fake_plugin import LAYOUT
from vsched.aio.hosts import remote
from vsched.aio.hosts.link import Connect, Kill, Opened, OpenGroups
from vsched.aio.hosts.remote import RemoteHost
from vsched.config.sections import DeadlinesConfig
from vsched.errors import ConfigError
from vsched.transport.arena import Arena


class End:
    """A connection to an address that sends nothing by itself."""

    def __init__(
        self, address: str, say: Callable[[bytes], None], cut: Callable[[str], None], *, takes: bool
    ) -> None:
        self.address, self.say, self.cut = address, say, cut
        self.frames: list[bytes] = []
        self.reads = 0
        self.takes = takes

    def send(self, frame: bytes) -> bool:
        self.frames.append(frame)
        return self.takes

    def read(self) -> None:
        self.reads += 1

    def close(self) -> None:
        """No-op."""


class Search:
    """A host that is looked up; `takes` is whether its links take frames."""

    def __init__(self) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ends: list[End] = []
        self.losses: list[str] = []
        self.opened = 0
        self.takes = True
        self.arena = Arena.create(LAYOUT)
        self.host = RemoteHost(
            "ray generate-0",
            (self.find, self.connect_to),
            engine="engine",
            groups=["generate-0"],
            arena=self.arena,
            deadlines=DeadlinesConfig(),
            open_s=0.0,
            on_open=self.open,
            on_lost=self.losses.append,
        )

    def open(self) -> None:
        self.opened += 1

    async def find(self) -> str:
        return await asyncio.shield(self.address)

    def connect_to(self, address: str) -> Connect:
        def connect(say: Callable[[bytes], None], cut: Callable[[str], None]) -> End:
            self.ends.append(End(address, say, cut, takes=self.takes))
            return self.ends[-1]

        return connect

    async def found(self) -> End:
        self.address.set_result("there")
        await until(lambda: self.ends)
        return self.ends[0]

    def answer(self, end: End) -> None:
        there = Side()
        there.stream.put(Opened())
        end.say(there.frames[0])


@pytest.fixture
async def seen() -> AsyncIterator[Search]:
    seen = Search()
    yield seen
    seen.host.close()
    seen.arena.close()


async def test_sought_host_hears_everything_once_it_is_found(seen: Search) -> None:
    """Messages arrive in order, in both directions."""
    seen.host.read()
    await asyncio.sleep(0)
    assert not seen.ends
    end = await seen.found()
    seen.host.stream.put(Kill(0))
    there = Side()
    for frame in end.frames:
        there.stream.receive(frame)
    assert end.address == "there"
    assert [type(one) for one in there.received] == [OpenGroups, Kill]
    seen.host.read()
    assert end.reads == 1
    seen.answer(end)
    assert seen.opened == 1


@pytest.mark.parametrize("answers", [True, False])
async def test_sought_host_must_answer_once_it_is_found(
    seen: Search, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """It may have moved meanwhile: the loss has it looked up again."""
    monkeypatch.setattr(remote, "ANSWER_S", 60.0 if answers else 0.01)
    end = await seen.found()
    if answers:
        seen.answer(end)
        assert seen.host._opening is not None
        assert seen.host._opening.cancelled()
        end.cut("closed the connection")
    await until(lambda: seen.losses)
    expected = "closed the connection" if answers else "did not answer for 0.01 s at there"
    assert seen.losses == [expected]


async def test_sought_host_that_will_never_be_is_lost(seen: Search) -> None:
    seen.address.set_exception(ConfigError("there is no room"))
    await until(lambda: seen.losses)
    assert seen.losses == ["was not found: there is no room"]
    assert not seen.ends


async def test_moved_host_without_the_missed_frames_is_lost(seen: Search) -> None:
    seen.takes = False
    seen.address.set_result("there")
    await until(lambda: seen.losses)
    assert seen.losses == ["cannot be reached"]


async def test_sought_host_is_looked_for_until_the_start_is_over(seen: Search) -> None:
    await asyncio.sleep(0)
    seen.host.close()
    assert seen.host._seeking is not None
    await until(seen.host._seeking.done)
    assert not seen.ends
