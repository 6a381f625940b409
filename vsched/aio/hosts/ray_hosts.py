"""Hosts placed by Ray: an actor serves as the host of each replica, in a bundle of a placement group.

Ray places, starts and restarts the actors; engine and host communicate over the same stream as with other hosts. The
stream's secret is generated for one run of the engine and passed to the actors. The stream detects a lost host before
Ray does; Ray then restarts the actor, perhaps on another node. Each start of a worker group looks its address up.

Only this module imports Ray, when it is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vsched.aio.hosts.link import Find
from vsched.aio.hosts.server import serve_host
from vsched.config.sections import ClusterConfig
from vsched.errors import ConfigError, VschedError

logger = logging.getLogger(__name__)
Resources = Mapping[str, float]
SLOW_S = 5.0
"""Time for Ray to place and start a host before a warning is logged."""
NAMESPACE = "vsched"
"""Namespace of named placement groups."""
STOP_S = 2.0
"""Time for actors to stop before they are killed."""


class RayHosts:
    """The hosts of replicas on a Ray cluster."""

    def __init__(
        self,
        calls: InstalledRay,
        cluster: ClusterConfig,
        replicas: Mapping[str, Resources],
        secret: bytes,
    ) -> None:
        """Connect, and start a host for each of `replicas`, which maps names to resources.

        Raises:
            ConfigError: When the cluster cannot be reached, or the placement group has too few bundles.
        """
        self._calls = calls
        self._resources = [*replicas.values()]
        self._actors: list[Any] = []
        self._names = [*replicas]
        self._group: Any = None
        self._made = not cluster.ray_group
        calls.connect(cluster.ray, cluster.connect_s)
        try:
            if self._made:
                self._group = calls.make_group(self._resources, cluster.ray_strategy)
            else:
                self._group, self._resources = self._given(cluster.ray_group)
            for bundle, resources in enumerate(self._resources[: len(self._names)]):
                cores = max(int(resources.get("CPU", 1)), 1)
                self._actors.append(calls.start_host(self._group, bundle, resources, secret, cores))
        except BaseException:
            self.close()
            raise

    def _given(self, name: str) -> tuple[Any, list[Resources]]:
        group, bundles = self._calls.find_group(name)
        if len(bundles) < len(self._names):
            raise ConfigError.of_limit(
                f"cluster.ray_group: too few bundles in {name!r}",
                value=len(bundles),
                limit=f"{len(self._names)}, one for each replica",
                remedy="make the group larger, or start fewer replicas",
            )
        return group, [*bundles]

    async def _find(self, bundle: int) -> str:
        """Return the address of a host, once Ray has placed it."""
        slow = asyncio.get_running_loop().call_later(
            SLOW_S,
            logger.warning,
            "Ray has not placed %s yet; if it has no room for %s, `ray status` shows the resources in use",
            self._names[bundle],
            dict(self._resources[bundle]),
        )
        try:
            return await self._calls.address_of(self._actors[bundle])
        finally:
            slow.cancel()

    def finders(self) -> dict[str, Find]:
        """Return functions that return the address of a host, by name."""
        return {name: partial(self._find, bundle) for bundle, name in enumerate(self._names)}

    def close(self) -> None:
        """Release everything.

        Blocks: until the actors have stopped.
        """
        self._calls.close(self._actors, self._group if self._made else None)


class HostActor:
    """`vsched host` as an actor: its event loop runs in a thread of its own, next to the thread of Ray's calls."""

    def __init__(self, secret: bytes, cores: int) -> None:
        self._listening: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(secret, cores), daemon=True)
        self._thread.start()

    def _run(self, secret: bytes, cores: int) -> None:
        try:
            self._loop.run_until_complete(self._serve(secret, cores))
        except asyncio.CancelledError:
            return
        except BaseException:
            logger.exception("the host has ended")
            os._exit(1)  # Ray restarts it

    async def _serve(self, secret: bytes, cores: int) -> None:
        import ray

        self._serving = asyncio.current_task()
        where = f"tcp://{ray.util.get_node_ip_address()}:*"
        await serve_host(where, secret, name="", on_ready=self._listening.set_result, cores=cores)

    def address(self) -> str:
        return self._listening.result()

    def stop(self) -> None:
        self._listening.result()
        if self._serving is not None:
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(STOP_S)


class InstalledRay:
    """The calls of the installed Ray."""

    def __init__(self) -> None:
        self._connected = False

    def connect(self, address: str, within_s: float) -> None:
        """Connect this process to a cluster, unless it is connected.

        Blocks: until the cluster's address accepts a connection, up to `within_s`, and Ray has connected.

        Raises:
            ConfigError: When Ray is not installed, or the cluster cannot be reached.
        """
        with _signals_kept():
            try:
                import ray
            except ImportError as error:
                raise ConfigError(
                    "cluster.ray: Ray is not installed. Remedy: pip install 'vsched[ray]'"
                ) from error
            if ray.is_initialized():
                return
            try:
                if address != "auto":  # Ray itself tries for a quarter of an hour
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), within_s).close()
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (OSError, OverflowError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"cluster.ray: no Ray cluster at {address!r}: {str(error).rstrip('.')}. Remedy: start one with "
                    "`ray start --head`, of the same versions of Ray and Python"
                ) from error
        self._connected = True

    def make_group(self, bundles: Sequence[Resources], strategy: str) -> Any:
        """Create a placement group, which is removed when this process ends."""
        from ray.util.placement_group import placement_group

        named = strategy.replace("-", "_").upper()
        return placement_group([dict(bundle) for bundle in bundles], strategy=named)

    def find_group(self, name: str) -> tuple[Any, Sequence[Resources]]:
        """Return a placement group that is there, and its bundles.

        Raises:
            ConfigError: When there is none of this name.
        """
        import ray

        try:
            group = ray.util.get_placement_group(name)
        except ValueError as error:
            raise ConfigError(
                f"cluster.ray_group: there is no placement group {name!r} in the namespace {NAMESPACE!r}. Remedy: make "
                "one there, of lifetime `detached`, or leave the name out"
            ) from error
        return group, group.bundle_specs

    def start_host(
        self, group: Any, bundle: int, resources: Resources, secret: bytes, cores: int
    ) -> Any:
        """Start an actor that serves as a host in a bundle; Ray restarts it after every loss."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {
            name: amount
            for name, amount in resources.items()
            if name not in ("CPU", "GPU", "memory")
        }
        return (
            ray.remote(HostActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                memory=resources.get("memory"),
                resources=others,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            .remote(secret, cores)
        )

    async def address_of(self, actor: Any) -> str:
        """Return the address of an actor's host once it runs.

        Raises:
            VschedError: When the actor cannot be reached.
        """
        from ray.exceptions import RayError

        try:
            return str(await actor.address.remote())
        except RayError as error:
            raise VschedError(" ".join(str(error).split())) from error

    def close(self, actors: Sequence[Any], group: Any) -> None:
        """Stop actors, remove the placement group unless it is None, and disconnect if `connect` connected.

        Blocks: up to `STOP_S`, after which actors are killed.
        """
        import ray

        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)
        if self._connected:
            ray.shutdown()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which drain the server and which Ray replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
