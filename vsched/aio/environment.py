"""What an engine finds around it: a clock, threads, a network, and a launcher of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsched.aio.hosts.keys import curve_keys, read_key_file
from vsched.aio.hosts.placement import PlacedLauncher, hosts_at
from vsched.aio.hosts.remote import Patience
from vsched.aio.replicas.fork_server import ForkServer
from vsched.aio.replicas.launcher import Launcher, LocalLauncher
from vsched.aio.replicas.process import RANK_COMMAND
from vsched.aio.shell import Recorder
from vsched.config import Config, DeadlinesConfig
from vsched.config.cluster import ClusterConfig
from vsched.kernel import Scheduler
from vsched.media import MediaPipeline, MediaSettings, PixelStore
from vsched.record.recorder import open_recorder
from vsched.worker.contract import Preprocessor


def local_launcher(
    config: Config,
    *,
    command: Sequence[str] = RANK_COMMAND,
    forked: bool = True,
    begun: Mapping[frozenset[str], ForkServer] | None = None,
) -> LocalLauncher:
    """Return what starts ranks as processes of this host; see `LocalLauncher`."""
    return LocalLauncher(
        oversubscribed=config.oversubscribed, command=command, forked=forked, begun=begun
    )


def make_launcher(
    config: Config, *, begun: Mapping[frozenset[str], ForkServer] | None = None
) -> Launcher:
    """Return what starts ranks where the configuration says: on this host, or on others, too.

    Raises:
        ConfigError: When the key file of other hosts cannot be read.
    """
    cluster = config.cluster
    own = local_launcher(config, begun=begun)
    try:
        return placed(cluster, own, config.deadlines) if cluster.elsewhere else own
    except BaseException:
        own.close()
        raise


def placed(cluster: ClusterConfig, own: Launcher, deadlines: DeadlinesConfig) -> PlacedLauncher:
    """Return what starts ranks on the hosts of a cluster."""
    shared = read_key_file(cluster.key_file, key="cluster.key_file")
    hosts, close = hosts_at(cluster.hosts, curve_keys(shared, "engine"))
    patience = Patience(
        alive_s=deadlines.heartbeat_s,
        silence_s=deadlines.rank_timeout_s + deadlines.heartbeat_s,
        open_s=cluster.connect_s,
    )
    stages = {"encode": cluster.encode, "generate": cluster.generate}
    return PlacedLauncher(own, hosts, stages, patience, close=close)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The world of an engine; the defaults are those of a server, a simulation hands in its own.

    Attributes:
        make_launcher: Asked once, with the configuration; what it returns starts the ranks of all worker_groups.
        make_media: Returns what prepares requests, with threads and a network to fetch images from.
        open_record: Returns the record of a kernel, None to keep none.
        now_ns: The kernel's clock.
    """

    make_launcher: Callable[[Config], Launcher] = make_launcher
    make_media: Callable[[Preprocessor, PixelStore, MediaSettings], MediaPipeline] = MediaPipeline
    open_record: Callable[[Config, Scheduler], Recorder | None] = open_recorder
    now_ns: Callable[[], int] = time.monotonic_ns
