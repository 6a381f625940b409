"""Choice of the host for each start of a worker group: per stage, round-robin, skipping hosts that do not answer."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import zmq

from vsched.aio.hosts.ray_hosts import InstalledRay, RayHosts
from vsched.aio.hosts.remote import Connect, Patience, RemoteHost
from vsched.aio.hosts.sockets import (
    Context,
    EngineSocket,
    curve_keys,
    make_secret,
    read_key_file,
)
from vsched.aio.hosts.stream import WINDOW_BYTES
from vsched.aio.replicas.launcher import Host, Launcher
from vsched.config import Config
from vsched.config.sections import OWN_HOST, RAY_HOST
from vsched.transport.arena import Arena
from vsched.types import replica_of, stage_of

logger = logging.getLogger(__name__)


class PlacedLauncher:
    """Starts the worker groups of each stage on the hosts that are listed for it.

    Replica i uses the i-th host, and the next one when its host is lost or does not answer. The first start fails if a
    host does not answer. Later, the only host of a stage is waited for until the deadline for readiness; so is Ray,
    which may have to start nodes first.

    Attributes:
        run_dir: Of the engine's host.
    """

    def __init__(
        self,
        own: Launcher,
        hosts: Mapping[str, Connect],
        stages: Mapping[str, Sequence[str]],
        patience: Patience,
        *,
        close: Callable[[], None] = lambda: None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Create a launcher; `stages` lists host names by stage, empty for the engine's host.

        Names may include `OWN_HOST`, and `RAY_HOST`, which stands for the replica's `ray_host` in `hosts`.
        """
        self.run_dir = own.run_dir
        self._own = own
        self._hosts = hosts
        self._stages = stages
        self._patience = patience
        self._close = close
        self._window_bytes = window_bytes
        self._engine = secrets.token_hex(8)
        self._lost: Counter[str] = Counter()
        self._served: set[str] = set()

    def choose_host(
        self, groups: Sequence[str], arena: Arena, on_lost: Callable[[str], None]
    ) -> Host:
        """Return the next host for these groups."""
        group = groups[-1]
        names = self._stages.get(stage_of(group)) or (OWN_HOST,)
        name = names[(replica_of(group) + self._lost[group]) % len(names)]
        if name == OWN_HOST:
            return self._own.choose_host(groups, arena, on_lost)
        on_ray = name == RAY_HOST
        if on_ray:
            name = ray_host(stage_of(group), replica_of(group))
        waited_for = on_ray or (len(names) == 1 and group in self._served)
        patience = self._patience
        if waited_for:
            patience = msgspec.structs.replace(patience, open_s=0)

        def lost(why: str) -> None:
            self._lost[group] += 1
            on_lost(why)

        logger.info("%s: starting on host %s", " and ".join(groups), name)
        return RemoteHost(
            name,
            self._hosts[name],
            engine=self._engine,
            groups=groups,
            arena=arena,
            patience=patience,
            on_open=lambda: self._served.add(group),
            on_lost=lost,
            window_bytes=self._window_bytes,
        )

    def close(self) -> None:
        """Release everything; all ranks have ended."""
        self._close()
        self._own.close()


def ray_host(stage: str, replica: int) -> str:
    """Return the host name of a replica that Ray places; it has a space, which no other host name has."""
    return f"{RAY_HOST} {stage}-{replica}"


def placed(config: Config, own: Launcher, *, ray: InstalledRay | None = None) -> PlacedLauncher:
    """Return a launcher for the hosts of a cluster."""
    cluster = config.cluster
    hosts: dict[str, Connect] = {}
    with contextlib.ExitStack() as opened:
        context: Context = zmq.Context()
        opened.callback(context.destroy)
        if cluster.used & cluster.hosts.keys():
            shared = read_key_file(cluster.key_file, key="cluster.key_file")
            keys = curve_keys(shared, "engine")
            for name, address in cluster.hosts.items():
                hosts[name] = partial(EngineSocket, context, address, keys)
        on_ray = config.on_ray
        if on_ray:
            secret = make_secret()
            replicas = {ray_host(*which): resources for which, resources in on_ray.items()}
            ray_hosts = RayHosts(ray or InstalledRay(), cluster, replicas, secret)
            opened.callback(ray_hosts.close)
            own_keys = curve_keys(secret, "engine")
            hosts |= ray_hosts.links(
                lambda address: partial(EngineSocket, context, address, own_keys)
            )
        closing = opened.pop_all()
    return placed_on(config, own, hosts, close=closing.close)


def placed_on(
    config: Config,
    own: Launcher,
    hosts: Mapping[str, Connect],
    *,
    close: Callable[[], None] = lambda: None,
    window_bytes: int = WINDOW_BYTES,
) -> PlacedLauncher:
    """Return a launcher for these hosts, with the configured placement and timeouts."""
    cluster, deadlines = config.cluster, config.deadlines
    patience = Patience(
        alive_s=deadlines.heartbeat_s,
        silence_s=deadlines.rank_timeout_s + deadlines.heartbeat_s,
        open_s=cluster.connect_s,
    )
    stages = {stage: cluster.hosts_of(stage) for stage in ("encode", "generate")}
    if config.placement == "together":
        stages["encode"] = stages["generate"]
    return PlacedLauncher(
        own,
        hosts,
        stages,
        patience,
        close=close,
        window_bytes=window_bytes,
    )
