"""Draining, restarting and resuming one group while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from tests.patience import patience
from tests.unit.aio.ranks import (
    SEPARATE,
    TOGETHER,
    TWO_GENERATE,
    TWO_OF_EACH,
    TWO_TOGETHER,
    ShellHarness,
    Stream,
    check_image_tokens,
    check_tokens,
    image_stream,
    state_of,
    streams_of,
)
from tests.unit.rank.fake_plugin import expected_tokens
from vsched.aio.worker_groups import RESTART_DELAYS_S
from vsched.errors import RequestRefused
from vsched.testing import make_request

GROUPS = TWO_GENERATE


def running(played: ShellHarness) -> list[int]:
    return [row["running"] for row in played.shell.group_rows() if row["stage"] == "generate"]


async def soon(doing: Awaitable[Any]) -> Any:
    async with patience():
        return await doing


async def begun(doing: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
    """Begin a drain or a restart, up to its first wait."""
    task = asyncio.create_task(doing)
    await asyncio.sleep(0)
    return task


async def serve_until(played: ShellHarness, task: asyncio.Future[Any]) -> Any:
    """Carry decisions out, a few per turn of the loop, until a task is done."""
    for _ in range(2000):
        if task.done():
            return task.result()
        played.ranks.run_all(1)
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


@pytest.mark.parametrize("played", [TWO_GENERATE, TWO_OF_EACH], indirect=True, ids=str)
async def test_drained_group_ends_its_requests_and_gets_no_new_ones(played: ShellHarness) -> None:
    """No stream is interrupted; the drain returns once nothing runs there, and the group can be resumed."""
    ranks = played.ranks
    streams = streams_of(played, steps=2)
    draining = await begun(played.shell.groups.drain("generate-1"))
    assert state_of(played, "generate-1") == "draining"
    assert not played.shell.healthy
    more = [Stream(played.shell, make_request(f"more{index}", [51])) for index in range(2)]
    assert not draining.done()
    ranks.run(groups=["generate-1"])
    assert await soon(draining) is True
    assert [stream.ends for stream in [*streams, *more]] == [0, 1, 0, 1, 0, 0]
    ranks.run(groups=["generate-0"])
    await check_tokens(streams)
    for stream in more:
        assert await stream.tokens() == expected_tokens([51], 10)
    played.shell.groups.resume("generate-1")
    assert state_of(played, "generate-1") == "up"
    streams_of(played, named="late")
    ranks.run_all(1)
    assert running(played) == [2, 2]


async def test_drain_that_takes_too_long_goes_on_until_taken_back(played: ShellHarness) -> None:
    """The wait has a deadline; the drain has none. A call that waits returns False."""
    streams = streams_of(played, steps=2)
    assert await played.shell.groups.drain("generate-1") is False
    assert state_of(played, "generate-1") == "draining"
    played.shell.groups._drain_s = 60
    draining = await begun(played.shell.groups.drain("generate-1"))
    played.shell.groups.resume("generate-1")
    assert await soon(draining) is False
    assert played.shell.healthy
    await played.run_out(streams)


async def test_group_that_is_lost_while_it_drains_comes_back_draining(played: ShellHarness) -> None:
    """Its requests resume there, and the drain still holds."""
    ranks = played.ranks
    streams = streams_of(played, steps=2)
    draining = await begun(played.shell.groups.drain("generate-1"))
    starts = ranks.starts
    ranks.of("generate-1").exit(-9)
    await ranks.until(lambda: ranks.of("generate-1").serves and ranks.starts == starts + 1)
    await ranks.until(lambda: state_of(played, "generate-1") == "draining")
    assert not (draining.done() and draining.result()), "it is not drained yet"
    await serve_until(played, draining)
    await played.run_out(streams)


async def test_drained_group_that_serves_again_after_losses_is_not_drained(
    played: ShellHarness,
) -> None:
    """Both groups are lost, and requests begin on the drained one, which is back first."""
    ranks = played.ranks
    assert await soon(played.shell.groups.drain("generate-1")) is True
    ranks.broken.add("generate-0")
    ranks.pause_over.clear()
    ranks.of("generate-0").exit(-9)
    await ranks.until(lambda: ranks.pauses_s)
    streams = streams_of(played, 2)
    ranks.of("generate-1").exit(-9)
    await ranks.until(lambda: running(played) == [0, 2])
    assert state_of(played, "generate-1") == "draining"
    assert await played.shell.groups.drain("generate-1") is False
    await played.run_out(streams)
    assert await soon(played.shell.groups.drain("generate-1")) is True
    ranks.broken.clear()
    ranks.pause_over.set()


@pytest.mark.parametrize(
    ("played", "group"),
    [
        (TWO_GENERATE, "generate-1"),
        (TWO_OF_EACH, "encode-1"),
        (TWO_TOGETHER, "encode-0"),
        (SEPARATE, "encode"),
        (TOGETHER, "generate"),
    ],
    indirect=["played"],
    ids=str,
)
async def test_restart_under_load_costs_no_tokens(played: ShellHarness, group: str) -> None:
    """Drained first, so nothing is computed twice; even the last group of its stage can be restarted."""
    ranks = played.ranks
    streams = streams_of(played)
    image = image_stream(played)
    ranks.run_all(2)
    engine, old, starts = played.engine(), ranks.of(group), ranks.starts
    restarting = await begun(played.shell.groups.restart(group))
    assert engine.state == "degraded"
    assert await serve_until(played, restarting) is True
    assert engine.state == "ready"
    assert old.ended
    assert ranks.starts == starts + 1
    assert ranks.pauses_s == []
    late = Stream(played.shell, make_request("late", [51]))
    await played.run_out(streams)
    await check_image_tokens(image)
    assert await late.tokens() == expected_tokens([51], 10)
    row = next(row for row in played.shell.group_rows() if row["name"] == group)
    assert (row["restarts"], row["last_loss"]["reason"]) == (1, "restarted by an operator")


@pytest.mark.parametrize("played", [TWO_GENERATE, SEPARATE], indirect=True, ids=str)
async def test_restart_goes_on_after_the_deadline_and_is_no_loss(played: ShellHarness) -> None:
    """Requests that still run resume after it, as after any loss.

    However often an operator restarts a worker group, its first loss is recovered without a pause.
    """
    ranks = played.ranks
    streams = streams_of(played, steps=2)
    group = list(ranks.wires)[-1]
    for _ in RESTART_DELAYS_S:
        assert await soon(played.shell.groups.restart(group)) is True
        assert played.shell.healthy
    ranks.of(group).exit(-9)
    await played.recover()
    assert ranks.pauses_s == []
    await played.run_out(streams)


async def test_restart_that_is_cancelled_leaves_the_group_serving(played: ShellHarness) -> None:
    """Nothing has been stopped yet."""
    streams_of(played, steps=2)
    restarting = await begun(played.shell.groups.restart("generate-1"))
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    assert state_of(played, "generate-1") == "up"


async def test_retired_group_can_be_restarted(played: ShellHarness) -> None:
    ranks = played.ranks
    ranks.broken.add("generate-1")
    ranks.of("generate-1").exit(-9)
    await ranks.until(lambda: state_of(played, "generate-1") == "retired")
    assert await played.shell.groups.restart("generate-1") is False, "it was not repaired"
    assert state_of(played, "generate-1") == "retired"
    ranks.broken.clear()
    assert await played.shell.groups.restart("generate-1") is True
    assert played.shell.healthy
    streams = streams_of(played, steps=1)
    assert running(played) == [2, 2]
    await played.run_out(streams)


async def act(played: ShellHarness, action: str, group: str) -> None:
    done = getattr(played.shell.groups, action)(group)
    if action != "resume":
        await done


async def check_refused(
    played: ShellHarness, group: str, code: str, words: str, *actions: str
) -> None:
    """Assert that these actions on a group, or all, are refused."""
    for action in actions or ("drain", "restart", "resume"):
        with pytest.raises(RequestRefused, match=words) as caught:
            await act(played, action, group)
        assert caught.value.code == code
        assert caught.value.status == (400 if code == "unknown_group" else 409)


async def test_upkeep_in_a_wrong_state_or_of_no_group_is_refused(played: ShellHarness) -> None:
    """A group that is coming back already, that is not draining, or that is being restarted."""
    known = "name one of encode, generate-0, generate-1."
    await check_refused(played, "generate", "unknown_group", known)
    up = "cannot resume generate-1, which is up"
    await check_refused(played, "generate-1", "wrong_state", up, "resume")
    streams = streams_of(played, steps=2)
    restarting = await begun(played.shell.groups.restart("generate-1"))
    await check_refused(played, "generate-1", "wrong_state", "which is restarting")
    assert await serve_until(played, restarting) is True
    played.ranks.of("generate-1").exit(-9)
    await check_refused(played, "generate-1", "wrong_state", "which is down")
    await played.recover()
    await played.run_out(streams)


async def test_drain_of_the_last_group_of_its_stage_is_refused(played: ShellHarness) -> None:
    """Requests would wait for an operator; the only encoder, the last generator."""
    await check_refused(played, "encode", "last_group", "Remedy: restart it", "drain")
    assert await played.shell.groups.drain("generate-0") is True
    await check_refused(played, "generate-1", "last_group", "Remedy: restart it", "drain")
    assert await played.shell.groups.restart("generate-1") is True


async def test_clear_reaches_every_replica(played: ShellHarness) -> None:
    """Running and waiting requests on all groups, including one that is down."""
    engine = played.engine()
    streams = [Stream(played.shell, make_request(f"r{index}", [11])) for index in range(14)]
    played.ranks.run_all(2)
    assert running(played) == [4, 4]
    played.ranks.of("generate-1").exit(-9)
    assert await engine.clear() == {"running": 0, "waiting": 0}
    for stream in streams:
        assert (await stream.error()).code == "cleared"
