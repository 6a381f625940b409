"""A rank's pulse: a thread that tells the leader that the process runs while its step takes long."""

from __future__ import annotations

import contextlib
import threading

import zmq

from vsched.transport.zmq_link import RankLink, pulse_identity
from vsched.wire import Hello, Pulse, encode_report

_STACK_BYTES = 256 << 10
"""The thread does next to nothing, and its stack counts against the memory limit of the process."""


class PulseThread:
    """Beats until it is closed; a process that is stopped, or that holds the interpreter for ever, has none.

    ZeroMQ's sockets belong to one thread, so it has one of its own, under an identity of its own.
    """

    def __init__(self, link: RankLink, rank: int, secret: str, *, every_s: float) -> None:
        """Start to beat beside a link, whose context it shares: close this first."""
        self._socket = link.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, pulse_identity(rank))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1)  # what nobody hears need not pile up
        self._socket.connect(link.address)
        self._hello = encode_report(Hello(rank, secret))
        self._every_s = every_s
        self._over = threading.Event()
        usual = threading.stack_size(_STACK_BYTES)
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()
        threading.stack_size(usual)

    def _beat(self) -> None:
        frame = encode_report(Pulse())
        self._socket.send(self._hello)
        while not self._over.wait(self._every_s):
            with contextlib.suppress(zmq.Again):
                self._socket.send(frame, zmq.DONTWAIT)
        self._socket.close()

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()
