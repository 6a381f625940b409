"""The calls of Ray, and the actor that serves as a host. Only this module imports Ray, when it is called."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from vsched.aio.hosts.on_ray import ActorDied, Resources
from vsched.aio.hosts.server import serve_host
from vsched.errors import ConfigError, VschedError

logger = logging.getLogger(__name__)
NAMESPACE = "vsched"
"""Namespace of named placement groups."""
STOP_S = 2.0
"""Time for actors to stop before they are killed."""


class HostActor:
    """`vsched host` as an actor: its event loop runs in a thread of its own, next to that of Ray's calls."""

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
        """Return the address of the host."""
        return self._listening.result()

    def stop(self) -> None:
        """End all ranks."""
        self._listening.result()
        if self._serving is not None:
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(STOP_S)


class InstalledRay:
    """The calls of the installed Ray."""

    def __init__(self) -> None:
        self._connected = False

    def connect(self, address: str) -> None:
        """Connect this process to a cluster, unless it is connected.

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
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"cluster.ray: no Ray cluster at {address!r}: {error}. Remedy: start one with "
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
            ActorDied: When it never will.
            VschedError: When the actor cannot be reached now.
        """
        from ray.exceptions import ActorDiedError, RayError

        try:
            return str(await actor.address.remote())
        except ActorDiedError as error:
            raise ActorDied(str(error)) from error
        except RayError as error:
            raise VschedError(str(error)) from error

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
