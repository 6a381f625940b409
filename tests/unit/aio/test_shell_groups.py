"""Several replicas behind one kernel: events of one group do not affect another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import patience
from tests.unit.aio.ranks import (
    BLOCKS,
    SEPARATE,
    TWO_GENERATE,
    TWO_OF_EACH,
    TWO_TOGETHER,
    Groups,
    ShellHarness,
    Stream,
    check_image_tokens,
    image_stream,
    state_of,
    streams_of,
)
from tests.unit.rank.fake_plugin import expected_tokens
from vsched.aio.worker_groups import RESTART_DELAYS_S
from vsched.errors import CheckpointError, GroupLostError
from vsched.testing import make_request

GROUPS = TWO_GENERATE


async def is_lost(played: ShellHarness, group: str) -> None:
    """Lose a group for as long as it stays broken and its pause lasts."""
    ranks = played.ranks
    ranks.broken.add(group)
    ranks.pause_over.clear()
    ranks.of(group).exit(-9)
    await ranks.until(lambda: ranks.pauses_s)


@pytest.mark.parametrize(
    "played", [TWO_GENERATE, TWO_OF_EACH, TWO_TOGETHER], indirect=True, ids=str
)
async def test_shell_without_one_generate_crew_serves_with_the_other(played: ShellHarness) -> None:
    """Requests of the lost group wait for its return, and their streams resume; others do not wait."""
    ranks = played.ranks
    streams = streams_of(played, steps=3)
    await is_lost(played, "generate-1")
    assert not played.shell.healthy
    assert state_of(played, "generate-1") == "down"
    ranks.run()
    assert [stream.ends for stream in streams] == [1, 0, 1, 0]
    late = Stream(played.shell, make_request("late", [51]))
    ranks.run()
    assert await late.tokens() == expected_tokens([51], 10)
    ranks.broken.clear()
    ranks.pause_over.set()
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
    ranks = played.ranks
    streams = streams_of(played)
    image = image_stream(played)
    ranks.run_all(2)
    for group in lost:
        ranks.of(group).exit(-9)
    await played.recover()
    await played.run_out(streams)
    await check_image_tokens(image)
    assert ranks.pauses_s == []


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
    ranks = played.ranks
    streams = streams_of(played, steps=3)
    ranks.broken.add("generate-1")
    ranks.of("generate-1").exit(-9)
    await ranks.until(lambda: state_of(played, "generate-1") == "retired")
    assert ranks.pauses_s == [delay_s for delay_s in RESTART_DELAYS_S if delay_s]
    assert not played.shell.healthy
    assert not played.shell.given_up
    await played.run_out(streams)


async def test_shell_ranks_that_were_refused_last_do_not_stay(played: ShellHarness) -> None:
    """A worker group whose KV cache comes back too small, every time, is stopped when it is given up."""
    ranks = played.ranks
    ranks.blocks = BLOCKS - 1
    ranks.of("generate-1").exit(-9)
    await ranks.until(lambda: state_of(played, "generate-1") == "retired")
    assert ranks.of("generate-1").ended
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
async def test_shell_any_rank_takes_the_whole_crew_down(
    played: ShellHarness, fault: str, reason: str
) -> None:
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
