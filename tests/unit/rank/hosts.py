"""Hosts on addresses of this machine, for worker groups whose ranks run there."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import zmq

from tests.cable import Cable
from tests.host_process import HostProcess
from tests.unit.rank.worker_groups import Place
from vsched.aio.hosts.link import Context, EngineSocket, HostSocket, curve_keys, make_secret
from vsched.aio.hosts.remote import PlacedLauncher
from vsched.aio.hosts.server import HostServer
from vsched.aio.launcher import LocalLauncher
from vsched.config import Config
from vsched.config.sections import ClusterConfig, DeadlinesConfig

PATIENT = DeadlinesConfig(heartbeat_s=0.1, rank_timeout_s=60)


class RunningHost:
    """A host as in `vsched host`, on this event loop."""

    def __init__(self, address: str, shared: bytes, name: str, *, cores: int | None = None) -> None:
        self._context: Context = zmq.Context()
        self.launcher = LocalLauncher()
        self.link = HostSocket(self._context, address, curve_keys(shared, "host"), self._receive)
        self.server = HostServer(
            self.launcher, send=self.link.send, read=self.link.read, name=name, cores=cores
        )

    def _receive(self, peer: bytes, frame: bytes) -> None:
        self.server.receive(peer, frame)

    async def close(self) -> None:
        await self.server.close()
        self.link.close()
        self.launcher.close()
        self._context.destroy(linger=0)


class Hosts:
    """Hosts by name, each at an address of its own, and a launcher that places worker groups on them."""

    def __init__(self) -> None:
        self.shared = make_secret()
        self.running: dict[str, RunningHost] = {}
        self._addresses: dict[str, str] = {}
        self._context: Context = zmq.Context()

    def start(self, name: str) -> RunningHost:
        """Start a host, at the address that one of its name had before."""
        address = self._addresses.get(name, f"tcp://127.0.0.{2 + len(self._addresses)}:*")
        host = self.running[name] = RunningHost(address, self.shared, name)
        self._addresses[name] = host.link.address
        return host

    def know(self, name: str, address: str) -> None:
        """Have a host reached at another address."""
        self._addresses[name] = address

    def launcher(
        self,
        place: Place,
        *,
        encode: Sequence[str] = (),
        generate: Sequence[str] = (),
        deadlines: DeadlinesConfig = PATIENT,
        open_s: float = 60,
    ) -> PlacedLauncher:
        """Have the worker groups of a place run on hosts."""
        keys = curve_keys(self.shared, "engine")
        hosts = {
            name: partial(EngineSocket, self._context, address, keys)
            for name, address in self._addresses.items()
        }
        cluster = ClusterConfig(encode=[*encode], generate=[*generate], connect_s=open_s)
        config = Config(cluster=cluster, deadlines=deadlines)
        placed = place.launcher = PlacedLauncher(config, place.launcher, hosts)
        return placed

    async def close(self) -> None:
        for host in self.running.values():
            await host.close()
        self._context.destroy(linger=0)


@contextmanager
def host_process(hosts: Hosts) -> Iterator[HostProcess]:
    """Yield `vsched host` as a process, under the name `far`."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "hosts.key"
        key.touch(0o600)
        key.write_text(hosts.shared.hex())
        process = HostProcess("far", "127.0.0.2", key)
        hosts.know("far", process.address)
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def cable_to(hosts: Hosts, name: str) -> AsyncIterator[Cable]:
    """Yield a cable that leads to a host from now on."""
    async with Cable(hosts.running[name].link.address) as cable:
        hosts.know(name, cable.address)
        yield cable


@asynccontextmanager
async def hosts_of(*names: str) -> AsyncIterator[Hosts]:
    """Yield running hosts of these names."""
    hosts = Hosts()
    for name in names:
        hosts.start(name)
    try:
        yield hosts
    finally:
        await hosts.close()
