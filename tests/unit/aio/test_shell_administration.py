"""Draining, restarting and resuming one group while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
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
from tests.unit.api.fakes import Client
from tests.unit.rank.fake_plugin import expected_tokens
from vsched.api import ApiSettings, create_app
from vsched.engine import Engine
from vsched.errors import RequestRefused
from vsched.testing import make_request


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
async def test_drained_group_ends_what_it_has_and_gets_nothing_new(played: ShellHarness) -> None:
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


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_drain_that_takes_too_long_goes_on_until_it_is_taken_back(
    played: ShellHarness,
) -> None:
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


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_group_that_is_lost_while_it_drains_comes_back_draining(played: ShellHarness) -> None:
    """Its requests resume there, and the drain still holds."""
    ranks = played.ranks
    streams = streams_of(played, steps=2)
    draining = await begun(played.shell.groups.drain("generate-1"))
    starts = ranks.starts
    ranks.of("generate-1").exit(-9)
    await ranks.until(lambda: ranks.of("generate-1").serves and ranks.starts == starts + 1)
    await ranks.until(lambda: state_of(played, "generate-1") == "draining")
    await serve_until(played, draining)
    await played.run_out(streams)


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
async def test_restart_under_load_costs_no_request_a_token(
    played: ShellHarness, group: str
) -> None:
    """Drained first, so nothing is computed twice; even the last group of its stage can be restarted."""
    ranks = played.ranks
    streams = streams_of(played)
    image = image_stream(played)
    ranks.run_all(2)
    old, starts = ranks.of(group), ranks.starts
    restarting = asyncio.ensure_future(played.shell.groups.restart(group))
    assert await serve_until(played, restarting) is True
    assert old.ended
    assert ranks.starts == starts + 1
    assert ranks.pauses_s == []
    assert played.shell.healthy
    late = Stream(played.shell, make_request("late", [51]))
    await played.run_out(streams)
    await check_image_tokens(image)
    assert await late.tokens() == expected_tokens([51], 10)
    row = next(row for row in played.shell.group_rows() if row["name"] == group)
    assert (row["restarts"], row["last_loss"]["reason"]) == (1, "restarted by an operator")


@pytest.mark.parametrize("played", [TWO_GENERATE, SEPARATE], indirect=True, ids=str)
async def test_restart_goes_on_after_the_deadline(played: ShellHarness) -> None:
    """Requests that still run resume after the restart, as after any loss."""
    ranks = played.ranks
    streams = streams_of(played, steps=2)
    group = list(ranks.wires)[-1]
    assert await soon(played.shell.groups.restart(group)) is True
    assert played.shell.healthy
    await played.run_out(streams)


@pytest.mark.parametrize("played", [SEPARATE], indirect=True)
async def test_restarts_are_no_losses(played: ShellHarness) -> None:
    """However often an operator restarts a worker group, its first loss is recovered without a pause."""
    ranks = played.ranks
    for _ in range(6):
        assert await played.shell.groups.restart("generate") is True
    ranks.of("generate").exit(-9)
    await played.recover()
    assert ranks.pauses_s == []


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_restart_that_is_cancelled_leaves_the_group_serving(played: ShellHarness) -> None:
    """Nothing has been stopped yet."""
    streams_of(played, steps=2)
    restarting = await begun(played.shell.groups.restart("generate-1"))
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    assert state_of(played, "generate-1") == "up"


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
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


async def refusal(played: ShellHarness, action: str, group: str) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        await act(played, action, group)
    return caught.value


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
@pytest.mark.parametrize("action", ["drain", "restart", "resume"])
async def test_upkeep_of_an_unknown_group_names_the_known(
    played: ShellHarness, action: str
) -> None:
    error = await refusal(played, action, "generate")
    assert (error.code, error.status) == ("unknown_group", 400)
    assert "name one of encode, generate-0, generate-1." in str(error)


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_drain_of_the_last_group_of_its_stage_is_refused(played: ShellHarness) -> None:
    """Requests would wait for an operator; the only encoder, the last generator."""
    assert (await refusal(played, "drain", "encode")).code == "last_group"
    assert await played.shell.groups.drain("generate-0") is True
    error = await refusal(played, "drain", "generate-1")
    assert (error.code, error.status) == ("last_group", 409)
    assert "Remedy: restart it" in str(error)
    assert await played.shell.groups.restart("generate-1") is True


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
async def test_upkeep_of_a_group_in_the_wrong_state_is_refused(played: ShellHarness) -> None:
    """A group that is coming back already, that is not draining, or that is being restarted."""
    error = await refusal(played, "resume", "generate-1")
    assert (error.code, error.status) == ("wrong_state", 409)
    assert "cannot resume generate-1, which is up" in str(error)
    streams = streams_of(played, steps=2)
    restarting = await begun(played.shell.groups.restart("generate-1"))
    for action in ("drain", "restart", "resume"):
        assert "which is restarting" in str(await refusal(played, action, "generate-1"))
    assert await serve_until(played, restarting) is True
    played.ranks.of("generate-1").exit(-9)
    for action in ("drain", "restart", "resume"):
        assert "which is down" in str(await refusal(played, action, "generate-1"))
    await played.recover()
    await played.run_out(streams)


async def post(engine: Engine, group: str, action: str) -> Any:
    app = create_app(engine, ApiSettings())
    body = {"group": group, "action": action}
    return await Client(app).send("POST", "/admin/replicas", body)


LOOP_TURNS = 10


@pytest.mark.parametrize("played", [TWO_OF_EACH], indirect=True)
async def test_groups_restarted_one_by_one_over_http_under_load(played: ShellHarness) -> None:
    """A rolling restart: every rank is new, no request fails, and health reports `degraded` meanwhile."""
    engine = played.engine()
    old = list(played.ranks.made)
    streams: list[Sequence[Stream]] = []
    for row in engine.groups():
        streams.append(streams_of(played, named=row["name"]))
        played.ranks.run_all(2)
        posting = asyncio.ensure_future(post(engine, row["name"], "restart"))
        for _ in range(LOOP_TURNS):  # until the body is read
            await asyncio.sleep(0)
            if engine.state == "degraded":
                break
        assert engine.state == "degraded"
        reply = await serve_until(played, posting)
        assert reply.json == {
            "group": row["name"],
            "action": "restart",
            "done": True,
            "state": "up",
        }
        assert engine.state == "ready"
    played.ranks.run()
    for four in streams:
        await check_tokens([*four])
    assert all(rank.ended for rank in old)
    assert [row["restarts"] for row in engine.groups()] == [1, 1, 1, 1]


@pytest.mark.parametrize("played", [TWO_GENERATE], indirect=True)
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
