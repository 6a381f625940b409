"""The environment of an engine: clock, threads, network, and launcher of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vsched.aio.grammar_checks import GrammarChecker, grammar_processes
from vsched.aio.hosts.placement import placed
from vsched.aio.replicas.fork_server import ForkServer
from vsched.aio.replicas.launcher import Launcher, LocalLauncher, Modules
from vsched.aio.replicas.process import RANK_COMMAND
from vsched.aio.shell import EventRecorder
from vsched.config import Config, MediaConfig
from vsched.kernel import Scheduler
from vsched.media import MediaPipeline, PixelStore
from vsched.media.pruning import Pruning
from vsched.policy_host.call_times import QueueClock
from vsched.record.recorder import open_recorder
from vsched.types import ModelInfo
from vsched.worker.contract import Preprocessor

MakeMedia = Callable[[Preprocessor, PixelStore, MediaConfig, Pruning | None], MediaPipeline]


def make_launcher(
    config: Config,
    *,
    command: Sequence[str] = RANK_COMMAND,
    forked: bool = True,
    started: Mapping[Modules, ForkServer] | None = None,
) -> Launcher:
    """Return a launcher for the configured hosts; for the other arguments see `LocalLauncher`.

    Raises:
        ConfigError: When the key file of other hosts cannot be read, or Ray cannot be reached.
    """
    own = LocalLauncher(command=command, forked=forked, started=started)
    try:
        return placed(config, own) if config.cluster.elsewhere else own
    except BaseException:
        own.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of an engine; the defaults are for a server, and a simulation passes its own.

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
    make_media: MakeMedia = MediaPipeline
    open_record: Callable[[Config, Scheduler], EventRecorder | None] = open_recorder
    now_ns: Callable[[], int] = time.monotonic_ns
    make_queue_clock: Callable[[], Callable[[], int]] = QueueClock
