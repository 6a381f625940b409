"""A lost group comes back, and a shell that fails ends: streams resume with unchanged tokens, or get an error."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from tests.unit.aio.ranks import (
    BLOCKS,
    SEPARATE,
    TOGETHER,
    TWO_GENERATE,
    ShellHarness,
    Stream,
    check_image_tokens,
    check_tokens,
    fail_on,
    image_stream,
    state_of,
    streams_of,
)
from tests.unit.rank.fake_plugin import expected_tokens
from tests.unit.rank.worker_groups import Text
from vsched.aio.worker_groups import LOSSES_WINDOW_S, RESTART_DELAYS_S
from vsched.errors import CheckpointError, GroupLostError, RequestRefused
from vsched.failures import ErrorKind
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, SetTimer
from vsched.kernel.events import Cleared, Event, Stepped, Submitted, TimerFired
from vsched.testing import make_request
from vsched.types import FinishReason
from vsched.wire import GenerateResult, RankFailed, RankReport, Ready

BOTH_PLACEMENTS = pytest.mark.parametrize(
    "played", [SEPARATE, TOGETHER], indirect=True, ids=["separate", "together"]
)
SHORT, WHOLE = slice(4), slice(None)


@pytest.mark.parametrize(
    ("tokens", "numbers"),
    [(SHORT, SHORT), (WHOLE, SHORT), (slice(-1), WHOLE)],
    ids=["tokens and numbers short", "numbers short", "no whole int32"],
)
async def test_shell_drops_odd_results(played: ShellHarness, tokens: slice, numbers: slice) -> None:
    """The result is discarded, the ranks are replaced, and the requests resume where they were."""
    streams = streams_of(played, 3, steps=3)
    starts, victim, result = played.ranks.starts, played.ranks.of("generate"), played.ranks.step()
    assert isinstance(result, GenerateResult)
    odd = msgspec.structs.replace(
        result, tokens=result.tokens[tokens], numbers=result.numbers[numbers]
    )
    played.ranks.say("generate", odd)
    assert not played.shell.healthy
    await played.recover()
    assert victim.ended
    assert played.ranks.starts == starts + 1
    await played.run_out(streams)


async def test_shell_encode_result_that_cannot_be_loses_the_encoder(played: ShellHarness) -> None:
    """The image is encoded again; text requests do not wait for it."""
    ranks = played.ranks
    image = image_stream(played)
    text = Stream(played.shell, make_request("text", [11]))
    ranks.say("encode", GenerateResult(ranks.step("encode").step, b"", b"", [], [], 0))
    assert not played.shell.healthy
    while ranks.wires["generate"].frames[0]:
        ranks.say("generate", ranks.step())
    assert await text.tokens() == expected_tokens([11], 10)
    await played.recover()
    ranks.run()
    await check_image_tokens(image)


async def test_shell_report_of_a_lost_rank_is_dropped(played: ShellHarness) -> None:
    """A late report would put tokens twice into the streams."""
    streams = streams_of(played, 3, steps=3)
    late = played.ranks.step()
    played.ranks.of("generate").exit(-9)
    played.ranks.say("generate", late)
    await played.recover()
    await played.run_out(streams)


async def test_shell_restart_goes_on_whatever_an_attempt_raises(played: ShellHarness) -> None:
    """The next pause follows, and waiting requests get the tokens they would have had."""
    ranks = played.ranks
    streams = streams_of(played, 3, steps=3)
    ranks.failures.extend([zmq.ZMQError(2), CheckpointError("swept away"), AssertionError("a bug")])
    ranks.of("generate").exit(-9)
    await played.recover()
    assert ranks.pauses_s == [*RESTART_DELAYS_S[1:]]
    await played.run_out(streams)


@BOTH_PLACEMENTS
async def test_shell_lost_while_it_resumes_restarts_again(played: ShellHarness) -> None:
    """The first decision after a restart finds the rank gone; that is a loss like any other."""
    ranks = played.ranks
    twice = Stream(played.shell, make_request("twice", [51]))
    ranks.run(3)
    starts = ranks.starts
    ranks.backlogged.add(("generate", 0))
    ranks.of("generate").exit(-9)
    streams = streams_of(played, 3)
    await ranks.until(lambda: played.shell.healthy and not ranks.backlogged)
    assert ranks.starts == starts + 2
    await played.run_out(streams)
    # It was running at both losses, but not alone: it is under suspicion, and clears itself.
    assert await twice.tokens() == expected_tokens([51], 10)


def end_once_ready(played: ShellHarness, monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """End the next generate rank `turns` turns of the loop after its report of readiness."""
    ranks, loop = played.ranks, asyncio.get_running_loop()
    said = ranks.say

    def end(left: int) -> None:
        if left:
            loop.call_soon(end, left - 1)
        else:
            ranks.of("generate").exit(-9)

    def say(group: str, report: RankReport, rank: int = 0) -> None:
        said(group, report, rank)
        if group == "generate" and isinstance(report, Ready):
            monkeypatch.setattr(ranks, "say", said)
            end(turns)

    monkeypatch.setattr(ranks, "say", say)


@pytest.mark.parametrize("turns", range(8))
async def test_shell_lost_as_soon_as_it_is_ready_restarts_again(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Both during the start of the group and after it."""
    streams = streams_of(played, 3, steps=3)
    starts = played.ranks.starts
    end_once_ready(played, monkeypatch, turns)
    played.ranks.of("generate").exit(-9)
    await played.ranks.until(lambda: played.ranks.starts == starts + 2 and played.shell.healthy)
    await played.run_out(streams)


@pytest.mark.parametrize("turns", range(12))
async def test_shell_lost_as_its_start_ends_does_not_serve_without_ranks(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The start fails, or the group is restarted."""
    await played.stop()
    end_once_ready(played, monkeypatch, turns)
    try:
        await played.start()
    except GroupLostError:
        await played.start()
    await played.ranks.until(lambda: played.ranks.starts in (3, 4) and played.shell.healthy)
    await played.run_out(streams_of(played, 3))


@pytest.mark.parametrize("played", [TOGETHER], indirect=True)
async def test_shell_together_lost_by_its_encoder_while_it_resumes(played: ShellHarness) -> None:
    """The encoder's first decision fails, and takes down the other group of the same processes."""
    ranks = played.ranks
    streams = streams_of(played, 3)
    image = image_stream(played)
    starts = ranks.starts
    ranks.backlogged.add(("encode", 0))
    ranks.of("generate").exit(-9)
    await ranks.until(lambda: played.shell.healthy and not ranks.backlogged)
    assert ranks.starts == starts + 2
    await played.run_out(streams)
    # The encoder was lost twice with this image, which may be the cause: only this request ends.
    assert (await image.error()).code == "encode_failed"


async def test_shell_comes_back_with_at_least_as_many_blocks(
    played: ShellHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer, the kernel would name blocks that do not exist; the next attempt may find the memory free.

    Refused ranks were not in use: if they are lost as well, it counts as no second loss of their requests.
    """
    ranks = played.ranks
    streams = streams_of(played, 3, steps=3)
    ranks.blocks = BLOCKS - 1
    ranks.of("generate").exit(-9)
    await ranks.until(lambda: ranks.pauses_s)
    small = ranks.of("generate")
    ranks.blocks = BLOCKS + 1
    small.exit(-9)
    await played.recover()
    assert small.ended
    assert ranks.starts == 4
    assert f"value {BLOCKS - 1} blocks, limit at least {BLOCKS} blocks" in caplog.text
    assert len(played.shell.worker_groups[1]._losses_s) == 1
    await played.run_out(streams)


async def lose(played: ShellHarness, group: str = "generate") -> None:
    """Lose a group, and wait until it is back or given up."""
    played.ranks.pauses_s.clear()
    played.ranks.of(group).exit(-9)
    await played.ranks.until(lambda: played.shell.healthy or played.shell.given_up)


async def test_shell_losses_in_quick_succession_skip_the_short_pauses(
    played: ShellHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that die as soon as they are up do not make the server spin; in the end every client gets one error."""
    pauses_s: list[list[float]] = []
    for _ in RESTART_DELAYS_S:
        await lose(played)
        assert played.shell.healthy
        pauses_s.append([*played.ranks.pauses_s])
    assert pauses_s == [[delay_s] if delay_s else [] for delay_s in RESTART_DELAYS_S]
    await lose(played, "encode")
    assert played.ranks.pauses_s == [], "every worker group has pauses of its own"
    streams = [*streams_of(played, 3), image_stream(played)]
    await lose(played)
    await all_given_up(played, streams, "generate could not be restarted")
    assert [one for one in caplog.messages if "again" not in one][-2:] == [
        "lost: generate: rank 0 was killed by SIGKILL",
        "could not be restarted: generate: lost too often",
    ]


async def test_shell_losses_far_apart_are_each_the_first(played: ShellHarness) -> None:
    """A server that loses a rank a day serves for ever."""
    for _ in range(3 * len(RESTART_DELAYS_S)):
        await lose(played)
        assert played.ranks.pauses_s == []
        losses_s = played.shell.worker_groups[1]._losses_s
        losses_s.append(losses_s.pop() - LOSSES_WINDOW_S - 1)
    assert played.shell.healthy


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_kernel_uses_the_blocks_that_a_group_came_back_with(
    played: ShellHarness, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = played.ranks
    await played.stop()
    ranks.blocks = 10_000
    await played.start(TWO_GENERATE)
    ranks.blocks = 9_000
    ranks.say("generate-1", RankFailed(ErrorKind.OUT_OF_MEMORY, "DeviceOutOfMemory", "no room"))
    await ranks.until(lambda: state_of(played, "generate-1") == "up" and played.shell.healthy)
    groups = played.shell.statistics()["generate"]["groups"]
    assert [groups[f"generate-{number}"]["blocks_total"] for number in (0, 1)] == [10_000, 9_000]
    assert played.shell.groups["generate-1"].worker_group.restarts == 1
    assert "generate-1" in caplog.text
    assert "after a step ran out of memory" in caplog.text


# --- exceptions inside a shell end one stream or all of them, but never silently ---


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
async def test_shell_failed_stream_ends_alone(played: ShellHarness, text: Text, taken: int) -> None:
    """Its client gets one error, whatever the kernel reported; the others get all their tokens."""
    streams = streams_of(played, 3, text=text)
    played.ranks.run()
    error = await streams[1].error()
    assert str(error) == "the output could not be detokenized"
    assert (error.code, error.status) == ("internal_error", 500)
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


async def all_given_up(
    played: ShellHarness, streams: list[Stream], why: str = "the scheduler failed"
) -> None:
    """Assert that every stream ended with one error, and that nothing goes on."""
    assert played.shell.given_up == why
    for stream in streams:
        error = await stream.error()
        assert (str(error), error.code, error.status) == (why, "given_up", 503)
    await played.ranks.until(lambda: all(rank.ended for rank in played.ranks.made))
    assert not played.shell.healthy
    assert played.shell._streams.request_ids(1) == []
    starts = played.ranks.starts
    with pytest.raises(RequestRefused, match=f"{why}. Remedy: restart") as caught:
        Stream(played.shell, make_request("late", [41]))
    assert (caught.value.code, caught.value.status) == ("given_up", 503)
    await played.shell.wait_idle()
    assert played.ranks.starts == starts


@pytest.mark.parametrize("at", ["result", "command", "submission"])
async def test_shell_scheduler_that_fails_ends_everything(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Every waiting client gets the error once, and no request is accepted after it.

    The same if commands cannot be carried out, such as a decision that cannot be encoded, or at a submission, which is
    refused without a stream. Later losses change nothing.
    """
    streams = streams_of(played, 3, steps=1)
    if at == "submission":
        fail_on(monkeypatch, Submitted)
        with pytest.raises(RequestRefused) as caught:
            Stream(played.shell, make_request("odd", [41]))
        assert (caught.value.code, caught.value.status) == ("given_up", 503)
    elif at == "result":
        fail_on(monkeypatch, Stepped)
    else:
        fails = Mock(side_effect=OverflowError("Integer value out of range"))
        monkeypatch.setattr(played.ranks.wires["generate"], "send", fails)
    played.ranks.run(1)
    await all_given_up(played, streams)
    for group in ("generate", "encode"):
        played.ranks.of(group).exit(1)
    assert [stream.ends for stream in streams] == [1, 1, 1]


@pytest.mark.parametrize("fails", [False, True], ids=["stops", "fails"])
@pytest.mark.parametrize("pauses", [False, True])
async def test_shell_that_ends_ends_a_restart(
    played: ShellHarness, monkeypatch: pytest.MonkeyPatch, *, pauses: bool, fails: bool
) -> None:
    """Whether its ranks are loading or it pauses between two attempts."""
    ranks = played.ranks
    streams = streams_of(played, 3)
    if pauses:
        ranks.failures.append(OSError("no processes left"))
        ranks.pause_over.clear()
    ranks.of("encode").exit(1)
    await ranks.until(lambda: ranks.pauses_s if pauses else ranks.starts == 3)
    if fails:
        fail_on(monkeypatch, Stepped)
        ranks.run(1)
        await all_given_up(played, streams)
    else:
        await played.shell.stop()
    await ranks.until(lambda: not played.shell.pids)
    ranks.pause_over.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert ranks.starts == (2 if pauses else 3)


async def test_engine_shows_failure(played: ShellHarness, monkeypatch: pytest.MonkeyPatch) -> None:
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
