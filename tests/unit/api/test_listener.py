"""An address that several processes listen on."""

from __future__ import annotations

import socket

import pytest

from vsched.api.contract import ApiSettings
from vsched.api.http_server import another, listen
from vsched.api.processes.supervisor import share_of
from vsched.config import Config, ServerConfig
from vsched.errors import ConfigError


def config(**server: object) -> Config:
    return Config(server=ServerConfig(**{"port": 0, "processes": 2, **server}))  # type: ignore[arg-type]


def test_listener_of_several_processes_only_keeps_the_address() -> None:
    """It accepts no connections itself; each process has its own socket on the same port."""
    with listen(config()) as kept:
        address = kept.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with another(kept) as one, another(kept) as other:
            assert one.getsockname() == other.getsockname() == address
            one.listen()
            other.listen()
            received = {one: 0, other: 0}
            for listener in received:
                listener.setblocking(False)
            for _ in range(64):
                with socket.create_connection(address):
                    pass
            for listener in received:
                try:
                    while True:
                        listener.accept()[0].close()
                        received[listener] += 1
                except BlockingIOError:
                    pass
            assert sum(received.values()) == 64
            assert min(received.values()) > 8, "one gets nearly all"


def test_listener_of_several_processes_reports_a_port_in_use() -> None:
    """Even if the other server has several processes, which could share the port."""
    with listen(config()) as kept, another(kept) as listening:
        listening.listen()
        with pytest.raises(ConfigError, match=r"server\.port: .*already in use"):
            listen(config(port=kept.getsockname()[1]))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_listener_for_both_families_stays_one() -> None:
    with listen(config(host="::")) as kept, another(kept) as one:
        one.listen()
        with socket.create_connection(("127.0.0.1", kept.getsockname()[1])):
            pass


def test_share_of_a_process_adds_up_to_what_was_set() -> None:
    settings = ApiSettings(bodies_bytes_max=1000, body_bytes_max=500)
    share = share_of(settings, 3)
    assert share.bodies_bytes_max == 334
    assert share.body_bytes_max == 500, "one body may be as large as before"
