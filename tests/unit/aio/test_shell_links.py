"""A report that cannot be read, or whose handler raises, does not block the reports behind it."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path

import pytest
import zmq

from tests.patience import patience
from tests.unit.aio.ranks import ShellHarness, Stream
from tests.unit.rank.fake_plugin import expected_tokens
from vsched.failures import ErrorKind
from vsched.testing import make_request
from vsched.transport.zmq_link import LeaderLink, RankLink, rank_identity
from vsched.wire import Hello, Loading, RankFailed, RankReport, encode_report


async def test_link_goes_on_after_a_report_that_could_not_be_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The descriptor is edge-triggered: if an exception stopped the drain, the frames behind it would never be read."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    received: list[bytes] = []
    done = asyncio.Event()

    def on_frame(identity: bytes, frame: bytes) -> None:
        received.append(frame)
        if frame == b"last":
            done.set()
        if frame.startswith(b"bad"):
            raise RuntimeError("a progress bar")

    link = LeaderLink(context, f"ipc://{tmp_path}/group", on_frame)
    rank = RankLink(link.address, 0)
    sent = [b"first", b"bad", b"ready", b"bad too", b"bad again", b"last"]
    for frame in sent:
        rank.send(frame)
    async with patience():
        await done.wait()
    assert received == sent
    assert caplog.text.count("RuntimeError: a progress bar") == 3
    rank.close()
    link.close()
    context.destroy(linger=0)


def garbled(report: RankReport) -> bytes:
    """A frame whose text is not UTF-8: `Loading`'s what, `Failure`'s kind, `Hello`'s secret."""
    body = encode_report(report)[4:]
    assert body.count(b"ab") == 1
    body = body.replace(b"ab", b"\xff\xfe")
    return zlib.crc32(body).to_bytes(4, "little") + body


REPORTS = [
    Loading("ab", 0.5),
    RankFailed(ErrorKind.INTERNAL, "ab", "why"),
    RankFailed(ErrorKind.INTERNAL, "why", "ab"),
    Hello(0, "ab"),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
async def test_shell_report_that_is_no_text_loses_the_group(
    played: ShellHarness, report: RankReport
) -> None:
    """It is treated like any frame that is no report, and the requests go on."""
    ranks = played.ranks
    stream = Stream(played.shell, make_request("r", [11, 12]))
    ranks.run(3)
    ranks.wires["generate"].receive(rank_identity(0), garbled(report))
    assert not played.shell.healthy
    await played.recover()
    ranks.run()
    assert await stream.tokens() == expected_tokens([11, 12], 10)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
async def test_shell_stranger_that_sends_no_text_is_ignored(
    played: ShellHarness, report: RankReport
) -> None:
    """An unauthenticated peer brings nothing down."""
    ranks = played.ranks
    ranks.of("generate").exit(-9)
    await ranks.until(lambda: ranks.starts == 3)  # the new one has not reported anything yet
    ranks.wires["generate"].receive(rank_identity(0), garbled(report))
    await played.recover()
    assert ranks.starts == 3
