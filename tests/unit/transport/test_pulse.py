"""The pulse of a rank: it beats whatever the rank does, and ends with it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from vsched.transport.zmq_link import PulseThread, RankLink, pulse_identity
from vsched.wire import Hello, Pulse, RankReport, decode_report

pytestmark = pytest.mark.slow


def test_pulse_proves_itself_and_beats(tmp_path: Path) -> None:
    """The secret first, then beats, even while its rank is too busy to report."""
    address = f"ipc://{tmp_path}/group"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = context.socket(zmq.ROUTER)
    leader.bind(address)
    link = RankLink(address, 3)
    pulse = PulseThread(link, 3, "sesame", every_s=0.01)
    received: list[RankReport] = []
    while len(received) < 4:
        assert leader.poll(5000)
        identity, frame = leader.recv_multipart()
        assert identity == pulse_identity(3)
        received.append(decode_report(frame))
    assert received == [Hello(3, "sesame"), Pulse(), Pulse(), Pulse()]
    pulse.close()
    link.close()
    context.destroy(linger=0)
    assert not any(thread.name == "pulse" for thread in threading.enumerate())


def test_pulse_without_a_leader_ends_at_once(tmp_path: Path) -> None:
    """Nothing is queued without bound, and closing does not wait."""
    link = RankLink(f"ipc://{tmp_path}/nobody", 0)
    usual = threading.stack_size()
    pulse = PulseThread(link, 0, "sesame", every_s=60)
    assert threading.stack_size() == usual
    pulse.close()
    link.socket.setsockopt(zmq.LINGER, 0)
    link.close()
