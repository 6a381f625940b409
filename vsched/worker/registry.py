"""Finds worker plug-ins by name, as `vsched.plugins` finds policies."""

from __future__ import annotations

from typing import cast

from vsched.errors import ConfigError
from vsched.plugins import find_registered, load_registered
from vsched.worker.contract import WorkerPlugin

WORKER_GROUP = "vsched.workers"
WORKER_METHODS = (
    "inspect",
    "check_parallel",
    "load_preprocessor",
    "load_encoder",
    "load_generator",
)


def load_worker(name: str, *, path: str = "plugin") -> WorkerPlugin:
    """Import the worker plug-in that a name stands for.

    Raises:
        ConfigError: When there is no such name, it cannot be imported, or methods are missing.
    """
    plugin = load_registered(WORKER_GROUP, name, path=path, extra="pip install 'vsched[workers]'")
    missing = [method for method in WORKER_METHODS if not callable(getattr(plugin, method, None))]
    if missing:
        raise ConfigError(f"{path}: worker plug-in {name!r} lacks {', '.join(missing)}")
    return cast("WorkerPlugin", plugin)


def check_worker_name(name: str, *, path: str = "plugin") -> None:
    """Check that a worker plug-in of this name is registered, without importing it.

    Raises:
        ConfigError: When there is no such name.
    """
    if ":" not in name:
        find_registered(WORKER_GROUP, name, path=path)
