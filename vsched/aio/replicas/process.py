"""A rank as a child process of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from vsched.aio.replicas.fork_server import ForkServer, ForkServerLostError
from vsched.fork_server import ForkOrder
from vsched.worker.spec import RankSpec

logger = logging.getLogger(__name__)
RANK_COMMAND = ("-m", "vsched.rank")

TOLD_CODES = (1, 2)
"""Exit codes of ranks that have sent a report with the reason."""
LAST_WORD_S = 1.0
"""Delay of reporting such an exit: the report is more precise, and may arrive later on a busy machine."""


class RankProcess:
    """A rank's process; `on_exit(code)` is called once, on the event loop, when it ends by itself.

    It is forked by a fork server, or a new interpreter if there is none or the server is lost.
    """

    def __init__(
        self,
        spec: RankSpec,
        *,
        environment: Mapping[str, str],
        on_exit: Callable[[int], None],
        command: Sequence[str],
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start it with an environment from `rank_environment`; `command` are the arguments of the interpreter."""
        self._spec = spec
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._exited = self._loop.create_future()
        self._pid = 0
        self._wait: Callable[[], int] | None = None
        self._ordered = False
        self._ending = False
        self._telling: asyncio.TimerHandle | None = None
        stdin, lifeline = os.pipe()
        self._lifeline = os.fdopen(lifeline, "wb")
        spawn = partial(self._spawn, stdin, environment, command)
        self._forking: asyncio.Task[None] | None = None
        if fork_server is not None:
            order = ForkOrder(
                command=command,
                folder=os.getcwd(),
                environment=dict(environment),
                numbers=[0, 1, 2, spec.arena_fd],
            )
            self._forking = self._loop.create_task(self._fork(fork_server, order, stdin, spawn))
            return
        try:
            spawn()
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(stdin)

    @property
    def pid(self) -> int:
        """The process id; 0 before the process exists."""
        return self._pid

    def _spawn(self, stdin: int, environment: Mapping[str, str], command: Sequence[str]) -> None:
        process = subprocess.Popen(  # noqa: S603 - no outside input
            [sys.executable, *command],
            stdin=stdin,
            pass_fds=(self._spec.arena_fd,),
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C must reach only the engine
        )
        self._started(process.pid, process.wait)

    async def _fork(
        self, server: ForkServer, order: ForkOrder, stdin: int, spawn: Callable[[], None]
    ) -> None:
        try:
            with await server.open() as channel:
                self._ordered = True
                pid = await server.fork(channel, order, [stdin, *order.numbers[1:]])
            self._started(pid, partial(_exit_code, pid))
        except ForkServerLostError as error:
            logger.warning("%s: a new process instead: %s", self._spec.name, error)
            try:
                spawn()
            except OSError as failure:
                logger.error("%s: cannot be started: %s", self._spec.name, failure)  # noqa: TRY400
                self._ended(1)
        finally:
            os.close(stdin)

    def _started(self, pid: int, wait: Callable[[], int]) -> None:
        self._pid, self._wait = pid, wait
        with contextlib.suppress(BrokenPipeError):  # it has ended already; `_reap` reports that
            self._lifeline.write(msgspec.json.encode(self._spec) + b"\n")
            self._lifeline.flush()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        assert self._wait is not None
        code = self._wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended(code)

    def _ended(self, code: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()
        self._exited.set_result(code)
        if code in TOLD_CODES and not self._ending:
            self._telling = self._loop.call_later(LAST_WORD_S, self._on_exit, code)
        else:
            self._on_exit(code)

    async def end(self, *, grace_s: float) -> None:
        """Wait for the process to end; kill it after the grace period.

        An exit that waits for the rank's report is not reported any more.

        Blocks: at most the grace period, plus the time of a pending fork and of killing.
        """
        self._ending = True
        if self._telling is not None:
            self._telling.cancel()
        if self._forking is not None:
            if not self._ordered:
                self._forking.cancel()
            await asyncio.wait([self._forking])
        if self._wait is None:  # no process was started
            self._lifeline.close()
            return
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._exited)
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the id cannot be reused
            await asyncio.shield(self._exited)


def _exit_code(pid: int) -> int:
    """Reap a child that has ended; 0 if it was reaped already, as in `subprocess`."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status)
