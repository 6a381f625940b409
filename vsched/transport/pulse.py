"""A rank's pulse: a thread that signals to the leader that the process is alive during long steps."""

from __future__ import annotations

import contextlib
import threading

import zmq

from vsched.transport.zmq_link import RankLink, pulse_identity
from vsched.wire import Hello, Pulse, encode_report

_STACK_BYTES = 256 << 10
"""The thread does little, and its stack counts toward the memory limit of the process."""


class PulseThread:
    """Sends a pulse until closed; stops if the process is stopped or holds the interpreter lock forever.

    A ZeroMQ socket belongs to one thread, so this thread has its own, with its own identity.
    """

    def __init__(self, link: RankLink, rank: int, secret: str, *, every_s: float) -> None:
        """Start the pulse; it shares the context of `link`, so close it before `link`."""
        self._socket = link.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, pulse_identity(rank))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1)  # pulses that cannot be delivered need not queue up
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
        """Stop the thread."""
        self._over.set()
        self._thread.join()
