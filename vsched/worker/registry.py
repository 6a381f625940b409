"""Finds worker plug-ins by name, as `vsched.plugins` finds policies."""

from __future__ import annotations

from vsched.errors import ConfigError
from vsched.plugins import find_registered, load_registered
from vsched.worker.contract import WorkerPlugin

WORKER_GROUP = "vsched.workers"


def load_worker(name: str, *, path: str = "plugin") -> WorkerPlugin:
    """Import the worker plug-in that a name stands for.

    Raises:
        ConfigError: When there is no such name, it cannot be imported, or it is no `WorkerPlugin`.
    """
    plugin = load_registered(WORKER_GROUP, name, path=path, extra="pip install 'vsched[workers]'")
    if not isinstance(plugin, WorkerPlugin):
        raise ConfigError(
            f"{path}: worker plug-in {name!r} is a {type(plugin).__name__}, not an instance of "
            f"{WorkerPlugin.__module__}.{WorkerPlugin.__qualname__}. Remedy: derive its class from it."
        )
    return plugin


def check_worker_name(name: str, *, path: str = "plugin") -> None:
    """Check that a worker plug-in of this name is registered, without importing it.

    Raises:
        ConfigError: When there is no such name.
    """
    if ":" not in name:
        find_registered(WORKER_GROUP, name, path=path)
