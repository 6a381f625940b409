"""A server whose calls reply, die, hang, or exceed a limit, depending on their content."""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec

from vsched.isolated.server import Channel, limit_resources, read_frame, read_setup, serve


def act(setup: bytes, channel: Channel) -> bytes:
    """Carry out one call."""
    order = read_frame(channel).decode()
    limit_resources(cpu_s=0.2, wall_s=60, memory_bytes=32 << 20, stack_bytes=1 << 20)
    match order.split():
        case ["die", number]:
            os.kill(os.getpid(), int(number))
        case ["once", path]:
            try:
                os.mkdir(path)
            except FileExistsError:
                return b'"again"'
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hang"]:
            while True:
                signal.pause()
        case ["loop"]:
            while True:
                pass
        case ["take", megabytes]:
            return b'"%d"' % len(bytearray(int(megabytes) << 20))
        case ["pid"]:
            return b'"%d"' % os.getpid()
        case ["raise"]:
            raise ValueError("as asked")
        case ["garble", size]:
            channel.write(bytes.fromhex(size))
            return b"{"
    return msgspec.json.encode(setup.decode() + order)


def main() -> None:
    orders, setup_file = map(int, sys.argv[1:])
    setup = read_setup(setup_file)
    serve(socket.socket(fileno=orders), lambda channel: act(setup, channel))


if __name__ == "__main__":
    main()
