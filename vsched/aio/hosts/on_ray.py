"""Hosts placed by Ray: an actor serves as the host of each replica, in a bundle of a placement group.

Ray places, starts and restarts the actors; engine and host communicate over the same stream as with other hosts. The
stream's secret is generated for one run of the engine and passed to the actors. The stream detects a lost host before
Ray does; Ray then restarts the actor, perhaps on another node, and the engine looks up its new address.
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
"""Time for Ray to place and start a host before a warning is logged."""


class ActorDied(VschedError):
    """An actor that Ray will not restart."""


class RayCalls(Protocol):
    """The required calls of Ray; see `vsched.aio.hosts.ray_calls`."""

    def connect(self, address: str) -> None:
        """Connect this process to a cluster, unless it is connected."""
        ...

    def make_group(self, bundles: Sequence[Resources], strategy: str) -> Any:
        """Create a placement group, without waiting for its placement."""
        ...

    def find_group(self, name: str) -> tuple[Any, Sequence[Resources]]:
        """Return an existing placement group and its bundles."""
        ...

    def start_host(
        self, group: Any, bundle: int, resources: Resources, secret: bytes, cores: int
    ) -> Any:
        """Start an actor that serves as a host in a bundle, without waiting for it."""
        ...

    async def address_of(self, actor: Any) -> str:
        """Return the address of an actor's host once it runs.

        Raises:
            ActorDied: When it never will.
            VschedError: When the actor cannot be reached now.
        """
        ...

    def close(self, actors: Sequence[Any], group: Any) -> None:
        """Stop actors, remove the placement group unless it is None, and disconnect."""
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
        """Connect, and start a host for each of `replicas`, which maps names to resources.

        Raises:
            ConfigError: When the cluster cannot be reached, or the placement group has too few bundles.
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
        """Return the address of a host; an actor that Ray has given up is replaced at the next call."""
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
        """Return functions that open links to the hosts, by name; `connect_to` returns one for an address."""

        def connect(bundle: int) -> Connect:
            return connect_by_search(lambda: self._find(bundle), connect_to)

        return {name: connect(bundle) for bundle, name in enumerate(self._names)}

    def close(self) -> None:
        """Release everything.

        Blocks: until the actors have stopped.
        """
        self._calls.close([*self._actors.values()], self._group if self._made else None)
