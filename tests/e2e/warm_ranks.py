"""Rank processes that come from one process that has imported torch and transformers already.

Importing takes most of the start of a rank with a small model, and the end-to-end tests start dozens of them. Here,
`fork` takes its place; all else is as it is in production: a process of its own for each rank, with the environment,
the descriptors and the standard input that the engine gave, and the engine's own child, whose end it sees.

That last thing takes a detour. A process is forked by the one that has the modules; its parent ends at once, and the
system gives the orphan to the tests, which for this moment have declared themselves to be a *subreaper*.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

PRELOADED = (
    "numba",
    "torch",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
)
ORDER_BYTES_MAX = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36
_FREE_FROM = 500
"""Descriptors are kept above this number while they are put in their places."""


class WarmProcess:
    """A forked rank: what `subprocess.Popen` would have been."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmRanks:
    """Stands in for the module `subprocess` where ranks are started."""

    PIPE = subprocess.PIPE

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(number)], pass_fds=(number,)
            )

    def Popen(  # noqa: N802  # the name that it stands in for
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_others: Any,
    ) -> WarmProcess:
        """Start a rank; `command` is an interpreter, `-m`, a module and its arguments."""
        adopt_orphans(True)
        theirs, stdin = os.pipe()
        numbers = [0, 2, *pass_fds]
        order = {
            "words": command[2:],
            "folder": os.getcwd(),
            "environment": dict(env),
            "numbers": numbers,
        }
        socket.send_fds(self._orders, [json.dumps(order).encode()], [theirs, 2, *pass_fds])
        os.close(theirs)
        pid = int.from_bytes(self._orders.recv(4), "little")
        adopt_orphans(False)
        assert pid, "the process with the modules is gone"
        return WarmProcess(pid, stdin)

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


def adopt_orphans(whether: bool) -> None:
    """Become the parent of descendants whose parents end, or do so no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def serve(orders: socket.socket) -> None:
    """Fork a rank for each order, and answer with its number."""
    while True:
        line, received, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 8)
        if not line:
            return
        read, write = os.pipe()
        parent = os.fork()
        if not parent:
            pid = os.fork()
            if not pid:
                orders.close()
                os.close(read)
                os.close(write)
                become_rank(json.loads(line), received)
            os.write(write, pid.to_bytes(4, "little"))
            os._exit(0)
        os.waitpid(parent, 0)
        orders.send(os.read(read, 4))
        for each in (read, write, *received):
            os.close(each)


def become_rank(order: dict[str, Any], received: Sequence[int]) -> NoReturn:
    """Take what a new process would have been given, and run the module."""
    code: object = 1
    try:
        os.setsid()
        kept = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE_FROM) for each in received]
        for each in received:
            os.close(each)
        for each, number in zip(kept, order["numbers"], strict=True):
            os.dup2(each, number)
            os.close(each)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        module, *words = order["words"]
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  # as the interpreter does with an exception
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in what is forked"
    gc.freeze()
    serve(orders)


if __name__ == "__main__":
    main()
