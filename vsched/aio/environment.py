"""The environment of an engine: clock, threads, network, and launcher of ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsched.aio.grammar_checks import GrammarChecker, grammar_processes
from vsched.aio.hosts.keys import curve_keys, make_secret, read_key_file
from vsched.aio.hosts.on_ray import RayCalls, RayHosts
from vsched.aio.hosts.placement import PlacedLauncher, hosts_at, hosts_sought, ray_host
from vsched.aio.hosts.ray_calls import InstalledRay
from vsched.aio.hosts.remote import Connect, Patience
from vsched.aio.hosts.stream import WINDOW_BYTES
from vsched.aio.policy_times import QueueClock
from vsched.aio.replicas.fork_server import ForkServer
from vsched.aio.replicas.launcher import Launcher, LocalLauncher, Modules
from vsched.aio.replicas.process import RANK_COMMAND
from vsched.aio.shell import Recorder
from vsched.config import Config, MediaConfig
from vsched.kernel import Scheduler
from vsched.media import MediaPipeline, PixelStore
from vsched.record.recorder import open_recorder
from vsched.types import ModelInfo
from vsched.worker.contract import Preprocessor


def local_launcher(
    config: Config,
    *,
    command: Sequence[str] = RANK_COMMAND,
    forked: bool = True,
    started: Mapping[Modules, ForkServer] | None = None,
) -> LocalLauncher:
    """Return a launcher for ranks as processes of this host; see `LocalLauncher`."""
    del config  # `Environment.make_launcher` gives it
    return LocalLauncher(command=command, forked=forked, started=started)


def make_launcher(
    config: Config, *, started: Mapping[Modules, ForkServer] | None = None
) -> Launcher:
    """Return a launcher for the configured hosts.

    Raises:
        ConfigError: When the key file of other hosts cannot be read, or Ray cannot be reached.
    """
    own = local_launcher(config, started=started)
    try:
        return placed(config, own) if config.cluster.elsewhere else own
    except BaseException:
        own.close()
        raise


def placed(config: Config, own: Launcher, *, ray: RayCalls | None = None) -> PlacedLauncher:
    """Return a launcher for the hosts of a cluster."""
    cluster = config.cluster
    hosts: dict[str, Connect] = {}
    with contextlib.ExitStack() as opened:
        if cluster.used & cluster.hosts.keys():
            shared = read_key_file(cluster.key_file, key="cluster.key_file")
            found, close = hosts_at(cluster.hosts, curve_keys(shared, "engine"))
            opened.callback(close)
            hosts |= found
        on_ray = config.on_ray
        if on_ray:
            secret = make_secret()
            replicas = {ray_host(*which): resources for which, resources in on_ray.items()}
            ray_hosts = RayHosts(ray or InstalledRay(), cluster, replicas, secret)
            opened.callback(ray_hosts.close)
            found, close = hosts_sought(ray_hosts.connects, curve_keys(secret, "engine"))
            opened.callback(close)
            hosts |= found
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of an engine; the defaults are those of a server, and a simulation passes its own.

    Attributes:
        make_launcher: Called once; returns the launcher of all worker groups.
        make_grammar_checker: Returns the grammar checker; None if the plug-in has no grammars.
        make_media: Returns the pipeline that prepares requests, with its threads and network.
        open_record: Returns the record of a kernel, or None to keep none.
        now_ns: The kernel's clock.
        make_queue_clock: Called once on the event loop's thread; returns the clock of its waits for a core, in ns.
    """

    make_launcher: Callable[[Config], Launcher] = make_launcher
    make_grammar_checker: Callable[[Config, ModelInfo], GrammarChecker | None] = grammar_processes
    make_media: Callable[[Preprocessor, PixelStore, MediaConfig], MediaPipeline] = MediaPipeline
    open_record: Callable[[Config, Scheduler], Recorder | None] = open_recorder
    now_ns: Callable[[], int] = time.monotonic_ns
    make_queue_clock: Callable[[], Callable[[], int]] = QueueClock
