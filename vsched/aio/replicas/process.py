"""A rank as a child process of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from vsched.worker.spec import RankSpec

SPIN_COUNT, SPIN_COUNT_OVERSUBSCRIBED = 50_000, 2_000
"""How many turns a thread looks before it sleeps while it waits for the others of its rank.

About a millisecond where each thread has a core: the next product comes sooner, and being woken for it takes longer.
Where ranks have more threads than there are cores, about as long as being woken takes: more would take the cores from a
rank that works (docs/performance.md, "Waiting").
"""

RANK_ENVIRONMENT = {
    # Without a number of turns of its own, a thread that waits sleeps at once.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The C library keeps what a step frees for the next one, up to its own bound of 32 MiB a piece: fetching the same
    # pages from the system again in every step costs as much as the attention of a long prompt.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # Each further arena would scatter what is free.
    "MALLOC_ARENA_MAX": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}

RANK_COMMAND = ("-m", "vsched.rank")


def rank_environment(threads: int, *, oversubscribed: bool) -> dict[str, str]:
    """Return the environment of a rank that computes with `threads` threads.

    `oversubscribed`: all ranks together have more threads than there are cores. What the environment of the engine
    says of waiting goes first.
    """
    turns = SPIN_COUNT_OVERSUBSCRIBED if oversubscribed else SPIN_COUNT
    own = {**RANK_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    return {"GOMP_SPINCOUNT": str(turns), **os.environ, **own}


class RankProcess:
    """One running rank; `on_exit(code)` is called once, on the event loop, when it ends by itself."""

    def __init__(
        self,
        spec: RankSpec,
        *,
        environment: Mapping[str, str],
        on_exit: Callable[[int], None],
        command: Sequence[str],
    ) -> None:
        """Start it in an environment, that of `rank_environment`; `command` are the arguments of the interpreter."""
        self._process = subprocess.Popen(  # noqa: S603 - the engine's own words
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            pass_fds=(spec.arena_fd,),
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the engine alone
        )
        assert self._process.stdin is not None
        self._lifeline = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it is gone already; its exit says so
            self._lifeline.write(msgspec.json.encode(spec) + b"\n")
            self._lifeline.flush()
        self._on_exit = on_exit
        self._exited = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _reap(self) -> None:
        code = self._process.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()
        self._exited.set_result(code)
        self._on_exit(code)

    async def end(self, *, grace_s: float) -> None:
        """Wait for the process to end; kill it when it has not after the grace.

        Blocks: at most the grace, and the moment that the system takes to kill.
        """
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._exited)
        except TimeoutError:
            self._process.kill()
            await asyncio.shield(self._exited)
