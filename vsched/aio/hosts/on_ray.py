"""Hosts that Ray places: one bundle of a placement group for each replica, and in it an actor that serves as a host.

Ray starts, places and watches; what engine and host say to each other goes over the same stream as with any host. The
secret of the stream is made for one start of the engine, and given to the actors as they are made. A host is counted
as lost by the stream, which sees a broken connection before Ray does; Ray then starts the actor again where its bundle
goes, and the replica is found there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vsched.aio.hosts.remote import Connect
from vsched.aio.hosts.sought import connect_by_search
from vsched.config.cluster import ClusterConfig
from vsched.errors import ConfigError, VschedError, limit_message

logger = logging.getLogger(__name__)
Resources = Mapping[str, float]
SLOW_S = 5.0
"""How long Ray may take to place and start a host until the log says what for."""


class ActorDied(VschedError):
    """An actor that Ray will not start again."""


class RayCalls(Protocol):
    """The few calls of Ray that are needed; see `vsched.aio.hosts.ray_calls`."""

    def connect(self, address: str) -> None:
        """Connect this process with a cluster, unless it is."""
        ...

    def make_group(self, bundles: Sequence[Resources], strategy: str) -> Any:
        """Return a new placement group, without waiting until it is placed."""
        ...

    def find_group(self, name: str) -> tuple[Any, Sequence[Resources]]:
        """Return a placement group that is there, and its bundles."""
        ...

    def start_host(
        self, group: Any, bundle: int, resources: Resources, secret: bytes, cores: int
    ) -> Any:
        """Return an actor that serves as a host in a bundle, without waiting for it."""
        ...

    async def address_of(self, actor: Any) -> str:
        """Return where an actor listens, as soon as it runs.

        Raises:
            ActorDied: When it never will.
            VschedError: When it cannot be asked now.
        """
        ...

    def close(self, actors: Sequence[Any], group: Any) -> None:
        """Stop actors, give a group back that is not None, and leave the cluster."""
        ...


class RayHosts:
    """The hosts of replicas on a Ray cluster."""

    def __init__(
        self,
        calls: RayCalls,
        cluster: ClusterConfig,
        replicas: Mapping[str, Resources],
        secret: bytes,
    ) -> None:
        """Connect, and have a host started for each replica; these have names and resources.

        Raises:
            ConfigError: When there is no such cluster, or a placement group has too few bundles.
        """
        self._calls = calls
        self._secret = secret
        self._resources = [*replicas.values()]
        self._actors: dict[int, Any] = {}
        self._names = [*replicas]
        self._group: Any = None
        self._made = not cluster.ray_group
        calls.connect(cluster.ray)
        try:
            if self._made:
                self._group = calls.make_group(self._resources, cluster.ray_strategy)
            else:
                self._group, self._resources = self._given(cluster.ray_group)
            for bundle in range(len(self._names)):
                self._start(bundle)
        except BaseException:
            self.close()
            raise

    def _given(self, name: str) -> tuple[Any, list[Resources]]:
        group, bundles = self._calls.find_group(name)
        if len(bundles) < len(self._names):
            raise ConfigError(
                limit_message(
                    f"cluster.ray_group: too few bundles in {name!r}",
                    value=len(bundles),
                    limit=f"{len(self._names)}, one for each replica",
                    remedy="make the group larger, or start fewer replicas",
                )
            )
        return group, [*bundles]

    def _start(self, bundle: int) -> None:
        resources = self._resources[bundle]
        cores = max(int(resources.get("CPU", 1)), 1)
        self._actors[bundle] = self._calls.start_host(
            self._group, bundle, resources, self._secret, cores
        )

    async def _find(self, bundle: int) -> str:
        """Return where a host listens; one that Ray gave up is started again when it is looked for the next time."""
        if bundle not in self._actors:
            self._start(bundle)
        slow = asyncio.get_running_loop().call_later(
            SLOW_S,
            logger.warning,
            "%s is not there yet; where Ray has no room for %s, `ray status` says what is taken",
            self._names[bundle],
            dict(self._resources[bundle]),
        )
        try:
            return await self._calls.address_of(self._actors[bundle])
        except ActorDied:
            self._actors.pop(bundle, None)
            raise
        finally:
            slow.cancel()

    def connects(self, connect_to: Callable[[str], Connect]) -> dict[str, Connect]:
        """Return what opens links to the hosts, by their names; `connect_to` returns what opens one to an address."""

        def connect(bundle: int) -> Connect:
            return connect_by_search(lambda: self._find(bundle), connect_to)

        return {name: connect(bundle) for bundle, name in enumerate(self._names)}

    def close(self) -> None:
        """Give everything back.

        Blocks: for the moment that actors take to stop.
        """
        self._calls.close([*self._actors.values()], self._group if self._made else None)
