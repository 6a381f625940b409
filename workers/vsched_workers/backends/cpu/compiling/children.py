"""Compile kernels, each in its own process: `python -m vsched_workers.backends.cpu.compiling.children PROCESSES`.

Reads the kernels as JSON from standard input. Writes the index of each compiled kernel to standard output, one per
line. The processes are forked from this one, which has imported the libraries and has one thread; the memory of the
compiler is freed when they exit. They end with the parent process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback

import msgspec

from vsched_workers.backends.cpu.compiling.needs import Need

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compile all, the longest first; return 1 if any failed."""
    _end_with_parent()
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Need])
    waiting = sorted(range(len(wanted)), key=lambda index: wanted[index].seconds)
    running: dict[int, int] = {}
    failed = False
    while waiting or running:
        while waiting and len(running) < int(sys.argv[1]):
            index = waiting.pop()
            running[_fork(wanted[index])] = index
        pid, status = os.wait()
        index = running.pop(pid)
        if status:
            failed = True
            sys.stderr.write(f"{wanted[index]} was not compiled: status {status}\n")
            continue
        sys.stdout.write(f"{index}\n")
        sys.stdout.flush()
    return int(failed)


def _fork(need: Need) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _end_with_parent()
        need.load()
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does with an exception
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
