"""Starts the imports of ranks, the longest part of a start, before the engine's own imports are done.

The command line calls this as soon as it has read its configuration; the engine's other imports, about a second on one
core, run concurrently. Only for a process that runs nothing but the server, as with `forgo_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from vsched.aio.replicas.launcher import Modules, make_fork_server, modules_of
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
) -> Iterator[Mapping[Modules, ForkServer]]:
    """Start the fork server of a configuration's ranks, for a launcher to take over; leaving the context ends it.

    Its process is `idle`, if given, which the caller ends. Empty if ranks are not forked, or their imports are unknown
    because of an error, which the engine reports.
    """
    servers: dict[Modules, ForkServer] = {}
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


def _modules(config: Config) -> Modules:
    """Return the imports of ranks of the generate stage; those of the encode stage are usually the same.

    Raises:
        VschedError: When the plug-in does not exist, or the checkpoint cannot be served.
    """
    section = config.generate
    if not config.model.path or not section.on_cpu or config.cluster.elsewhere:
        return ()
    plugin = load_worker(section.plugin, path="generate.plugin")
    if isinstance(plugin, LeanPreprocessing):
        plugin.forgo_models(config.model.path)  # before anything looks for torch
    info = plugin.inspect(config.model.path, dtype=config.model.dtype, item_tokens_max=0)
    return modules_of(info, [(section.plugin, section.device)])
