"""vsched serves vision-language models: a deterministic scheduler with interchangeable policies.

The names here are the public API; the command line is `vsched`. Names are imported on first use, so that policies and
simulations do not wait for the import of the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.config import Config
    from vsched.engine import Engine
    from vsched.errors import (
        ConfigError,
        DeviceOutOfMemory,
        GroupLostError,
        MemoryLeak,
        RankDesync,
        RequestRefused,
        VschedError,
    )
    from vsched.offline import LLM
    from vsched.types import MediaItem, Request, SamplingParams

__all__ = [
    "LLM",
    "Config",
    "ConfigError",
    "DeviceOutOfMemory",
    "Engine",
    "GroupLostError",
    "MediaItem",
    "MemoryLeak",
    "RankDesync",
    "Request",
    "RequestRefused",
    "SamplingParams",
    "VschedError",
]
_MODULES = {
    "Config": "config",
    "Engine": "engine",
    "LLM": "offline",
    "MediaItem": "types",
    "Request": "types",
    "SamplingParams": "types",
}
"""Module of each name; all others are in `errors`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
