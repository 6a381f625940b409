"""Starts what takes longest of a start, the imports of ranks, before the engine's own are done.

The command line does so as soon as it knows its configuration; the other imports of the engine's process, which take
about a second of a core, go on beside it. It is for a process that is to be the server's alone, as `forgo_models` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from vsched.aio.replicas.launcher import make_fork_server, modules_of
from vsched.errors import VschedError
from vsched.worker.capabilities import LeanPreprocessing
from vsched.worker.registry import load_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vsched.aio.replicas.fork_server import ForkServer, IdleForkServer
    from vsched.config import Config


@contextmanager
def early_fork_servers(
    config: Config, idle: IdleForkServer | None = None
) -> Iterator[Mapping[frozenset[str], ForkServer]]:
    """Begin the fork server of a configuration's ranks, for a launcher to take over; it is gone when the context ends.

    It begins as `idle`, which the caller ends. None if ranks are not forked, or their imports are not known yet; the
    engine reports the reason.
    """
    servers: dict[frozenset[str], ForkServer] = {}
    with suppress(VschedError):
        modules = _modules(config)
        if modules:
            servers[modules] = make_fork_server(modules, idle=idle)
            servers[modules].begin()
        elif idle is not None:
            idle.close()
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


def _modules(config: Config) -> frozenset[str]:
    """Return what the ranks of the generate stage import; those of the other stage most often import the same.

    Raises:
        VschedError: When there is no such plug-in, or no checkpoint that can be served.
    """
    section = config.generate
    if not config.model.path or not section.on_cpu or config.cluster.elsewhere:
        return frozenset()
    plugin = load_worker(section.plugin, path="generate.plugin")
    if isinstance(plugin, LeanPreprocessing):
        plugin.forgo_models(config.model.path)  # before anything looks for torch
    info = plugin.inspect(config.model.path, dtype=config.model.dtype, item_tokens_max=0)
    return modules_of(info, [(section.plugin, section.device)])
