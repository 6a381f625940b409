"""Faults under a shell: requests resume where they were, and nothing outlives its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, patience, wait_until
from tests.traces import abandoned_memory, maps
from tests.unit.rank.fake_plugin import Behaviour, expected_tokens
from tests.unit.rank.worker_groups import (
    ROOT,
    Place,
    generate,
    is_running,
    python_path,
    read,
    shell_of,
)
from vsched.testing import make_request

pytestmark = pytest.mark.slow
TOGETHER = (("encode", "generate"),)
TWO_OF_EACH = (("encode-0",), ("encode-1",), ("generate-0",), ("generate-1",))


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [(TWO_OF_EACH, 1), (TOGETHER, 2)],
    ids=["replicas", "together of two ranks"],
)
async def test_shell_streams_go_on_when_ranks_are_killed(
    place: Place, groups: tuple[tuple[str, ...], ...], ranks: int
) -> None:
    """SIGKILL in mid-stream: the group restarts, and every stream has the tokens it would have had."""
    behaviour = Behaviour(step_s=0.004)
    async with shell_of(place, groups=groups, behaviour=behaviour, ranks=ranks) as shell:
        requests = [
            make_request("text", [11, 12, 13]),
            make_request("image", [14, 15], [(1, 6, b"image1")]),
            make_request("two images", [16] * 20, [(3, 5, b"image2"), (9, 6, b"image1")]),
        ]
        streams = [generate(shell, request, max_tokens=60) for request in requests]
        before = await read(streams[0], at_least=20)
        victim = shell.pids[-1]
        os.kill(victim, signal.SIGKILL)
        late = generate(shell, make_request("late", [30]), max_tokens=5)
        rest = await asyncio.gather(*(read(stream) for stream in [*streams, late]))
        rest[0] = before + rest[0]
        for request, tokens in zip(requests, rest, strict=False):
            assert tokens == expected_tokens(request.prompt_token_ids, 60)
        assert rest[3] == expected_tokens([30], 5)
        assert victim not in shell.pids
        assert shell.healthy
        assert shell.statistics()["finished"]["length"] == 4


async def test_shell_stop_in_the_middle_of_a_restart_leaves_no_process(place: Place) -> None:
    """Stopping cancels a restart that has begun to start ranks."""
    before = place_children()
    async with shell_of(place) as shell:
        pids = shell.pids
        os.kill(pids[1], signal.SIGKILL)
        async with patience():
            while shell.healthy:  # noqa: ASYNC110 - the very turn of the loop matters
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        await shell.stop()
        assert shell.pids == []
        assert not any(is_running(pid) for pid in pids)
    assert place_children() <= before, "no rank was started after the stop"


def place_children() -> set[int]:
    """Return the running children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in children if is_running(int(pid))}


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.rank.worker_groups import Place, shell_of

async def main():
    place = Place(Path(sys.argv[1]))
    async with shell_of(place) as shell:
        print(*shell.pids, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_rank_ends_with_its_engine(tmp_path: Path) -> None:
    """A SIGKILL of the engine leaves no rank, no directory of sockets and no shared memory behind."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    before = abandoned_memory()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(run_dir)],
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        assert sorted(run_dir.iterdir()), "its sockets are there"
        assert not any("/dev/shm" in maps(pid) for pid in [*pids, parent.pid])
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(
        lambda: not any(is_running(pid) for pid in pids) and not run_dir.exists(),
        "the ranks end with their engine",
    )
    assert abandoned_memory() <= before


def test_rank_without_a_specification_exits(tmp_path: Path) -> None:
    """An engine that dies before it sends anything leaves no rank waiting."""
    done = subprocess.run(
        [sys.executable, "-m", "vsched.rank"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=tmp_path,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 3
