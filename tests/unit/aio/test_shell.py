"""Exceptions inside a shell: they end one stream or all of them, but never silently."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.aio.ranks import ShellHarness, Stream, check_tokens, fail_on, streams_of
from tests.unit.rank.worker_groups import Text
from vsched.errors import RequestRefused
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, SetTimer
from vsched.kernel.events import Cleared, Event, Stepped, Submitted, TimerFired
from vsched.testing import make_request
from vsched.types import FinishReason


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (Text(push_at=1), 1),
        (Text(push_at=4), 4),
        (Text(push_at=10), 10),
        (Text(flush=ValueError("half a character")), 10),
    ],
    ids=["push first", "push later", "push last", "flush"],
)
async def test_shell_stream_whose_text_fails_ends_alone(
    played: ShellHarness, text: Text, taken: int
) -> None:
    """Its client gets one error, whatever the kernel reported; the others get all their tokens."""
    streams = streams_of(played, 3, text=text)
    played.ranks.run()
    error = await streams[1].error()
    assert (str(error), error.code, error.status) == (
        "the answer could not be turned into text",
        "internal_error",
        500,
    )
    assert streams[1].reason is FinishReason.ERROR
    assert streams[1].generation.output_tokens == taken
    await check_tokens([streams[0], streams[2]])
    assert [stream.ends for stream in streams] == [1, 1, 1]
    statistics = played.shell.statistics()
    assert (statistics["running"], statistics["waiting"]) == (0, 0)
    assert played.shell.healthy


async def test_shell_stream_whose_text_fails_stops_computing(played: ShellHarness) -> None:
    """Its resources are free before the next step."""
    broken, good = [
        Stream(played.shell, make_request(name, [11]), max_tokens=300, text=text)
        for name, text in (("broken", Text(push_at=2)), ("good", Text()))
    ]
    played.ranks.run(2)
    assert (broken.ends, good.ends) == (1, 0)
    assert played.shell.statistics()["running"] == 1


async def all_given_up(played: ShellHarness, streams: list[Stream]) -> None:
    """Assert that every stream ended with one error, and that nothing goes on."""
    for stream in streams:
        error = await stream.error()
        assert (str(error), error.code, error.status) == ("the scheduler failed", "given_up", 503)
    await played.ranks.until(lambda: all(rank.ended for rank in played.ranks.made))
    assert not played.shell.healthy
    assert played.shell._streams.request_ids(1) == []
    starts = played.ranks.starts
    with pytest.raises(RequestRefused, match="the scheduler failed. Remedy: restart") as caught:
        Stream(played.shell, make_request("late", [41]))
    assert (caught.value.code, caught.value.status) == ("given_up", 503)
    await played.shell.wait_idle()
    assert played.ranks.starts == starts


@pytest.mark.parametrize("at", ["result", "command"])
async def test_shell_scheduler_that_fails_ends_everything(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Every waiting client gets the error once, and no request is accepted after it.

    The same if commands cannot be carried out, such as a decision that cannot be encoded. Later losses change nothing.
    """

    def send(rank: int, frames: object) -> bool:
        raise OverflowError("Integer value out of range")

    streams = streams_of(played, 3, steps=1)
    if at == "result":
        fail_on(monkeypatch, Stepped)
    else:
        monkeypatch.setattr(played.ranks.wires["generate"], "send", send)
    played.ranks.run(1)
    await all_given_up(played, streams)
    for group in ("generate", "encode"):
        played.ranks.of(group).exit(1)
    assert [stream.ends for stream in streams] == [1, 1, 1]


async def test_shell_scheduler_that_fails_at_a_submission_refuses_it(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile submissions are refused without a stream; the other streams end."""
    streams = streams_of(played, 3)
    fail_on(monkeypatch, Submitted)
    with pytest.raises(RequestRefused) as caught:
        Stream(played.shell, make_request("odd", [41]))
    assert (caught.value.code, caught.value.status) == ("given_up", 503)
    await all_given_up(played, streams)


@pytest.mark.parametrize("pauses", [False, True])
async def test_shell_that_fails_ends_a_restart(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, *, pauses: bool
) -> None:
    """Whether its ranks are loading or it pauses between two attempts."""
    ranks = played.ranks
    streams = streams_of(played, 3)
    if pauses:
        ranks.failures.append(OSError("no processes left"))
        ranks.pause_over.clear()
    ranks.of("encode").exit(1)
    await ranks.until(lambda: ranks.pauses_s if pauses else ranks.starts == 3)
    fail_on(monkeypatch, Stepped)
    ranks.run(1)
    await all_given_up(played, streams)
    await ranks.until(lambda: not played.shell.pids)
    ranks.pause_over.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert ranks.starts == (2 if pauses else 3)


async def test_engine_reports_a_failed_scheduler(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/health` reports it, and requests are refused before their images are processed."""
    engine = played.engine()
    assert engine.state == "ready"
    fail_on(monkeypatch, Cleared)
    await engine.clear()
    assert engine.state == "failed"
    with pytest.raises(RequestRefused, match="the server is failed") as caught:
        await engine.generate(prompt="x", request_id="r")
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        ({}, "stopping"),
        ({"text": Text(flush=ValueError("half a character"))}, "stopping"),
        ({"end_error": RuntimeError("a lease")}, "stopping"),
        ({}, "given_up"),
    ],
    ids=["well", "flush", "on_end", "a scheduler that fails"],
)
async def test_shell_stop_ends_every_stream_and_every_rank(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, odd: dict[str, Any], code: str
) -> None:
    """Clients get the error of a stopping server, and a stream that fails to end keeps no rank alive."""
    streams = streams_of(played, 3, **odd)
    played.ranks.run(3)
    if code == "given_up":
        fail_on(monkeypatch, Cleared)
    await played.shell.stop()
    for stream in streams:
        error = await stream.error()
        assert (error.code, error.status) == (code, 503)
    assert all(rank.ended for rank in played.ranks.made)
    assert played.shell.pids == []


async def test_shell_has_one_timer(played: ShellHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new time replaces the old one, or thousands of submissions would leave thousands of timers."""
    shell, timers = played.shell, list[asyncio.TimerHandle]()
    rung: list[Event] = []

    def handle(kernel: Scheduler, event: Event, now_ns: int) -> list[Command]:
        rung.append(event)
        return [SetTimer(now_ns + 1_000_000_000)] if len(rung) < 5 else [SetTimer(now_ns)]

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "handle", handle)
        for _ in range(5):
            shell.clear()
            assert shell._timer is not None
            timers.append(shell._timer)
        assert [timer.cancelled() for timer in timers] == [True] * 4 + [False]
        assert timers[3].when() < asyncio.get_running_loop().time() + 2
        await played.ranks.until(lambda: rung[-1] == TimerFired())
