"""Several replicas behind one kernel: one is lost, drained, restarted or resumed while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from tests.patience import patience
from tests.unit.aio.ranks import (
    BLOCKS,
    SEPARATE,
    TOGETHER,
    TWO_GENERATE,
    TWO_OF_EACH,
    TWO_TOGETHER,
    Groups,
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
from vsched.errors import CheckpointError, GroupLostError, RequestRefused
from vsched.testing import make_request

GROUPS = TWO_GENERATE


async def is_lost(played: ShellHarness, group: str) -> None:
    """Lose a group for as long as it stays broken and its pause lasts."""
    played.ranks.broken.add(group)
    played.ranks.pause_over.clear()
    played.ranks.of(group).exit(-9)
    await played.ranks.until(lambda: played.ranks.pauses_s)


@pytest.mark.parametrize(
    "played", [TWO_GENERATE, TWO_OF_EACH, TWO_TOGETHER], indirect=True, ids=str
)
async def test_shell_without_one_generate_crew_serves_with_the_other(played: ShellHarness) -> None:
    """Requests of the lost group wait for its return, and their streams resume; others do not wait."""
    streams = streams_of(played, steps=3)
    await is_lost(played, "generate-1")
    assert not played.shell.healthy
    assert state_of(played, "generate-1") == "down"
    played.ranks.run()
    assert [stream.ends for stream in streams] == [1, 0, 1, 0]
    late = Stream(played.shell, make_request("late", [51]))
    played.ranks.run()
    assert await late.tokens() == expected_tokens([51], 10)
    played.ranks.broken.clear()
    played.ranks.pause_over.set()
    await played.recover()
    await played.run_out(streams)


async def test_shell_shows_operators_each_group(played: ShellHarness) -> None:
    await played.stop()
    await played.start(TWO_GENERATE, ranks=2)
    streams_of(played)
    played.ranks.run(1, groups=["generate-1"])
    rows = {row["name"]: row for row in played.shell.group_rows()}
    assert list(rows) == ["encode", "generate-0", "generate-1"]
    assert [row["stage"] for row in rows.values()] == ["encode", "generate", "generate"]
    assert {row["state"] for row in rows.values()} == {"up"}
    assert rows["generate-1"]["running"] == 2
    assert [rank["rank"] for rank in rows["generate-1"]["ranks"]] == [0, 1]
    pids = [rank["pid"] for row in rows.values() for rank in row["ranks"]]
    assert pids == played.shell.pids
    assert [(row["restarts"], row["last_loss"]) for row in rows.values()] == [(0, None)] * 3


@pytest.mark.parametrize("played", [TWO_OF_EACH], indirect=True)
async def test_shell_without_one_encode_crew_encodes_with_the_other(played: ShellHarness) -> None:
    """The images of its batch are encoded by the other group; no request waits for the lost one."""
    ranks = played.ranks
    images = [image_stream(played, name, (0, 6, name.encode())) for name in "abc"]
    busy = [name for name in ("encode-0", "encode-1") if ranks.wires[name].frames[0]]
    first = ranks.of(busy[0]).spec.encode
    await is_lost(played, busy[0])
    ranks.run()
    for image in images:
        await check_image_tokens(image)
    assert not played.shell.healthy
    ranks.broken.clear()
    ranks.pause_over.set()
    await played.recover()
    again = ranks.of(busy[0]).spec.encode
    assert first is not None
    assert again is not None
    kept = "only the first start measures the needs of the worst batch"
    assert (first.reserved_bytes, again.reserved_bytes) == (None, 0), kept


@pytest.mark.parametrize(
    ("played", "lost"),
    [
        (TWO_OF_EACH, ("generate-0", "generate-1")),
        (TWO_OF_EACH, ("encode-0", "generate-1")),
        (TWO_OF_EACH, ("encode-0", "encode-1")),
        (TWO_OF_EACH, ("encode-0", "encode-1", "generate-0", "generate-1")),
        (TWO_TOGETHER, ("generate-0", "generate-1")),
        (SEPARATE, ("encode", "generate")),
    ],
    indirect=["played"],
    ids=str,
)
async def test_groups_lost_at_once_come_back(played: ShellHarness, lost: tuple[str, ...]) -> None:
    """Two faults at the same time cost no request a token."""
    streams = streams_of(played)
    image = image_stream(played)
    played.ranks.run_all(2)
    for group in lost:
        played.ranks.of(group).exit(-9)
    await played.recover()
    await played.run_out(streams)
    await check_image_tokens(image)
    assert played.ranks.pauses_s == []


@pytest.mark.parametrize(
    ("groups", "ranks", "failures"),
    [
        (TWO_OF_EACH, 1, [CheckpointError("weights are missing")]),
        (TWO_TOGETHER, 1, [OSError("no pid")]),
        (SEPARATE, 2, [None, OSError("no processes left")]),
    ],
    ids=["checkpoint", "system", "second rank"],
)
async def test_shell_crew_that_cannot_start_is_one_clear_error(
    played: ShellHarness, groups: Groups, ranks: int, failures: list[Any]
) -> None:
    """The start of all worker groups fails at once with the error of one, and no rank stays."""
    await played.stop()
    played.ranks.failures.extend(failures)
    with pytest.raises(type(failures[-1]), match=str(failures[-1])):
        await played.start(groups, ranks=ranks)
    assert all(rank.ended for rank in played.ranks.made)
    await played.start(groups)  # the test's end stops it


async def test_shell_crew_lost_while_others_start_is_one_clear_error(played: ShellHarness) -> None:
    """A worker group that was ready and is lost is not waited for until another one's deadline."""
    await played.stop()
    ranks = played.ranks
    ranks.mute.add("generate-1")
    starting = asyncio.ensure_future(played.start(TWO_GENERATE))
    await ranks.until(lambda: ranks.starts == 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not starting.done(), "generate-1 has not loaded"
    ranks.of("encode").exit(-9)
    with pytest.raises(GroupLostError, match="^encode: rank 0 was killed by SIGKILL$"):
        async with patience():
            await starting
    assert all(rank.ended for rank in ranks.made)
    ranks.mute.clear()
    await played.start(TWO_GENERATE)


@pytest.mark.parametrize("played", [TWO_GENERATE, TWO_TOGETHER], indirect=True, ids=str)
async def test_shell_crew_that_stays_away_hands_its_requests_on(played: ShellHarness) -> None:
    """The other replica takes them, and their streams go on."""
    streams = streams_of(played, steps=3)
    played.ranks.broken.add("generate-1")
    played.ranks.of("generate-1").exit(-9)
    await played.ranks.until(lambda: state_of(played, "generate-1") == "retired")
    assert played.ranks.pauses_s == [delay_s for delay_s in RESTART_DELAYS_S if delay_s]
    assert not played.shell.healthy
    assert not played.shell.given_up
    await played.run_out(streams)


async def test_shell_ranks_that_were_refused_last_do_not_stay(played: ShellHarness) -> None:
    """A worker group whose KV cache comes back too small, every time, is stopped when it is given up."""
    played.ranks.blocks = BLOCKS - 1
    played.ranks.of("generate-1").exit(-9)
    await played.ranks.until(lambda: state_of(played, "generate-1") == "retired")
    assert played.ranks.of("generate-1").ended
    assert "smaller KV cache: value 99 blocks" in str(
        played.shell.groups["generate-1"].worker_group.retired
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ProcessExited", "generate: rank 1 was killed by SIGKILL"),
        ("HostLost", "generate: host far cannot be reached"),
    ],
)
async def test_shell_one_rank_takes_all_down(played: ShellHarness, fault: str, reason: str) -> None:
    """A fault of the second rank is a fault of the group; requests go on with new ranks."""
    await played.stop()
    ranks = played.ranks
    await played.start(SEPARATE, ranks=2)
    streams = streams_of(played)
    ranks.say("generate", ranks.step())
    victims = [ranks.of("generate", number) for number in (0, 1)]
    if fault == "HostLost":
        ranks.lose_host("cannot be reached")
    for _ in range(2):  # it is reported once, whatever else happens to the ranks
        ranks.of("generate", 1).exit(-9)
    assert not played.shell.healthy
    await played.recover()
    (row,) = (row for row in played.shell.group_rows() if row["name"] == "generate")
    assert (row["losses"], row["restarts"]) == ({fault: 1}, 1)
    assert row["last_loss"]["reason"] == reason
    assert all(rank.ended for rank in victims)
    assert ranks.starts == 6
    assert ranks.places - ranks.places_closed == 2, "the host of the lost start was released"
    await played.run_out(streams)


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
    streams = streams_of(played, steps=2)
    draining = await begun(played.shell.groups.drain("generate-1"))
    assert state_of(played, "generate-1") == "draining"
    assert not played.shell.healthy
    more = [Stream(played.shell, make_request(f"more{index}", [51])) for index in range(2)]
    assert not draining.done()
    played.ranks.run(groups=["generate-1"])
    assert await soon(draining) is True
    assert [stream.ends for stream in [*streams, *more]] == [0, 1, 0, 1, 0, 0]
    played.ranks.run(groups=["generate-0"])
    await check_tokens(streams)
    for stream in more:
        assert await stream.tokens() == expected_tokens([51], 10)
    played.shell.groups.resume("generate-1")
    assert state_of(played, "generate-1") == "up"
    streams_of(played, named="late")
    played.ranks.run_all(1)
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


async def test_drained_group_that_serves_after_losses_is_not_drained(played: ShellHarness) -> None:
    """Both groups are lost, and requests begin on the drained one, which is back first."""
    assert await soon(played.shell.groups.drain("generate-1")) is True
    await is_lost(played, "generate-0")
    streams = streams_of(played, 2)
    played.ranks.of("generate-1").exit(-9)
    await played.ranks.until(lambda: running(played) == [0, 2])
    assert state_of(played, "generate-1") == "draining"
    assert await played.shell.groups.drain("generate-1") is False
    await played.run_out(streams)
    assert await soon(played.shell.groups.drain("generate-1")) is True
    played.ranks.broken.clear()
    played.ranks.pause_over.set()


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
    streams = streams_of(played)
    image = image_stream(played)
    played.ranks.run_all(2)
    engine, old, starts = played.engine(), played.ranks.of(group), played.ranks.starts
    restarting = await begun(played.shell.groups.restart(group))
    assert engine.state == "degraded"
    assert await serve_until(played, restarting) is True
    assert engine.state == "ready"
    assert old.ended
    assert played.ranks.starts == starts + 1
    assert played.ranks.pauses_s == []
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
    streams = streams_of(played, steps=2)
    group = list(played.ranks.wires)[-1]
    for _ in RESTART_DELAYS_S:
        assert await soon(played.shell.groups.restart(group)) is True
        assert played.shell.healthy
    played.ranks.of(group).exit(-9)
    await played.recover()
    assert played.ranks.pauses_s == []
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
    played.ranks.broken.add("generate-1")
    played.ranks.of("generate-1").exit(-9)
    await played.ranks.until(lambda: state_of(played, "generate-1") == "retired")
    assert await played.shell.groups.restart("generate-1") is False, "it was not repaired"
    assert state_of(played, "generate-1") == "retired"
    played.ranks.broken.clear()
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
